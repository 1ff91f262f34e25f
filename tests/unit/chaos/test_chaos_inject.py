"""Faults on real processes. The run directory is written by the test, as a coordinator would write it."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from distbelief.chaos.inject import Injector
from distbelief.chaos.relay import Relay
from distbelief.chaos.rules.schedule import parse
from distbelief.chaos.terminal import Terminals
from distbelief.coordinator.journal import Journal
from distbelief.errors import DistBeliefError

PATIENCE_S = 60


class Stage:
    """Processes that stand for workers and a coordinator, and the files that tell of them."""

    def __init__(self, run_dir: Path, journal: Journal) -> None:
        self.run_dir = run_dir
        self.lines: list[str] = []
        self.asked: list[int] = []
        self.workers: dict[int, subprocess.Popen[bytes]] = {}
        self.served: dict[int, subprocess.Popen[bytes]] = {}
        self._journal = journal
        self._generation = 0
        self._all: list[subprocess.Popen[bytes]] = []

    def process(self) -> subprocess.Popen[bytes]:
        self._all.append(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]))
        return self._all[-1]

    def members(self, *workers: int) -> None:
        """Start a generation of these workers; new ones get a process."""
        for worker in workers:
            self.workers.setdefault(worker, self.process())
        self._generation += 1
        listed = [{"worker": w, "host": "h", "pid": self.workers[w].pid, "shards": [0, 1]} for w in workers]
        self._journal.append(
            {"kind": "generation", "generation": self._generation, "members": listed, "at": time.time(), "lost": []}
        )

    def servers(self, *numbers: int, doubled: bool = True) -> None:
        """A map of these parameter servers; new ones get a process."""
        for number in numbers:
            self.served.setdefault(number, self.process())
        listed = [{"number": number, "pid": self.served[number].pid} for number in numbers]
        placed = {"map": {"backups": [0 if doubled else -1]}, "recruits": [-1]}
        self._journal.append({"kind": "servers", "servers": listed, "placement": placed, "at": time.time()})

    def step(self, committed: int) -> None:
        with (self.run_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"kind": "step", "step": committed - 1, "at": time.time()}) + "\n")

    def coordinator(self, pid: int, address: str = "tcp://127.0.0.1:1") -> None:
        written = self.run_dir / "new.json"
        written.write_text(json.dumps({"pid": pid, "address": address, "epoch": 1, "secret": ""}))
        written.rename(self.run_dir / "coordinator.json")

    def end(self) -> None:
        self._journal.append({"kind": "ended", "status": "completed", "at": time.time()})

    def ask(self, workers: int) -> str:
        self.asked.append(workers)
        if len(self.asked) == 1:
            raise DistBeliefError("nobody is there")
        return ""

    def resume(self) -> None:
        self._journal.append({"kind": "resumed", "at": time.time()})

    def injector(
        self,
        text: str,
        relay: Relay | None = None,
        workers: int = 3,
        seed: int = 0,
        terminals: Terminals | None = None,
    ) -> Injector:
        return Injector(
            self.run_dir,
            parse(text),
            workers=workers,
            seed=seed,
            relay=relay,
            terminals=terminals,
            ask=self.ask,
            say=self.lines.append,
        )

    def gone(self) -> set[int]:
        return {worker for worker, process in self.workers.items() if process.poll() is not None}

    def stopped(self, worker: int) -> bool:
        return psutil.Process(self.workers[worker].pid).status() == psutil.STATUS_STOPPED

    def close(self) -> None:
        for process in self._all:
            process.kill()
            process.wait()


@pytest.fixture
def stage(tmp_path: Path) -> Iterator[Stage]:
    with Journal.open(tmp_path / "journal.jsonl") as journal:
        made = Stage(tmp_path, journal)
        yield made
        made.close()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def test_a_kill_comes_at_its_step_and_not_before(stage: Stage) -> None:
    with stage.injector("kill worker 1 at step 5, join at step 900") as injector:
        stage.members(0, 1, 2)
        stage.step(4)
        time.sleep(0.1)  # long enough for a blow that comes too early
        assert stage.gone() == set()
        stage.step(5)
        until(lambda: stage.gone() == {1})
        assert stage.workers[1].wait() == -signal.SIGKILL
    (note,) = injector.notes
    assert (note.kind, note.worker, note.text) == ("kill worker", 1, "kill worker 1 at step 5")
    assert stage.lines == [f"fault: kill worker 1 at step 5 (worker 1, process {stage.workers[1].pid})"]
    assert injector.missed == ["join at step 900 (the run ended before)"]
    assert [record["kind"] for record in injector.journal] == ["epoch", "generation"]


def test_a_reader_is_killed_and_not_its_worker(stage: Stage) -> None:
    """The process that stands for worker 1 has a child, whose child has the name of a reader."""
    reader = "import time; from distbelief.lifeline import name_process; name_process('reader'); time.sleep(600)"
    parent = f"import subprocess, sys; print(subprocess.run([sys.executable, '-c', {reader!r}]).returncode, flush=True)"
    worker = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {parent!r}]); import time; time.sleep(600)"
    stage.workers[1] = subprocess.Popen([sys.executable, "-c", worker], stdout=subprocess.PIPE)
    try:
        with stage.injector("kill reader 1, kill reader 0 at step 1") as injector:
            stage.members(0, 1)
            stage.step(1)
            until(lambda: injector.notes)
            output = stage.workers[1].stdout
            assert output is not None
            assert output.readline() == b"-9\n"
        assert stage.gone() == set()
        assert [(note.kind, note.worker) for note in injector.notes] == [("kill reader", None)]
        assert injector.missed == ["kill reader 0 at step 1 (no reader process was found)"]
    finally:
        stage.workers[1].kill()
        stage.workers[1].communicate()


def test_a_terminal_is_dropped_again_only_when_the_run_trains_again(stage: Stage) -> None:
    """The command writes a line when SIGHUP reaches it, and ends when it has a second one."""
    script = "import signal, sys; signal.signal(signal.SIGHUP, lambda *_: sys.exit(129)); print('up'); signal.pause()"
    command = [sys.executable, "-uc", script]
    shown, ended = io.StringIO(), []
    with Terminals(shown) as terminals, stage.injector("drop terminal, drop terminal", terminals=terminals) as injector:
        runs = threading.Thread(target=lambda: ended.extend(terminals.run(command) for _ in range(2)))
        runs.start()
        until(lambda: shown.getvalue() == "up\n")
        stage.members(0, 1)
        until(lambda: len(ended) == 1)
        stage.end()
        until(lambda: shown.getvalue() == "up\nup\n")
        stage.resume()
        time.sleep(0.1)  # long enough for a blow that comes too early
        assert len(injector.notes) == 1
        stage.members(2, 3)
        runs.join()
    assert ended == [(129, True), (129, True)]
    assert [note.kind for note in injector.notes] == ["drop terminal"] * 2


def test_a_server_is_killed_when_others_have_what_it_has(stage: Stage) -> None:
    def gone() -> set[int]:
        return {number for number, process in stage.served.items() if process.poll() is not None}

    with stage.injector("kill server 1, kill server 1 at step 2") as injector:
        stage.servers(0, 1, doubled=False)
        stage.members(0, 1)
        time.sleep(0.1)  # long enough for a blow that comes too early
        assert gone() == set()
        stage.servers(0, 1)
        until(lambda: gone() == {1})
        stage.step(2)
        time.sleep(0.1)  # the map still has the dead one
        assert gone() == {1}
        stage.servers(0, 2)
        until(lambda: gone() == {1, 2})  # whoever stands in for it
    assert [(note.kind, note.worker, note.server) for note in injector.notes] == [
        ("kill server", None, 1),
        ("kill server", None, 2),
    ]
    assert injector.missed == []


def test_a_random_victim_follows_from_the_seed(stage: Stage) -> None:
    stage.members(0, 1, 2)
    with stage.injector("slow worker by 2x, slow worker by 2x", seed=3) as first:
        until(lambda: len(first.notes) == 2)
    with stage.injector("slow worker by 2x, slow worker by 2x", seed=3) as second:
        until(lambda: len(second.notes) == 2)
    assert [note.worker for note in first.notes] == [note.worker for note in second.notes]


def test_whoever_is_in_the_place_of_a_worker_that_is_gone(stage: Stage) -> None:
    with stage.injector("kill worker 1 at step 1, kill worker 1 at step 2") as injector:
        stage.members(0, 1, 2)
        stage.step(1)
        until(lambda: stage.gone() == {1})
        stage.members(0, 2, 3)
        stage.step(2)
        until(lambda: len(stage.gone()) == 2)
    assert stage.gone() == {1, 2}
    assert [note.worker for note in injector.notes] == [1, 2]


def test_the_last_one_that_could_go_on_is_spared(stage: Stage) -> None:
    with stage.injector("freeze worker 0, kill worker every 1 steps", workers=2) as injector:
        stage.members(0, 1)
        until(lambda: stage.stopped(0))
        stage.step(1)
        until(lambda: stage.gone() == {0})  # worker 1 is the only one that is not hurt
        stage.step(2)
        time.sleep(0.1)
        assert stage.gone() == {0}
        stage.members(1, 2)
        until(lambda: len(stage.gone()) == 2)
        stage.step(3)
        until(lambda: injector.missed)
    assert len(stage.gone()) == 2
    assert injector.missed == ["kill worker every 1 steps (no member would have been left)"]


def test_a_single_worker_is_killed_if_that_is_what_was_asked_for(stage: Stage) -> None:
    with stage.injector("kill worker 0", workers=1):
        stage.members(0)
        until(lambda: stage.gone() == {0})


def test_a_freeze_ends_by_itself_or_with_the_run(stage: Stage) -> None:
    with stage.injector("freeze worker 0 for 100ms, freeze worker 1"):
        stage.members(0, 1, 2)
        until(lambda: stage.stopped(1))
        until(lambda: not stage.stopped(0))
        assert stage.stopped(1)
        stage.end()
        until(lambda: not stage.stopped(1))
    assert stage.gone() == set()


def test_leaving_is_asked_for_and_the_number_wanted_follows(stage: Stage) -> None:
    with stage.injector("leave worker 2 at step 1, join at step 2, scale to 5 at step 3"):
        stage.members(0, 1, 2)
        stage.step(1)
        until(lambda: stage.gone() == {2})
        assert stage.workers[2].wait() == -signal.SIGTERM
        stage.step(2)
        until(lambda: stage.asked == [3, 3])  # the first time nobody answered
        stage.step(3)
        until(lambda: stage.asked == [3, 3, 5])


def test_a_coordinator_that_is_gone_is_waited_for(stage: Stage) -> None:
    first, second = stage.process(), stage.process()
    stage.members(0)
    stage.coordinator(first.pid)
    with stage.injector("kill coordinator, kill coordinator") as injector:
        assert first.wait(PATIENCE_S) == -signal.SIGKILL
        time.sleep(0.1)
        assert len(injector.notes) == 1
        stage.coordinator(second.pid)
        assert second.wait(PATIENCE_S) == -signal.SIGKILL
    assert [note.kind for note in injector.notes] == ["kill coordinator"] * 2


def test_a_process_that_is_not_ours_is_never_touched(stage: Stage) -> None:
    stage.members(0)
    stage.coordinator(os.getppid())
    with stage.injector("kill coordinator") as injector:
        time.sleep(0.1)
    assert injector.notes == []


def test_a_line_is_cut_and_mended(stage: Stage) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, Relay() as relay:
        server.settimeout(PATIENCE_S)
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        host, port = relay.dial(1, address).removeprefix("tcp://").split(":")
        stage.coordinator(stage.process().pid, address)
        with (
            socket.create_connection((host, int(port)), PATIENCE_S) as near,
            server.accept()[0] as far,
            stage.injector("cut worker 1 for 200ms", relay) as injector,
        ):
            far.settimeout(PATIENCE_S)
            stage.members(0, 1)
            until(lambda: injector.notes)
            near.sendall(b"x")
            assert far.recv(1) == b"x"


def test_what_goes_wrong_in_the_thread_is_raised(stage: Stage) -> None:
    stage.coordinator(1)
    (stage.run_dir / "coordinator.json").write_text('{"address": "tcp://127.0.0.1:1"}')
    stage.members(0)
    with pytest.raises(KeyError), stage.injector("kill coordinator"):
        until(lambda: all(thread.name != "faults" for thread in threading.enumerate()))
