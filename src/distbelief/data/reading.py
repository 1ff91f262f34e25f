"""The reader process: reads samples under their seeds, makes batches, and answers requests until it is killed.

This is the child's half of `data.readers`. It knows its data set and its one connection only.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import traceback
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from distbelief.data.parcel import post, receive
from distbelief.data.sources import MapStyle, Samples, seed_everything
from distbelief.lifeline import READER, die_with_parent, name_process
from distbelief.shards import sample_seed

HELD = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD)
"""Blocked by the worker across the fork of the reader parent, which sets how it takes them, and unblocks them."""

_PARENT_IS_GONE = 0


@dataclass(frozen=True)
class Request:
    epoch: int
    samples: Samples
    collated: bool = True
    """False: the answer is a list of samples."""


@dataclass(frozen=True)
class Begun:
    """A message before each answer: from now on, if the reader dies, it died while reading this request."""


@dataclass(frozen=True)
class Failure:
    """An answer instead of a batch: the data set's code raised an exception."""

    message: str
    traceback: str


def serve(source: MapStyle, seed: int, connection: socket.socket, parent: int) -> NoReturn:
    """Answer requests, one after the other, until the parent process ends."""
    try:
        _settle(parent)
        while True:
            request: Request = receive(connection)
            post(connection, Begun())
            batch = read(source, seed, request)
            sys.stdout.flush()  # a reader ends by SIGKILL, so output of user code must not stay in a buffer
            sys.stderr.flush()
            _answer(connection, request, batch)
    except (EOFError, ConnectionError):
        os._exit(_PARENT_IS_GONE)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


def read(source: MapStyle, seed: int, request: Request) -> Any:
    """The batch, or a Failure. Seeds the generators of torch, numpy and Python for each sample.

    >>> from distbelief.data.sources import as_source
    >>> import numpy as np
    >>> read(as_source([1, 2, 3]), 0, Request(0, np.array([1])))
    tensor([2])
    >>> read(as_source([1, 2, 3]), 0, Request(0, np.array([7]))).message
    'reading sample 7 failed: IndexError: list index out of range'
    """
    doing = ""
    try:
        parts = []
        for sample in request.samples.tolist():
            doing = f"reading sample {sample}"
            seed_everything(sample_seed(seed, request.epoch, sample))
            parts.append(source.dataset[sample])
        if not request.collated:
            return parts
        doing = f"making a batch of {listed(request.samples)}"
        return source.collate(parts)
    except BaseException as error:  # a SystemExit, too, is reported and not obeyed
        return _failure(doing, error)


def listed(samples: Samples) -> str:
    """Sample numbers as text for people.

    >>> import numpy as np
    >>> listed(np.arange(20))
    'samples 0, 1, 2, 3, 4, 5, 6, 7, … (20 in all)'
    """
    shown = ", ".join(str(sample) for sample in samples[:8])
    rest = f", … ({len(samples)} in all)" if len(samples) > 8 else ""
    return f"sample{'s' if len(samples) > 1 else ''} {shown}{rest}"


def _settle(parent: int) -> None:
    die_with_parent(parent)
    name_process(READER)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # SIGINT and SIGHUP stay ignored: they reach the whole process group
    gc.freeze()  # a collection would write to, and so copy, every page shared with the parent
    # A fork does not copy OpenMP's threads, and a parallel region would wait for them for ever.
    torch.set_num_threads(1)


def _answer(connection: socket.socket, request: Request, batch: Any) -> None:
    try:
        post(connection, batch)
    except ConnectionError:
        raise
    except Exception as error:  # the batch cannot be pickled, or memory is short
        post(connection, _failure(f"handing over the batch of {listed(request.samples)}", error))


def _failure(doing: str, error: BaseException) -> Failure:
    try:
        said = str(error)
    except Exception:
        said = "(its message cannot be shown)"
    here = error.__traceback__
    lines = traceback.format_exception(type(error), error, here.tb_next if here and here.tb_next else here)
    return Failure(f"{doing} failed: {type(error).__name__}{': ' if said else ''}{said}", "".join(lines))
