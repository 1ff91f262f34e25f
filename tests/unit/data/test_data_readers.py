"""Reader processes: the same batches whoever reads them, in step with compute, and loud when something dies."""

from __future__ import annotations

import ctypes
import os
import pathlib
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from distbelief.data.readers import ReaderError, Readers, ReadersLost
from distbelief.data.rules.readerdeaths import MOST_IDLE
from distbelief.data.sources import MapStyle


class Computed:
    """A data set of 1000 samples, each what a function makes of its number."""

    def __init__(self, function: Callable[[int], Any]) -> None:
        self.function = function

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, sample: int) -> Any:
        return self.function(sample)


def readers(function: Callable[[int], Any], processes: int = 1, collate: Any = None) -> Readers:
    return Readers(MapStyle(Computed(function), collate), seed=5, processes=processes)


def samples(*numbers: int) -> Any:
    return np.array(numbers, dtype=np.int64)


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


def is_running(pid: int) -> bool:
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")")[-1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_batches_come_by_key_in_any_order() -> None:
    with readers(lambda sample: (torch.tensor([float(sample)]), sample), processes=2) as r:
        for step in range(4):
            for shard in range(3):
                r.request((step, shard), epoch=0, samples=samples(step, shard))
        for step in (3, 0, 2, 1):
            for shard in (2, 0, 1):
                x, y = r.take((step, shard))
                assert x.tolist() == [[step], [shard]]
                assert y.tolist() == [step, shard]
    assert r.pids == []


def test_samples_come_without_the_collate_if_they_are_asked_for_so() -> None:
    with readers(lambda sample: sample * 2, collate=lambda parts: 1 / 0) as r:
        r.request((0, 0), 0, samples(3, 4), collated=False)
        assert r.take((0, 0)) == [6, 8]


@pytest.mark.parametrize("processes", [1, 2])
def test_a_reader_that_begins_anew_has_read_nothing(processes: int) -> None:
    read: list[int] = []

    def count(sample: int) -> int:
        read.append(sample)
        return len(read)

    with readers(count, processes) as r:
        seen = []
        for number in range(6):
            r.request((0, number), 0, samples(number))
            seen += r.take((0, number)).tolist()
            if number in (1, 4):
                # as if a process that was forked meanwhile held it: the reader must end all the same
                kept = os.dup(r._readers[0].connection.fileno())
                first = r.pids[0]
                r.begin_anew()
                os.close(kept)
                assert not pathlib.Path(f"/proc/{first}").exists()
        assert seen == [1, 2, 1, 2, 3, 1]
        assert len(r.pids) == processes
        r.request((1, 0), 0, samples(7))
        with pytest.raises(ValueError, match="at work"):
            r.begin_anew()


def test_requests_are_not_read_twice_and_unknown_ones_are_refused(tmp_path: pathlib.Path) -> None:
    def read(sample: int) -> int:
        (tmp_path / f"{time.monotonic_ns()}").touch()
        return sample

    with readers(read) as r:
        for _ in range(3):
            r.request((0, 0), 0, samples(4))
        assert r.take((0, 0)).tolist() == [4]
        with pytest.raises(KeyError, match="not requested"):
            r.take((0, 0))
        with pytest.raises(ValueError, match="no samples"):
            r.request((0, 1), 0, samples())
    assert len(list(tmp_path.iterdir())) == 1


def augmented(sample: int) -> Any:
    return {"torch": torch.rand(3), "numpy": np.random.rand(3), "python": random.random(), "sample": sample}


def test_randomness_depends_on_the_sample_and_the_epoch_only() -> None:
    wanted = [samples(1, 2), samples(3), samples(2, 1, 9)]
    seen = []
    for processes, order in ((1, (0, 1, 2)), (3, (2, 1, 0)), (2, (1, 2, 0))):
        with readers(augmented, processes) as r:
            for number in order:
                r.request((0, number), epoch=4, samples=wanted[number])
            seen.append([r.take((0, number)) for number in range(3)])
            r.request((1, 0), epoch=5, samples=wanted[0])
            other_epoch = r.take((1, 0))
    for batches in seen[1:]:
        for a, b in zip(batches, seen[0], strict=True):
            assert all(torch.equal(a[name], b[name]) for name in a)
    first = seen[0][0]
    for name in ("torch", "numpy", "python"):
        assert torch.equal(first[name][0], seen[0][2][name][1]), "sample 1, alone or in another batch"
        assert not torch.equal(first[name][0], first[name][1]), "two samples differ"
        assert not torch.equal(first[name], other_epoch[name]), "two epochs differ"


def test_this_process_is_left_alone() -> None:
    torch.manual_seed(1)
    random.seed(1)
    before, threads = torch.get_rng_state(), torch.get_num_threads()
    expected = random.Random(1).random()
    with readers(augmented) as r:
        r.request((0, 0), 0, samples(1, 2, 3))
        r.take((0, 0))
        assert torch.equal(torch.get_rng_state(), before)
        assert random.random() == expected
        assert torch.get_num_threads() == threads


def test_the_child_has_one_thread_and_its_own_pid() -> None:
    torch.set_num_threads(2)
    try:
        with readers(lambda _: (torch.get_num_threads(), os.getpid())) as r:
            r.request((0, 0), 0, samples(0))
            threads, pid = r.take((0, 0))
            assert threads.tolist() == [1]
            assert pid.tolist() == r.pids
            assert pid.tolist() != [os.getpid()]
    finally:
        torch.set_num_threads(1)


def test_readers_go_on_while_nobody_takes_even_when_answers_are_large(tmp_path: pathlib.Path) -> None:
    """50 MB are far more than a socket's buffer holds; the second sample is read although the first is not taken."""

    def read(sample: int) -> torch.Tensor:
        (tmp_path / str(sample)).touch()
        return torch.full((12_500_000,), float(sample))

    with readers(read, processes=2) as r:
        for sample in range(6):
            r.request((0, sample), 0, samples(sample))
        wait_for(lambda: all((tmp_path / str(sample)).exists() for sample in range(4)))
        for sample in (5, 4, 3, 2, 1, 0):
            batch = r.take((0, sample))
            assert batch.shape == (1, 12_500_000)
            assert batch[0, 0] == sample
            assert batch[0, -1] == sample


def test_large_requests_do_not_block() -> None:
    many = np.arange(100_000) % 1000
    with readers(int, processes=2, collate=len) as r:
        for step in range(3):
            r.request((step, 0), 0, many)
        r.forget(lambda key: key == (2, 0))
        r.request((3, 0), 0, samples(1, 2))
        assert r.take((3, 0)) == 2


def test_a_taken_request_overtakes_those_that_wait(tmp_path: pathlib.Path) -> None:
    def read(sample: int) -> int:
        (tmp_path / str(sample)).touch()
        return sample

    with readers(read) as r:
        for sample in range(100):
            r.request((0, sample), 0, samples(sample))
        assert r.take((0, 99)).tolist() == [99]
        assert r.take((0, 50)).tolist() == [50]


def test_forgotten_answers_are_dropped_and_can_be_asked_for_again() -> None:
    with readers(lambda sample: sample, processes=2) as r:
        for step in range(10):
            r.request((step, 0), 0, samples(step))
        r.take((0, 0))
        r.forget(lambda key: key[0] in (3, 9))
        for step in (1, 2, 5, 8):
            with pytest.raises(KeyError):
                r.take((step, 0))
        r.request((1, 0), 0, samples(77))
        assert [r.take((step, 0)).tolist() for step in (1, 9, 3)] == [[77], [9], [3]]


def test_bfloat16_and_other_leaves_survive() -> None:
    def read(sample: int) -> Any:
        return {"x": torch.ones(2, 3, dtype=torch.bfloat16).t() * sample, "e": torch.ones(0), "s": f"text {sample}"}

    with readers(read) as r:
        r.request((0, 0), 0, samples(2, 3))
        batch = r.take((0, 0))
        assert batch["x"].dtype == torch.bfloat16
        assert batch["x"][1].tolist() == [[3.0, 3.0]] * 3
        assert batch["e"].shape == (2, 0)
        assert batch["s"] == ["text 2", "text 3"]


def broken_beyond_ten(sample: int) -> int:
    if sample > 10:
        raise ValueError(f"cannot decode {sample}")
    return sample


def test_an_exception_names_the_sample_and_brings_its_traceback() -> None:
    with readers(broken_beyond_ten) as r:
        r.request((0, 0), 0, samples(1, 2, 17, 3))
        r.request((0, 1), 0, samples(4))
        with pytest.raises(ReaderError) as caught:
            r.take((0, 0))
        assert caught.value.message == "reading sample 17 failed: ValueError: cannot decode 17"
        assert "in broken_beyond_ten" in caught.value.details
        assert "test_data_readers.py" in caught.value.details
        assert r.take((0, 1)).tolist() == [4], "an exception is not a death"


def test_an_exit_from_user_code_is_reported_too() -> None:
    with readers(lambda _: sys.exit(3)) as r:
        r.request((0, 0), 0, samples(8))
        with pytest.raises(ReaderError, match="reading sample 8 failed: SystemExit: 3"):
            r.take((0, 0))


def test_samples_that_do_not_go_together_are_named() -> None:
    with readers(torch.zeros) as r:
        r.request((0, 0), 0, samples(3, 4))
        with pytest.raises(ReaderError, match=r"making a batch of samples 3, 4 failed: RuntimeError: stack expects"):
            r.take((0, 0))


def test_a_batch_that_cannot_be_sent_is_an_error() -> None:
    with readers(lambda sample: sample, collate=lambda parts: lambda: parts) as r:
        r.request((0, 0), 0, samples(3))
        with pytest.raises(ReaderError, match=r"handing over the batch of sample 3 failed: .*lambda"):
            r.take((0, 0))


def kill_myself(sample: int) -> int:
    if sample == 13:
        os.kill(os.getpid(), signal.SIGKILL)
    return sample


def exit_silently(sample: int) -> int:
    if sample == 13:
        os._exit(3)
    return sample


def crash(sample: int) -> int:
    if sample == 13:
        import faulthandler

        faulthandler.disable()
        ctypes.string_at(0)
    return sample


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize(
    ("function", "ended", "hint"),
    [
        (kill_myself, "was killed by SIGKILL", "memory"),
        (exit_silently, "exited with status 3", "os._exit"),
        (crash, "was killed by SIGSEGV", "native code"),
    ],
)
def test_samples_that_kill_two_readers_are_named(
    function: Any, ended: str, hint: str, processes: int, capfd: pytest.CaptureFixture[str]
) -> None:
    with readers(function, processes) as r:
        pids = r.pids
        for step in range(20):
            r.request((step, 0), 0, samples(step, step + 100))
        with pytest.raises(ReaderError) as caught:
            _ = [r.take((step, 0)) for step in range(20)]
        assert "samples 13, 113 of the data set Computed have killed two readers" in caught.value.message
        assert ended in caught.value.message
        assert hint in caught.value.hint
        told = capfd.readouterr().err  # of the first death, by one of the first readers
        assert any(f"reader process {pid} {ended} while reading samples 13, 113; another" in told for pid in pids)
        r.request((30, 0), 0, samples(1))
        with pytest.raises(ReaderError, match="reader process"):  # and it stays that way
            r.take((30, 0))
    assert not any(is_running(pid) for pid in pids)


@pytest.mark.parametrize("processes", [1, 3])
def test_killed_readers_are_replaced_and_the_batches_have_the_same_bits(processes: int, tmp_path: pathlib.Path) -> None:
    """Killed while they read, with requests in work and waiting, and killed while idle."""
    gate = tmp_path / "gate"

    def gated(sample: int) -> Any:
        if sample == 50:
            (tmp_path / str(os.getpid())).touch()
            while not gate.exists():
                time.sleep(0.005)
        return augmented(sample)

    wanted = [samples(step, 50, step + 1) for step in range(6)]
    expected = []
    gate.touch()
    with readers(gated, processes) as r:
        for step, numbers in enumerate(wanted):
            r.request((step, 0), 3, numbers)
        expected = [r.take((step, 0)) for step in range(6)]
    gate.unlink()
    for file in tmp_path.iterdir():
        file.unlink()
    with readers(gated, processes) as r:
        first = r.pids
        for step, numbers in enumerate(wanted[:processes]):
            r.request((step, 0), 3, numbers)
        wait_for(lambda: all((tmp_path / str(pid)).exists() for pid in first))
        victim = first[0]
        os.kill(victim, signal.SIGKILL)
        wait_for(lambda: not is_running(victim))
        gate.touch()
        for step, numbers in enumerate(wanted):
            r.request((step, 0), 3, numbers)
        found = [r.take((step, 0)) for step in range(6)]
        assert victim not in r.pids
        assert len(r.pids) == processes
        for pid in (idle := r.pids):
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda pid=pid: not is_running(pid))
        r.request((9, 0), 3, wanted[2])
        found.append(r.take((9, 0)))
        assert not set(r.pids) & {*idle, *first}
    for one, other in zip(found, [*expected, expected[2]], strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_readers_that_die_before_they_have_begun_are_no_fault_of_the_samples() -> None:
    """They are killed one after the other, each with the request in its socket."""
    with readers(lambda sample: sample, processes=2) as r:
        first = r.pids
        for pid in first:
            os.kill(pid, signal.SIGSTOP)
        r.request((0, 0), 0, samples(1, 2))
        for pid in first:
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda pid=pid: not is_running(pid))
            r.forget(lambda key: True)
        assert r.take((0, 0)).tolist() == [1, 2]
        assert not set(r.pids) & set(first)


