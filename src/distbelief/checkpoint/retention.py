"""Which checkpoints to keep, and how to remove the others without ever leaving a half that looks whole."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Collection, Mapping

from distbelief.checkpoint import manifest as m
from distbelief.checkpoint.faults import CheckpointUnusable
from distbelief.checkpoint.reading import all_steps, list_checkpoints, read_manifest
from distbelief.checkpoint.storage import Where, entries, folder_at, is_draft, remove_file, remove_folder


def surplus(
    checkpoints: Mapping[int, Mapping[str, float | None]],
    *,
    last: int,
    every: int | None = None,
    best: tuple[str, bool] | None = None,
) -> list[int]:
    """The steps to delete, oldest first, given the metrics of each step.

    Kept are the `last` newest, those whose step is a multiple of `every`, and the best one by a metric: (name, whether
    higher is better). A checkpoint without that metric, or with one that is no number, is not the best.

    >>> surplus({10: {"loss": 0.5}, 20: {"loss": 0.1}, 30: {"loss": 0.2}, 40: {}, 50: {}}, last=2, best=("loss", False))
    [10, 30]
    >>> surplus({10: {}, 15: {}, 20: {}, 25: {}}, last=1, every=10)
    [15]
    """
    if last < 1 or (every is not None and every < 1):
        raise ValueError("at least the newest checkpoint is kept, and every step is a multiple of 1: give 1 or more")
    kept = set(sorted(checkpoints)[-last:])
    if every is not None:
        kept |= {step for step in checkpoints if step % every == 0}
    if best is not None:
        metric, higher_is_better = best
        values = {step: metrics.get(metric) for step, metrics in checkpoints.items()}
        ranked = [
            (-value if higher_is_better else value, step)
            for step, value in values.items()
            if value is not None and not math.isnan(value)
        ]
        kept |= {step for _, step in sorted(ranked)[:1]}
    return sorted(checkpoints.keys() - kept)


def clear_up(
    folder: Where, sealed: int, *, last: int, every: int | None = None, best: tuple[str, bool] | None = None
) -> None:
    """Remove what is not to be kept, now that a run has sealed that step; `surplus` explains the rest.

    Newer ones than this, which the run could not go on from, do not count: they would crowd out those that it can.
    Those whose manifests cannot be read are not ours to judge.
    """
    steps = list_checkpoints(folder)
    if steps[:1] == [sealed]:
        tidy(folder)  # else it would take what is being written for the rest of an old save
    metrics: dict[int, Mapping[str, float | None]] = {}
    for step in steps:
        if step <= sealed:
            with contextlib.suppress(CheckpointUnusable):
                metrics[step] = read_manifest(folder, step).metrics
    for step in surplus(metrics, last=last, every=every, best=best):
        delete(folder, step)


def delete(folder: Where, step: int) -> None:
    """Remove a checkpoint, or the rest of one. The manifest goes first: cut short, it is an unfinished save."""
    place = folder_at(folder) / m.step_name(step)
    remove_file(place, m.MANIFEST)
    remove_folder(place)


def tidy(folder: Where) -> list[int]:
    """Remove what saves that were cut short have left behind; the steps whose folders went, oldest first.

    A folder without a manifest goes when a newer step is sealed: an older save is not going to be finished. In sealed
    folders drafts go, and parts that the manifest does not name.
    """
    place = folder_at(folder)
    removed: list[int] = []
    sealed_seen = False
    for step in all_steps(place):
        here = place / m.step_name(step)
        present = entries(here)
        if m.MANIFEST in present:
            sealed_seen = True
            for name in _strays(folder, step, present):
                remove_file(here, name)
        elif sealed_seen:
            remove_folder(here)
            removed.append(step)
    return sorted(removed)


def _strays(folder: Where, step: int, present: Collection[str]) -> list[str]:
    drafts = [name for name in present if is_draft(name)]
    numbers = {name: number for name in present if (number := m.part_number(name))}
    if len({parts for _, parts in numbers.values()}) < 2:
        return drafts
    try:
        named = {part.file for part in read_manifest(folder, step).parts}
    except CheckpointUnusable:  # nobody knows which parts are whose
        return drafts
    return drafts + [name for name in numbers if name not in named]
