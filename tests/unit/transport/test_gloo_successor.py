"""What becomes of a worker whose training thread ends, fails, or sleeps on in gloo."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from distbelief.transport.abort import Abort, Aborted
from distbelief.transport.gloo.group import TorchGroup, train_or_be_succeeded
from distbelief.transport.gloo.rendezvous import Rendezvous


def nobody() -> int:
    raise AssertionError("nobody was left behind")


def test_it_trains_where_it_is() -> None:
    """What the user's code has made in this thread, say a connection to a database, is used in this thread."""
    found = []
    train_or_be_succeeded(lambda: found.append(threading.current_thread()), Abort(), nobody)
    assert found == [threading.current_thread()]


def test_what_it_raises_is_raised() -> None:
    abort = Abort()

    def generation() -> None:
        abort.set("members have changed")
        abort.check()

    with pytest.raises(Aborted, match="members have changed"):
        train_or_be_succeeded(generation, abort, nobody)


def test_who_sleeps_on_is_succeeded_and_does_no_harm_when_it_wakes() -> None:
    command = [sys.executable, "-c", f"import {__name__} as here; here.leave_one_behind()"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.stdout.splitlines() == [
        "gloo did not notice the end of a generation: its thread is left behind, another one continues",
        "left behind, 1 core",
        "the next generation has met",
        "woken: members have changed",
        "the next generation goes on",
    ], done.stderr
    assert done.returncode == 7


def leave_one_behind() -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    asleep, wake, woken = threading.Event(), threading.Event(), threading.Event()
    abort = Abort()

    def generation() -> None:
        group = TorchGroup(Rendezvous("127.0.0.1", store.port, "generation 1", timeout_s=30), 0, 1, abort)
        try:
            with group.network():
                asleep.set()
                wake.wait()  # as gloo does, whatever becomes of the sockets
        except Aborted as error:
            print("woken:", error)
            woken.set()
            raise

    def go_on() -> int:
        print(f"left behind, {torch.get_num_threads()} core" if abort.left_behind else "why?")
        TorchGroup(Rendezvous("127.0.0.1", store.port, "generation 2", timeout_s=30), 0, 1, Abort())
        there = torch.ones(1)
        dist.all_reduce(there)
        print("the next generation has met")
        wake.set()
        woken.wait()
        dist.all_reduce(there)
        print("the next generation goes on")
        return 7

    threading.Thread(target=lambda: asleep.wait() and abort.set("members have changed"), daemon=True).start()
    train_or_be_succeeded(generation, abort, go_on)
    print("it came back")