def test_deaths_at_requests_that_were_dropped_prove_nothing_about_the_samples(tmp_path: pathlib.Path) -> None:
    """A regroup drops requests; an unrelated kill epochs later would end the run."""
    gate = tmp_path / "gate"

    def gated(sample: int) -> int:
        (tmp_path / str(os.getpid())).touch()
        while not gate.exists():
            time.sleep(0.005)
        return sample

    with readers(gated, processes=1) as r:
        for attempt in range(3):
            r.request((attempt, 0), 0, samples(5))
            (pid,) = r.pids
            wait_for(lambda pid=pid: (tmp_path / str(pid)).exists())
            os.kill(pid, signal.SIGKILL)
            wait_for(lambda pid=pid: not is_running(pid))
            r.forget(lambda key: True)
            assert pid not in r.pids
            r.forget(lambda key: False)
        gate.touch()
        r.request((3, 0), 0, samples(5))
        assert r.take((3, 0)).tolist() == [5]


def test_readers_of_one_data_set_die_with_their_parent_which_says_so() -> None:
    with readers(lambda sample: sample, processes=2) as r:
        pids = r.pids
        parent = int(pathlib.Path(f"/proc/{pids[0]}/stat").read_text().rsplit(")")[-1].split()[1])
        assert pathlib.Path(f"/proc/{parent}/comm").read_text() == "reader parent\n"
        assert pathlib.Path(f"/proc/{pids[0]}/comm").read_text() == "reader\n"
        os.kill(parent, signal.SIGKILL)
        wait_for(lambda: not any(is_running(pid) for pid in pids))
        r.request((0, 0), 0, samples(1))
        with pytest.raises(ReadersLost, match="the process that forks the readers of the data set Computed is dead"):
            r.take((0, 0))


