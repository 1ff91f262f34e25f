"""Limits of the machine, in real control groups. On processes: a start fails, says why and is tried again, and nothing
else ends. On memory: the cache of files is no obstacle. On open files: raised."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests.support.runs.cgroup import Group, limited
from tests.support.runs.command import JOBS, Run
from tests.support.runs.reference import undisturbed
from tests.support.runs.saved import notices
from tests.support.runs.watched import Wait, Watched

Start = Callable[..., Run]

MANY = 10_000


@pytest.fixture
def group() -> Iterator[Group]:
    with limited({"pids": MANY}) as made:
        yield made


def test_a_worker_that_cannot_be_forked_is_started_when_there_is_room(
    start: Start, tmp_path: Path, wait_until: Wait, group: Group
) -> None:
    job = [JOBS / "small.py", "--set", "hold_step=6"]
    run = Watched(lambda *arguments: start(*arguments, prefix=group.inside), tmp_path, wait_until, *job, "--workers", 3)
    run.after(6)
    members = run.members()
    assert len(members) == 3
    group.limit("pids", 1)
    run.kill([2])
    run.wait_until(lambda: any("the next one is started in 2 s" in text for text in notices(run.folder)))
    (said,) = [text for text in notices(run.folder) if text.startswith("worker 3 ")]
    assert f"pids.max of the control group {group.folder}: 1, in use" in said
    assert "it could not be started" in (run.folder / "logs" / "worker-3.log").read_text()
    group.limit("pids", MANY)
    run.wait_until(lambda: len(run.members()) == 3 and max(run.members()) > 3)
    assert run.result()["weights_sha256"] == undisturbed(*job)


def test_a_coordinator_that_cannot_be_started_again_is_started_when_there_is_room(
    start: Start, tmp_path: Path, wait_until: Wait, group: Group
) -> None:
    job = [JOBS / "small.py", "--set", "hold_step=6"]
    run = Watched(lambda *arguments: start(*arguments, prefix=group.inside), tmp_path, wait_until, *job, "--workers", 2)
    run.after(6)
    group.limit("pids", 1)
    os.kill(run.coordinator(), signal.SIGKILL)
    run.wait_until(lambda: group.refused() >= 3)
    group.limit("pids", MANY)
    run.release()
    outcome = run.run.wait()
    assert outcome.json["weights_sha256"] == undisturbed(*job)
    refused = "the coordinator could not be started: no more processes are allowed here"
    assert outcome.stderr.count(refused) == 1, outcome
    assert f"pids.max of the control group {group.folder}: 1, in use" in outcome.stderr


def test_a_run_that_cannot_start_any_process_says_why(start: Start, group: Group) -> None:
    group.limit("pids", 1)
    outcome = start("train", JOBS / "small.py", "--workers", 2, prefix=group.inside).wait()
    assert outcome.status == 1, outcome
    assert "error: the process that starts workers could not be started: no more processes are" in outcome.stderr
    assert "pids.max" in outcome.stderr
    assert "Aborted" not in outcome.stdout + outcome.stderr


def test_a_zygote_that_is_killed_before_it_can_fork_is_an_error_and_no_abort(
    start: Start, tmp_path: Path, wait_until: Wait
) -> None:
    run = start("train", JOBS / "small.py", "--workers", 2, "--run-dir", "run")

    def zygote() -> list[psutil.Process]:
        try:
            children = psutil.Process(run.pid).children()
            return [child for child in children if "distbelief.launch.zygote" in child.cmdline()]
        except psutil.Error:
            return []

    wait_until(zygote)
    for process in zygote():
        process.kill()
    outcome = run.wait()
    assert outcome.status == 1, outcome
    assert "error: the process that starts workers" in outcome.stderr, outcome
    assert "Aborted" not in outcome.stdout + outcome.stderr


def test_a_worker_that_can_start_no_thread_is_replaced(start: Start, tmp_path: Path) -> None:
    outcome = start("train", JOBS / "without_threads.py", "--workers", 2, "--run-dir", "run", "--json").wait()
    assert outcome.json["weights_sha256"] == undisturbed(JOBS / "small.py")
    assert "this worker ends: a thread could not be started: no more processes are allowed here (" in outcome.stderr


READERS = """
import os, signal, sys
import numpy as np
from distbelief.data.readers import Readers
from distbelief.data.sources import as_source
with Readers(as_source(list(range(100))), seed=0, processes=2) as readers:
    print(*readers.pids, flush=True)
    input()
    for pid in readers.pids:
        os.kill(pid, signal.SIGKILL)
    readers.request((0, 0), 0, np.array([5, 7]))
    try:
        readers.take((0, 0), timeout_s=1.0)
    except TimeoutError:
        print("waits", flush=True)
    input()
    print(readers.take((0, 0)).tolist(), len(set(readers.pids)), flush=True)
