"""A generation in a thread of its own, that can be left behind.

gloo does not always wake who waits in it when a connection ends (docs/decisions/0018). The thread that waits is lost
until gloo's own time is up, minutes later; the worker, with all the state that it holds, is not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
import torch.distributed as dist

from distbelief.comm.group import forget_groups
from distbelief.comm.words import Abort


def in_its_own_thread(train: Callable[[], None], abort: Abort, cores: int) -> None:
    """Return, or raise, when `train` does; or when it has been left behind, which `abort` says."""
    over = threading.Event()
    failures: list[BaseException] = []
    kept: list[dist.ProcessGroup] = []
    default_device = torch.get_default_device()

    def run() -> None:
        torch.set_num_threads(cores)  # each thread has a number of its own, and a default device
        if default_device.type != "cpu":
            torch.set_default_device(default_device)
        try:
            train()
        except BaseException as error:
            failures.append(error)
        over.set()
        kept.clear()

    abort.leave = over.set
    threading.Thread(target=run, name="training", daemon=True).start()
    over.wait()
    if abort.left_behind:
        kept += forget_groups()
    elif failures:
        raise failures[0]