def test_a_lock_that_is_held_here_is_free_in_a_replacement(tmp_path: pathlib.Path) -> None:
    """A replacement is no fork of this process, whose threads may hold any lock."""
    lock = threading.Lock()
    died = tmp_path / "died"

    def read(sample: int) -> int:
        if sample == 1 and not died.exists():
            died.touch()
            os._exit(1)
        with lock:
            return sample

    with readers(read) as r, lock:
        r.request((0, 0), 0, samples(1, 2))
        assert r.take((0, 0), timeout_s=100).tolist() == [1, 2]


def test_readers_that_die_without_reading_anything_are_not_forked_for_ever() -> None:
    with readers(lambda sample: sample) as r:
        seen = []
        for _ in range(MOST_IDLE):
            seen += r.pids
            os.kill(r.pids[0], signal.SIGKILL)
            wait_for(lambda pid=seen[-1]: not is_running(pid))
            r.forget(lambda key: True)
        assert len(set(seen)) == MOST_IDLE
        r.request((0, 0), 0, samples(1))
        with pytest.raises(ReaderError, match=rf"{MOST_IDLE} readers of the data set Computed died .* by SIGKILL"):
            r.take((0, 0))


def test_a_death_is_noticed_although_a_grandchild_keeps_the_connection_open(tmp_path: pathlib.Path) -> None:
    release = tmp_path / "release"

    def read(_: int) -> None:
        if os.fork() == 0:
            while not release.exists():
                time.sleep(0.01)
            os._exit(0)
        os._exit(4)

    try:
        with readers(read) as r:
            r.request((0, 0), 0, samples(6))
            with pytest.raises(ReaderError, match="exited with status 4 while reading sample 6"):
                r.take((0, 0))
    finally:
        release.touch()