"""


def test_readers_that_cannot_be_forked_are_forked_when_there_is_room(group: Group) -> None:
    command = [*group.inside, sys.executable, "-c", READERS]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert len(process.stdout.readline().split()) == 2
        group.limit("pids", 1)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "waits\n"
        group.limit("pids", MANY)
        rest, said = process.communicate("\n", timeout=300)
    assert rest == "[5, 7] 2\n", said
    assert (
        f"could not be started: no more processes are allowed here (pids.max of the control group {group.folder}"
        in said
    )


HUNGRY = """
import numpy as np
from distbelief.data.readers import Readers
from distbelief.data.sources import as_source

class Images:
    def __len__(self):
        return 100

    def __getitem__(self, index):
        return index + len(b"x" * (300 << 20)) % 2

with Readers(as_source(Images()), seed=0, processes=1) as readers:
    print(*readers.pids, flush=True)
    input()
    readers.request((0, 0), 0, np.array([5, 7]))
    print(readers.take((0, 0)).tolist(), *readers.pids, flush=True)
"""


@pytest.mark.skipif(psutil.swap_memory().total > 0, reason="where there is swap, the kernel does not kill at the limit")
def test_a_reader_that_the_kernel_kills_at_a_memory_limit_is_replaced() -> None:
    """Only the first reader is in the group with the limit."""
    with limited({"memory": 100 << 20}) as small:
        command = [sys.executable, "-c", HUNGRY]
        with subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            first = process.stdout.readline().strip()
            (small.folder / "cgroup.procs").write_text(first)
            rest, said = process.communicate("\n", timeout=300)
    numbers, _, second = rest.strip().rpartition(" ")
    assert numbers == "[5, 7]", said
    assert second != first
    assert f"reader process {first} was killed by SIGKILL while reading samples 5, 7; another one reads" in said


def test_a_regroup_in_a_container_that_is_full_of_page_cache(start: Start, tmp_path: Path, wait_until: Wait) -> None:
    """A worker is killed when less of the container's limit is unused than the others' new slots and its replacement
    need: the cache gives way."""
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(1 << 30)
    with limited({"memory": 1 << 40}) as group:
        job = [JOBS / "small.py", "--set", "hold_step=6", "--set", "width=400000"]  # 14 MB of parameters
        inside = group.inside
        run = Watched(lambda *arguments: start(*arguments, prefix=inside), tmp_path, wait_until, *job, "--workers", 3)
        run.after(6)
        limit = group.used("memory") + (700 << 20)
        group.limit("memory", limit)
        refill = f"while cat {large} > /dev/null; do sleep 0.1; done"  # also what the dead worker leaves unused
        cache = subprocess.Popen([*inside, "/bin/sh", "-c", refill], start_new_session=True)
        try:
            wait_until(lambda: limit - group.used("memory") < 16 << 20)
            run.kill([2])
            run.wait_until(lambda: len(run.members()) == 3 and max(run.members()) > 2)
            assert run.result()["weights_sha256"] == undisturbed(*job)
        finally:
            os.killpg(cache.pid, signal.SIGKILL)
            cache.wait()


REGROUP = """
import gc, socket, sys, threading
import numpy as np, torch
from distbelief.controlgroups import own_memory_room
from distbelief.errors import NotEnoughMemory
from distbelief.transport.abort import Abort
from distbelief.transport.exchange import Contribution, Geometry, Source, StepPlan, Tile
from distbelief.transport.shm.controlblock import GenerationMemory
from distbelief.transport.shm.exchange import SharedExchange
from distbelief.transport.shm.segment import SegmentClient
from distbelief.transport.shm.segmentserver import SegmentServer

