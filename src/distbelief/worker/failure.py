"""Describes a worker's failure for the user, with a hint."""

from __future__ import annotations

import traceback
from pathlib import Path

import torch

from distbelief.control.messages import WorkerFailed
from distbelief.data.readers import ReaderError
from distbelief.errors import (
    DistBeliefError,
    GradientsDiffer,
    JobError,
    NonFiniteLoss,
    NotEnoughMemory,
    StepCodeError,
)
from distbelief.strategies import parse
from distbelief.worker.spec import WorkerSpec


def describe_failure(spec: WorkerSpec, error: BaseException, step: int, shard: int) -> WorkerFailed:
    kinds: list[tuple[type[BaseException], str]] = [
        (NonFiniteLoss, "loss"),
        (GradientsDiffer, "recheck"),
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
        message = f"{type(error).__name__}: {error}"
        details, shown = _user_traceback(error)
        hint = _hint(error, spec.options.strategy) or (
            "the traceback shows where in the job's code it happened" if shown else ""
        )
    if isinstance(error, NonFiniteLoss | GradientsDiffer):
        step, shard = error.step, error.shard
    if isinstance(error, StepCodeError):
        step, shard = error.step, -1
    return WorkerFailed(spec.worker, spec.host, kind, message, hint, details, step, shard)


def _hint(error: BaseException, strategy: str) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "more shards make smaller ones; fewer workers on one device, or a smaller model, need less memory"
    if "does not have a deterministic implementation" in str(error):
        other = f"`--strategy {form}`" if (form := parse(strategy).inexact_form) else "a strategy that is not exact"
        return f"exact strategies need kernels that give the same bits every time: use another operation, or {other}"
    return ""


def _user_traceback(error: BaseException) -> tuple[str, bool]:
    """The traceback without our frames above the user's code, and whether any frame is the user's."""
    packages = (str(Path(__file__).parent.parent), str(Path(torch.__file__).parent))
    files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    theirs = [i for i, file in enumerate(files) if not file.startswith(packages)]
    frame = error.__traceback__
    for _ in range(theirs[0] if theirs else 0):
        frame = frame.tb_next if frame else None
    return "".join(traceback.format_exception(type(error), error, frame)), bool(theirs)
