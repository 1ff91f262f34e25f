"""Signals reach our own processes, and nobody else's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import psutil
import pytest

from distbelief.chaos.inject import Throttle, catch

PATIENCE_S = 60


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        yield process
        process.kill()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)


def stopped(process: subprocess.Popen[bytes]) -> bool:
    return psutil.Process(process.pid).status() == psutil.STATUS_STOPPED


def test_holds_are_counted(child: subprocess.Popen[bytes]) -> None:
    victim = catch(child.pid)
    assert victim is not None
    victim.hold()
    victim.hold()
    until(lambda: stopped(child))
    victim.let_go()
    assert stopped(child)
    victim.let_go()
    until(lambda: not stopped(child))
    victim.hold()
    victim.close()  # lets it go, whatever held it
    until(lambda: not stopped(child))
    assert not victim.alive
    assert not victim.kill()
    victim.close()
    assert child.poll() is None


def test_a_killed_process_is_gone_even_before_it_is_reaped(child: subprocess.Popen[bytes]) -> None:
    victim = catch(child.pid)
    assert victim is not None
    assert victim.alive
    assert victim.kill()
    until(lambda: not victim.alive)
    assert catch(child.pid) is None
    assert child.wait() == -signal.SIGKILL
    assert not victim.kill()
    assert catch(child.pid) is None
    victim.close()


def test_being_asked_to_leave_is_sigterm(child: subprocess.Popen[bytes]) -> None:
    victim = catch(child.pid)
    assert victim is not None
    assert victim.ask_to_leave()
    assert child.wait() == -signal.SIGTERM
    victim.close()


def test_a_grandchild_is_ours_and_a_stranger_is_not() -> None:
    program = "import subprocess, sys; print(subprocess.Popen(['sleep', '60']).pid, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        victim = catch(int(process.stdout.readline()))
        assert victim is not None
        victim.kill()
        victim.close()
        process.communicate()
    assert catch(os.getppid()) is None
    assert catch(os.getpid()) is None


def test_a_throttled_process_has_its_part_of_the_time_and_runs_on_afterwards(child: subprocess.Popen[bytes]) -> None:
    victim = catch(child.pid)
    assert victim is not None
    process = psutil.Process(child.pid)

    def cpu_s() -> float:
        times = process.cpu_times()
        return float(times.user + times.system)

    throttle = Throttle(victim, 4)
    began, used = time.monotonic(), cpu_s()
    # On a busy machine a slice may be long; a longer pause follows, and then the process has its part again. Its clock
    # ticks in hundredths. Without a throttle it has all of the time, and this never happens.
    until(lambda: 0.2 < cpu_s() - used < (time.monotonic() - began) / 2)
    throttle.end()
    until(lambda: not stopped(child))
    before = cpu_s()
    until(lambda: cpu_s() > before)
    victim.close()


def test_a_throttle_ends_with_its_process(child: subprocess.Popen[bytes]) -> None:
    victim = catch(child.pid)
    assert victim is not None
    throttle = Throttle(victim, 3)
    victim.kill()
    assert child.wait() == -signal.SIGKILL
    throttle.end()
    victim.close()