class Server(SegmentServer):
    def _find(self, name, size_bytes):
        try:
            return super()._find(name, size_bytes)
        except NotEnoughMemory:
            print("refused", flush=True)
            raise

ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server, segments = Server(), SegmentClient(theirs)
def serve():
    while True:
        server.answer(ours)
threading.Thread(target=serve, daemon=True).start()
size_bytes = 64 << 20
tile = Tile(0, torch.float32, 0, size_bytes // 4)
geometry = Geometry([tile], size_bytes, [4], 8, 1)
def show(number):
    return exchange.slot(number).tensor(tile.dtype, 0, tile.numel)

exchange = SharedExchange(segments, "generation 1", 0, geometry, Abort())
exchange.gather(b"")
if sys.argv[1] == "full":  # four slots, of which one has a published sum
    exchange.begin(StepPlan(5, [Source(0, 2)], 0))
    show(2).fill_(7)
    exchange.publish(0)
    exchange.share(Contribution(np.zeros((8, 4)), [(0, 4)], [((0, 4), 2)], np.zeros(1, bool), b""))
exchange.close()
exchange = None
gc.collect()
print((1 << 40) - own_memory_room().free, flush=True)
input()
past = [GenerationMemory("generation 1", geometry)]
exchange = SharedExchange(segments, "generation 2", 0, geometry, Abort(), past)
exchange.gather(b"")
held = [one.source for one in exchange.published_sums(5) or []]
exchange.begin(StepPlan(5, [*held, Source(0, 0)], (0, 1) if held else 0))
for number in range(3):
    show(number).fill_(number)
exchange.publish(0)
exchange.share(Contribution(np.zeros((8, 4)), [(4, 8)], [((4, 8), 0)], np.zeros(1, bool), b""))
total = exchange.reduced(0)
exchange.applied()
exchange.settle()
exchange.begin(StepPlan(6, [Source(0, 0)], 0))
show(3).fill_(3)
print(held, total.min().item(), total.max().item(), flush=True)
"""
SLACK = 120 << 20
"""Less than two of the four slots."""


def test_a_generation_that_needs_the_memory_of_the_one_before_gets_it() -> None:
    """Old and new slots together do not fit: what the new generation does not take over is released first."""
    with limited({"memory": 1 << 40}) as group:
        command = [*group.inside, sys.executable, "-c", REGROUP, "full"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            group.limit("memory", int(process.stdout.readline()) + SLACK)
            rest, _ = process.communicate("\n", timeout=300)
    assert rest == "[Source(rank=0, slot=2, back=1)] 7.0 7.0\n"
    assert process.returncode == 0


BALLAST = """
held = b"x" * (400 << 20)
print("held", flush=True)
input()
"""


def test_a_generation_waits_for_the_memory_of_a_process_that_is_about_to_be_gone() -> None:
    with (
        limited({"memory": 1 << 40}) as group,
        subprocess.Popen(
            [*group.inside, sys.executable, "-c", BALLAST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as dying,
    ):
        assert dying.stdout is not None
        assert dying.stdout.readline() == "held\n"
        command = [*group.inside, sys.executable, "-c", REGROUP, "empty"]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            group.limit("memory", int(process.stdout.readline()) + SLACK)
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "refused\n"
            dying.kill()
            rest, _ = process.communicate(timeout=300)
    assert rest.endswith("[] 0.0 0.0\n")
    assert process.returncode == 0


def test_every_process_of_a_run_may_open_as_many_files_as_the_hard_limit_allows(
    start: Start, tmp_path: Path, wait_until: Wait
) -> None:
    few = ["/bin/sh", "-c", 'ulimit -Sn 256 && ulimit -Hn 3000 && exec "$@"', "few"]
    job = [JOBS / "small.py", "--set", "hold_step=3", "--strategy", "ps:sync", "--workers", 2]
    run = Watched(lambda *arguments: start(*arguments, prefix=few), tmp_path, wait_until, *job)
    run.after(3)
    processes = [psutil.Process(run.run.pid), *psutil.Process(run.run.pid).children(recursive=True)]
    assert {*run.members().values(), *run.servers().values(), run.coordinator()} <= {one.pid for one in processes}
    limits = {one.pid: one.rlimit(psutil.RLIMIT_NOFILE) for one in processes}
    assert set(limits.values()) == {(3000, 3000)}, limits
    run.result()
