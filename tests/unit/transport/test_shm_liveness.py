"""A thread's death is seen by another process, and its ordinary end is not taken for one."""

from __future__ import annotations

import faulthandler
import gc
import mmap
import os
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from distbelief.transport.shm import futexflags
from distbelief.transport.shm.futexflags import LIVENESS_BYTES, ThreadLiveness


@pytest.fixture(autouse=True, params=["this glibc", "glibc before 2.30"])
def glibc(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param != "this glibc":
        monkeypatch.setattr(futexflags, "_clock_lock", None)
    return str(request.param)


class Child:
    """A process that begins a life in shared memory, says so, and then does as it is told."""

    def __init__(self, memory: mmap.mmap, what: Callable[[ThreadLiveness], None]) -> None:
        began, self._began = os.pipe()
        self.told, told = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            faulthandler.disable()  # pytest's would print a page for a death that is wanted
            life = ThreadLiveness(memory, 0)
            life.begin()
            os.write(self._began, b"x")
            os.read(self.told, 1)
            what(life)
            os._exit(0)
        os.read(began, 1)
        self.go = lambda: os.write(told, b"x")


@pytest.fixture
def child() -> Iterator[Callable[[Callable[[ThreadLiveness], None]], tuple[Child, ThreadLiveness]]]:
    made: list[Child] = []

    def make(what: Callable[[ThreadLiveness], None]) -> tuple[Child, ThreadLiveness]:
        memory = mmap.mmap(-1, LIVENESS_BYTES)
        made.append(Child(memory, what))
        return made[-1], ThreadLiveness(memory, 0)

    yield make
    for one in made:
        os.kill(one.pid, signal.SIGKILL)
        os.waitpid(one.pid, 0)


def end(life: ThreadLiveness) -> None:
    life.end()
    signal.pause()


def test_while_it_lives_nothing_is_seen(child) -> None:
    _, life = child(lambda life: None)
    assert life.watch(0.01) == "alive"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_signal_that_kills_is_a_death(child, number: signal.Signals) -> None:
    process, life = child(lambda life: os.kill(os.getpid(), number))
    process.go()
    assert life.watch(60) == "dead"


def test_an_exit_without_a_word_is_a_death(child) -> None:
    process, life = child(lambda life: os._exit(0))
    process.go()
    assert life.watch(60) == "dead"


def test_ending_is_not_dying(child) -> None:
    process, life = child(end)
    process.go()
    assert life.watch(60) == "ended"


def test_a_frozen_process_is_not_dead(child) -> None:
    process, life = child(lambda life: None)
    os.kill(process.pid, signal.SIGSTOP)
    assert life.watch(0.05) == "alive"


def test_whoever_waits_is_woken(child) -> None:
    process, life = child(lambda life: os.kill(os.getpid(), signal.SIGKILL))
    seen: list[str] = []
    watcher = threading.Thread(target=lambda: seen.append(life.watch(60)))
    watcher.start()
    process.go()
    watcher.join()
    assert seen == ["dead"]


def test_a_held_life_keeps_its_memory_when_nobody_else_does() -> None:
    """glibc's list of held mutexes goes through them: the next one taken would crash the process."""
    ThreadLiveness(mmap.mmap(-1, LIVENESS_BYTES), 0).begin()
    gc.collect()
    second = ThreadLiveness(mmap.mmap(-1, LIVENESS_BYTES), 0)
    second.begin()
    second.end()


def test_a_clock_that_is_set_back_lengthens_no_wait(child, monkeypatch: pytest.MonkeyPatch) -> None:
    _, life = child(lambda life: None)
    with monkeypatch.context() as patch:
        patch.setattr(futexflags.time, "time", lambda: pytest.fail("a clock that can be set was read"))
        assert life.watch(0.05) == "alive"
