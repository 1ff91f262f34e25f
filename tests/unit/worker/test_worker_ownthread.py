"""A generation's thread: what it does to its worker when it ends, fails, or sleeps on in gloo."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import TCPStore

from distbelief.comm.group import Rendezvous, TorchGroup
from distbelief.comm.words import Abort, Aborted
from distbelief.worker.ownthread import in_its_own_thread


def test_it_computes_as_the_worker_itself_would() -> None:
    found = []
    cores = torch.get_num_threads()
    in_its_own_thread(lambda: found.append((torch.get_num_threads(), threading.current_thread().name)), Abort(), cores)
    assert found == [(cores, "training")]


def test_what_it_raises_is_raised_with_its_own_traceback() -> None:
    def step_3_of_the_job() -> None:
        raise ZeroDivisionError("a fault of the job")

    with pytest.raises(ZeroDivisionError, match="a fault of the job") as raised:
        in_its_own_thread(step_3_of_the_job, Abort(), 1)
    assert "step_3_of_the_job" in [entry.name for entry in raised.traceback]


def test_who_sleeps_on_is_left_behind_and_does_no_harm_when_it_wakes() -> None:
    command = [sys.executable, "-c", f"import {__name__} as here; here.leave_one_behind()"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.split("\n") == [
        "left behind",
        "the next generation has met",
        "woken: members have changed",
        "",
    ], done.stderr


def leave_one_behind() -> None:
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

    threading.Thread(target=lambda: asleep.wait() and abort.set("members have changed"), daemon=True).start()
    in_its_own_thread(generation, abort, 1)
    print("left behind" if abort.left_behind else "it came back")
    TorchGroup(Rendezvous("127.0.0.1", store.port, "generation 2", timeout_s=30), 0, 1, Abort())
    there = torch.ones(1)
    dist.all_reduce(there)
    print("the next generation has met")
    wake.set()
    woken.wait()
    dist.all_reduce(there)