def test_ctrl_c_is_the_parents_business() -> None:
    with readers(lambda sample: sample) as r:
        r.request((0, 0), 0, samples(1))
        r.take((0, 0))
        os.kill(r.pids[0], signal.SIGINT)
        r.request((0, 1), 0, samples(2))
        assert r.take((0, 1)).tolist() == [2]


def test_taking_can_have_a_limit_and_be_tried_again(tmp_path: pathlib.Path) -> None:
    go = tmp_path / "go"

    def read(sample: int) -> int:
        wait_for(go.exists)
        return sample

    with readers(read) as r:
        r.request((0, 0), 0, samples(1))
        with pytest.raises(TimeoutError):
            r.take((0, 0), timeout_s=0.05)
        go.touch()
        assert r.take((0, 0)).tolist() == [1]


def test_closing_kills_busy_readers_and_leaves_nothing() -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    r = readers(lambda _: time.sleep(1000), processes=3)
    pids = r.pids
    for step in range(10):
        r.request((step, 0), 0, samples(step))
    r.close()
    r.close()
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_two_sets_of_readers_do_not_disturb_each_other() -> None:
    with readers(lambda sample: sample) as first, readers(lambda sample: -sample, processes=2) as second:
        for r in (first, second):
            r.request((0, 0), 0, samples(1, 2))
        assert second.take((0, 0)).tolist() == [-1, -2]
        second.close()
        assert first.take((0, 0)).tolist() == [1, 2]


def test_what_the_data_set_prints_is_seen_once(capfd: pytest.CaptureFixture[str]) -> None:
    print("before the fork")
    with readers(lambda sample: print(f"reading {sample}") or sample) as r:
        r.request((0, 0), 0, samples(7))
        r.take((0, 0))
    assert capfd.readouterr().out == "before the fork\nreading 7\n"


ORPHANS = """
import os, signal, numpy as np
from distbelief.data.readers import Readers
from distbelief.data.sources import MapStyle
readers = Readers(MapStyle(range(10)), seed=0, processes=2)
readers.request((0, 0), 0, np.array([1]))
readers.take((0, 0))
print(*readers.pids, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_readers_do_not_outlive_a_killed_trainer() -> None:
    trainer = subprocess.run([sys.executable, "-c", ORPHANS], capture_output=True, text=True, timeout=300, check=False)
    assert trainer.returncode == -signal.SIGKILL, trainer.stderr
    pids = [int(pid) for pid in trainer.stdout.split()]
    assert len(pids) == 2
    wait_for(lambda: not any(is_running(pid) for pid in pids))
