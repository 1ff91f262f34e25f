"""What a run begins from, when that is not the job's own initial values: one of its checkpoints, or weights."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path

import msgspec
import torch

from distbelief.checkpoint.faults import CheckpointMissing, CheckpointUnusable
from distbelief.checkpoint.manifest import Facts, Manifest
from distbelief.checkpoint.reading import list_checkpoints, read_manifest, read_tensors
from distbelief.checkpoint.sources import read_source
from distbelief.strategies.base import Applied, Replica, Saved
from distbelief.strategies.named import MODEL
from distbelief.worker.spec import Origin

HEARD_AFTER_S = 2.0
"""What a step gave is in the metrics file long before so many seconds have passed."""


class DataPosition(msgspec.Struct, frozen=True):
    """The manifest's `data`: the committed step is the only cursor; the rest is what that step left to be told."""

    next_step: int
    history: tuple[Applied, ...] = ()
    note: str = ""


def facts_at(known: Facts, replica: Replica, applied: int) -> Facts:
    """What a checkpoint says of the state after so many steps, beside what is `known` of the job."""
    history = replica.remembered(0)
    last = history[-1]
    unheard = tuple(one for one in history if one.at > last.at - HEARD_AFTER_S or one is last)
    evaluated, note = replica.note()
    position = DataPosition(applied, unheard, note.decode() if evaluated == applied else "")
    metrics = {"training_loss": last.loss, **(json.loads(position.note) if position.note else {})}
    return msgspec.structs.replace(known, data=msgspec.to_builtins(position), metrics=metrics)


def saved_at(folder: str, step: int) -> Saved:
    """The state in a checkpoint. Every byte is checked while it is read."""
    return _saved(folder, read_manifest(folder, step))


def newest_saved(folder: str, at_most: int | None = None) -> tuple[Saved | None, list[tuple[int, str]]]:
    """The newest checkpoint that can be used, and the newer ones that cannot: (step, why).

    None, with nothing skipped: there is no checkpoint. When there are some and none of them can be used, that is an
    error: to start again from the first step would be a loss that nobody asked for.
    """
    skipped: list[tuple[int, str]] = []
    for step in list_checkpoints(folder):
        if at_most is None or step <= at_most:
            try:
                return saved_at(folder, step), skipped
            except CheckpointUnusable as error:
                skipped.append((step, error.message))
    if skipped:
        raise CheckpointMissing(
            f"no checkpoint in {folder} can be used",
            hint="restore one of them from a copy, or train anew in another run directory",
            details="\n".join(why for _, why in skipped),
        )
    return None, []


def weights_of(where: str) -> Saved:
    """Weights alone, from wherever `read_source` finds them: a run, a checkpoint, a safetensors file."""
    source = read_source(where if "://" in where else Path(where))
    return Saved(0, {f"{MODEL}{name}": tensor for name, tensor in source.tensors.items()})


def frozen_of(origin: Origin, names: Collection[str]) -> Mapping[str, torch.Tensor]:
    """Tensors of a run that never change, from its newest checkpoint: older ones may be deleted meanwhile. Empty: they
    are what the job makes."""
    faults = []
    for step in list_checkpoints(origin.checkpoints) if origin.checkpoints else []:
        try:
            return read_tensors(origin.checkpoints, read_manifest(origin.checkpoints, step), names)
        except CheckpointUnusable as error:
            faults.append(error)
    if faults:
        raise faults[0]
    return weights_of(origin.weights).tensors if origin.weights else {}


def _saved(folder: str, manifest: Manifest) -> Saved:
    try:
        position = msgspec.convert(manifest.data, DataPosition)
    except msgspec.ValidationError as error:
        message = f"the checkpoint of step {manifest.step} in {folder} does not say where the data stood: {error}"
        raise CheckpointUnusable(message, hint="it was not written by a run; use its weights with --from") from error
    return Saved(manifest.step, read_tensors(folder, manifest), position.history, position.note.encode())
