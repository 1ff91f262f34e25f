"""Who goes on when gloo keeps the thread that trains.

gloo does not always wake who waits in it when a connection ends (docs/decisions/0018). The thread that waits is lost
until gloo's own time is up, minutes later; the worker, with all the state that it holds, is not.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist

from distbelief.transport.abort import Abort
from distbelief.transport.gloo.group import forget_groups

_kept: list[dist.ProcessGroup] = []
"""Groups in which somebody waits: their end would wait for that."""


def train_or_be_succeeded(train: Callable[[], None], abort: Abort, go_on: Callable[[], int]) -> None:
    """Run `train`. If it sleeps on in spite of the abort, another thread runs `go_on`, and the process ends with what
    that returns; `train` may wake later, and this never returns then."""
    cores, default_device = torch.get_num_threads(), torch.get_default_device()

    def succeed() -> None:
        status = 1
        try:
            torch.set_num_threads(cores)  # each thread has a number of its own, and a default device
            if default_device.type != "cpu":
                torch.set_default_device(default_device)
            _kept.extend(forget_groups())
            status = go_on()
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)

    abort.leave = threading.Thread(target=succeed, name="training", daemon=True).start
    try:
        train()
    except BaseException:
        if not abort.left_behind:
            raise
    if abort.left_behind:
        threading.Event().wait()  # of no use to anybody, but signals come to the first thread
