"""Reads the state or the weights with which a run begins: from one of its checkpoints, or from given weights."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeVar

import msgspec
import torch

from distbelief.checkpoint.faults import CheckpointMissing, CheckpointUnusable
from distbelief.checkpoint.lazy import LazyTensors, Renamed
from distbelief.checkpoint.manifest import Facts, Manifest, check_run
from distbelief.checkpoint.reading import newest_sound, open_checkpoint, read_manifest, read_tensors
from distbelief.checkpoint.sources import MODEL, open_source, read_source
from distbelief.checkpoint.storage import Where
from distbelief.strategies.base import Applied, Saved, Seated
from distbelief.worker.rules.reports import unheard
from distbelief.worker.spec import Origin

Found = TypeVar("Found")


class DataPosition(msgspec.Struct, frozen=True):
    """The manifest's `data`: the committed step is the only cursor; `history` and `note` are results not reported
    yet. A run takes its step from the manifest itself; `next_step` marks a checkpoint that a run wrote."""

    next_step: int
    history: tuple[Applied, ...] = ()
    note: str = ""


def facts_at(known: Facts, replica: Seated, applied: int) -> Facts:
    """A checkpoint's facts about the state after `applied` steps, added to the `known` facts about the job."""
    history = replica.remembered(0)
    last = history[-1]
    evaluated, note = replica.note()
    position = DataPosition(applied, unheard(history), note.decode() if evaluated == applied else "")
    metrics = {"training_loss": last.loss, **(json.loads(position.note) if position.note else {})}
    return msgspec.structs.replace(known, data=msgspec.to_builtins(position), metrics=metrics)


def saved_at(folder: Where, step: int) -> Saved:
    """The state in a checkpoint. Every byte is checked while it is read."""
    return _saved(folder, read_manifest(folder, step))


def opened_at(folder: Where, step: int) -> Saved:
    """Like `saved_at`, but the values are read and checked on access."""
    manifest, tensors = open_checkpoint(folder, step)
    return _described(folder, manifest, tensors)


def newest_saved(
    folder: str, lazily: bool = False, at_most: int | None = None, run_id: str = ""
) -> tuple[Saved | None, list[tuple[int, str]]]:
    """The newest usable checkpoint (None: there is none), and the newer unusable ones as (step, why). `lazily`: check
    every byte, but keep no values in memory. `run_id`: of the run that loads it; another run's are not usable."""
    return _newest(folder, _checked_at if lazily else saved_at, at_most, run_id)


def _checked_at(folder: Where, step: int) -> Saved:
    manifest, tensors = open_checkpoint(folder, step)
    tensors.check()
    return _described(folder, manifest, tensors)


def weights_of(where: str, lazily: bool = False) -> Saved:
    """Weights without optimizer state, from any source of `read_source`: a run, a checkpoint, a safetensors file."""
    place = where if "://" in where else Path(where)
    if lazily:
        tensors = open_source(place).tensors
        assert isinstance(tensors, LazyTensors)
        return Saved(0, Renamed(tensors, {f"{MODEL}{name}": name for name in tensors}))
    return Saved(0, {f"{MODEL}{name}": tensor for name, tensor in read_source(place).tensors.items()})


def frozen_of(origin: Origin, names: Collection[str]) -> Mapping[str, torch.Tensor]:
    """The run's tensors that training never changes, from its newest checkpoint, because older ones may be deleted.
    Empty: the job's initial values are right."""
    if origin.checkpoints:

        def read(at: Where, step: int) -> Mapping[str, torch.Tensor]:
            return read_tensors(at, read_manifest(at, step), names)

        found, _ = _newest(origin.checkpoints, read, run_id=origin.run_id)
        if found is not None:
            return found
    return weights_of(origin.weights).tensors if origin.weights else {}


def _newest(
    folder: str, read: Callable[[Where, int], Found], at_most: int | None = None, run_id: str = ""
) -> tuple[Found | None, list[tuple[int, str]]]:
    """Raises CheckpointMissing if checkpoints exist but none is usable: the user must decide to start again from step
    0."""

    def read_own(at: Where, step: int) -> Found:
        if run_id:  # before gigabytes are read
            check_run(read_manifest(at, step), at, run_id)
        return read(at, step)

    found, skipped = newest_sound(folder, read_own, at_most)
    if found is None and skipped:
        raise CheckpointMissing(
            f"no checkpoint in {folder} can be used",
            hint="restore one of them from a copy, or train anew in another run directory",
            details="\n".join(why for _, why in skipped),
        )
    return found, skipped


def _saved(folder: Where, manifest: Manifest) -> Saved:
    return _described(folder, manifest, read_tensors(folder, manifest))


def _described(folder: Where, manifest: Manifest, tensors: Mapping[str, torch.Tensor]) -> Saved:
    try:
        position = msgspec.convert(manifest.data, DataPosition)
    except msgspec.ValidationError as error:
        message = f"the checkpoint of step {manifest.step} in {folder} does not record the data position: {error}"
        raise CheckpointUnusable(message, hint="it was not written by a run; use its weights with --from") from error
    return Saved(manifest.step, tensors, position.history, position.note.encode())
