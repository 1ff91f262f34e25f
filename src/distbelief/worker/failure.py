"""Describes a worker's failure for the user, with a hint."""

from __future__ import annotations

import errno
import os
import sysconfig
import traceback
from pathlib import Path

import torch

from distbelief.control.fitting import MOST_DETAILS, MOST_MESSAGE, cut, readable, text_of
from distbelief.control.messages import WorkerFailed
from distbelief.controlgroups import why_fork_failed
from distbelief.data.readers import ReaderError
from distbelief.errors import (
    DistBeliefError,
    JobError,
    NonFiniteLoss,
    NotEnoughMemory,
    ResultsDiffer,
    StepCodeError,
)
from distbelief.strategies import parse
from distbelief.worker.spec import WorkerSpec

_PACKAGES = (str(Path(__file__).parent.parent), str(Path(torch.__file__).parent))


def refused_thread(error: BaseException) -> str:
    """Which limit has kept a thread of DistBelief's from being started; "" if the error is another one, or the job has
    started the thread. It is no fault of the job's: another worker may have more luck."""
    if not isinstance(error, RuntimeError) or str(error) != "can't start new thread":
        return ""
    ours = (*_PACKAGES, sysconfig.get_path("stdlib"))
    if any(not frame.filename.startswith(ours) for frame in traceback.extract_tb(error.__traceback__)):
        return ""
    return why_fork_failed(OSError(errno.EAGAIN, os.strerror(errno.EAGAIN)))


def describe_failure(spec: WorkerSpec, error: BaseException, step: int, shard: int) -> WorkerFailed:
    kinds: list[tuple[type[BaseException], str]] = [
        (NonFiniteLoss, "loss"),
        (ResultsDiffer, "recheck"),
        (ReaderError, "data"),
        (NotEnoughMemory, "memory"),
        (torch.OutOfMemoryError, "memory"),
        (JobError, "job"),
        (StepCodeError, "user"),
        (DistBeliefError, "internal"),
    ]
    kind = next((name for cls, name in kinds if isinstance(error, cls)), "user")
    if isinstance(error, DistBeliefError):
        message, hint, details = error.message, error.hint, error.details
    else:
        said = text_of(error)
        message = f"{type(error).__name__}: {said}"
        details, shown = _user_traceback(error)
        hint = _hint(error, said, spec.options.strategy) or (
            "the traceback shows where in the job's code it happened" if shown else ""
        )
    if isinstance(error, NonFiniteLoss | ResultsDiffer):
        step, shard = error.step, error.shard
    if isinstance(error, StepCodeError):
        step, shard = error.step, -1
    message, details = map(readable, (message, details))
    whole = ""
    if len(message) > MOST_MESSAGE or len(details) > MOST_DETAILS:
        whole = _keep(spec, f"{message}\n{details}\n")
    message, details = cut(message, MOST_MESSAGE, whole), cut(details, MOST_DETAILS, whole)
    return WorkerFailed(spec.worker, spec.host, kind, message, cut(readable(hint), MOST_MESSAGE), details, step, shard)


def _keep(spec: WorkerSpec, text: str) -> str:
    """Append a text to the worker's log. Returns the log's place in the run directory; "" if that cannot be."""
    name = f"logs/worker-{spec.worker}.log"
    try:
        with (Path(spec.run_dir) / name).open("a", encoding="utf-8") as log:
            log.write(text)
    except OSError:
        return ""
    return name


def _hint(error: BaseException, said: str, strategy: str) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "more shards make smaller ones; fewer workers on one device, or a smaller model, need less memory"
    if "does not have a deterministic implementation" in said:
        other = f"`--strategy {form}`" if (form := parse(strategy).inexact_form) else "a strategy that is not exact"
        return f"exact strategies need kernels that give the same bits every time: use another operation, or {other}"
    return ""


def _user_traceback(error: BaseException) -> tuple[str, bool]:
    """The traceback without our frames above the user's code, and whether any frame is the user's."""
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    theirs = [i for i, file in enumerate(files) if not file.startswith(_PACKAGES)]
    frame = error.__traceback__
    for _ in range(theirs[0] if theirs else 0):
        frame = frame.tb_next if frame else None
    return "".join(traceback.format_exception(type(error), error, frame)), bool(theirs)
