"""An abort ends what a group waits for, and nothing of the group that comes after it."""

from __future__ import annotations

import contextlib
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from torch.distributed import TCPStore

from distbelief.transport.abort import Abort, Aborted
from distbelief.transport.gloo import group as comm_group
from distbelief.transport.gloo.group import TorchGroup
from distbelief.transport.gloo.rendezvous import Rendezvous


def test_an_abort_that_is_late_leaves_the_sockets_of_the_next_group_alone() -> None:
    """It was meant for a meeting that has ended meanwhile; the sockets that there are now are another group's."""
    assert in_a_process(abort_late) == (0, "still there\n")


def test_an_abort_ends_what_a_group_opens_later_and_nothing_that_others_open() -> None:
    assert in_a_process(abort_among_more_groups) == (0, "still there\nits end\n")


def test_who_sleeps_on_in_torch_after_an_abort_is_ended() -> None:
    """gloo sometimes misses that its sockets are closed; the run would wait for this member for good."""
    status, said = in_a_process(sleep_on)
    assert status == 1
    assert "this worker ends and is replaced" in said


def test_who_computes_on_after_an_abort_is_left_in_peace() -> None:
    assert in_a_process(compute_on) == (0, "it sees the abort\n")


# --- what these processes do -----------------------------------------------------------------------------------------


def in_a_process(what: Callable[[], None]) -> tuple[int, str]:
    """Its exit status and what it said. gloo and its store close what they have opened when they please, and there is
    one group in a process."""
    command = [sys.executable, "-c", f"import {__name__} as here; here.{what.__name__}()"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    print(done.stderr)
    return done.returncode, done.stdout


def alone(abort: Abort) -> TorchGroup:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return TorchGroup(Rendezvous("127.0.0.1", store.port, "alone", timeout_s=30), 0, 1, abort)


def sleep_on() -> None:
    comm_group._ASLEEP_S = 0.5
    abort = Abort()
    with alone(abort).guard():
        abort.set("members have changed")
        time.sleep(100)


def compute_on() -> None:
    comm_group._ASLEEP_S = 0.5
    abort = Abort()
    group = alone(abort)
    with group.guard():
        abort.set("members have changed")
        until = time.thread_time() + 1.5
        while time.thread_time() < until:
            pass
    with contextlib.suppress(Aborted), group.guard():
        print("there was none")
    print("it sees the abort")


def abort_among_more_groups() -> None:
    abort = Abort()
    group = alone(abort)
    others = socket.socketpair()
    with group.more_groups():
        ours, _ = socket.socketpair()
        threading.Timer(0.3, abort.set, ["members have changed"]).start()
        at_its_end = ours.recv(64)  # waits for good without the abort
        others[0].send(b"still there")
        print(others[1].recv(64).decode())
        print("its end" if at_its_end == b"" else at_its_end)


def abort_late() -> None:
    """Says what comes through a socket that was opened after the meeting."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    abort = Abort()

    def set_when_it_waits() -> None:
        time.sleep(0.3)  # most likely it waits by then; if not, it is aborted before it does, and all else is the same
        abort.set("members have changed")

    threading.Thread(target=set_when_it_waits, daemon=True).start()
    try:
        TorchGroup(Rendezvous("127.0.0.1", store.port, "nobody else comes", timeout_s=30), 0, 2, abort)
    except Aborted:
        ours, theirs = socket.socketpair()
        abort.wake()
        ours.send(b"still there")
        print(theirs.recv(64).decode())
    else:
        print("nothing was aborted")
