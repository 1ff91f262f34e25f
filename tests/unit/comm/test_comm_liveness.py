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

from distbelief.transport.shm.liveness import LIFE_BYTES, Life


class Child:
    """A process that begins a life in shared memory, says so, and then does as it is told."""

    def __init__(self, memory: mmap.mmap, what: Callable[[Life], None]) -> None:
        began, self._began = os.pipe()
        self.told, told = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            faulthandler.disable()  # pytest's would print a page for a death that is wanted
            life = Life(memory, 0)
            life.begin()
            os.write(self._began, b"x")
            os.read(self.told, 1)
            what(life)
            os._exit(0)
        os.read(began, 1)
        self.go = lambda: os.write(told, b"x")


@pytest.fixture
def child() -> Iterator[Callable[[Callable[[Life], None]], tuple[Child, Life]]]:
    made: list[Child] = []

    def make(what: Callable[[Life], None]) -> tuple[Child, Life]:
        memory = mmap.mmap(-1, LIFE_BYTES)
        made.append(Child(memory, what))
        return made[-1], Life(memory, 0)

    yield make
    for one in made:
        os.kill(one.pid, signal.SIGKILL)
        os.waitpid(one.pid, 0)


def end(life: Life) -> None:
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
    Life(mmap.mmap(-1, LIFE_BYTES), 0).begin()
    gc.collect()
    second = Life(mmap.mmap(-1, LIFE_BYTES), 0)
    second.begin()
    second.end()
