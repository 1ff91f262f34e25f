"""Saves checkpoints and removes old ones.

Every member writes its part; then one member seals the checkpoint by writing the manifest. A checkpoint without a
manifest does not exist, so members may write parts in any order and repeatedly. For the same reason, removal deletes
the manifest first.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime

from distbelief.checkpoint import manifest as m
from distbelief.checkpoint.faults import CheckpointExists, CheckpointIncomplete, CheckpointUnusable
from distbelief.checkpoint.manifest import Facts, Manifest, PartEntry, PartFile, PartRecord, TensorRecord
from distbelief.checkpoint.parts import Slice, arranged, blocks
from distbelief.checkpoint.reading import all_steps, list_checkpoints, read_manifest
from distbelief.checkpoint.rules.boxes import Stretch, coverage_fault, shown_shape
from distbelief.checkpoint.storage import (
    Folder,
    Where,
    entries,
    folder_at,
    is_draft,
    read_file,
    remove_file,
    remove_folder,
    write_file,
)


def write_part(folder: Where, step: int, part: int, parts: int, slices: Iterable[Slice]) -> PartRecord:
    """Write part 1, 2, … of `parts`; the part is durable on return. Pass the returned record to `seal`.

    The tensors must not change during the call. Only tensors that are not contiguous or not on the CPU are copied, one
    at a time.
    """
    if not 1 <= part <= parts:
        raise ValueError(f"there is no part {part} of {parts}")
    place = folder_at(folder) / m.step_name(step)
    _check_open(place, entries(place))
    pieces = arranged(slices)
    digest = hashlib.sha256()
    size_bytes = 0

    def hashed() -> Iterator[bytes | memoryview]:
        nonlocal size_bytes
        for block in blocks(pieces):
            digest.update(block)
            size_bytes += len(block)
            yield block

    file = m.part_name(part, parts)
    write_file(place, file, hashed())
    return PartRecord(file, size_bytes, digest.hexdigest(), tuple(entry for entry, _ in pieces))


def seal(folder: Where, step: int, facts: Facts, part_records: Sequence[PartRecord]) -> Manifest:
    """Seal the parts as a checkpoint: check that they hold every element exactly once, then write the manifest.

    May be called again after an error; it accepts parts that are sealed already.

    >>> import torch
    >>> weights = torch.arange(6.0)
    >>> halves = [
    ...     write_part("memory://seal", 120, 1, 2, [Slice("w", weights[:4], (2, 3))]),
    ...     write_part("memory://seal", 120, 2, 2, [Slice("w", weights[4:], (2, 3), first=4)]),
    ... ]
    >>> manifest = seal("memory://seal", 120, Facts(job={"name": "digits"}), halves)
    >>> manifest.step, [(t.name, t.shape) for t in manifest.tensors]
    (120, [('w', (2, 3))])
    """
    place = folder_at(folder) / m.step_name(step)
    parts = dict(enumerate(sorted(part_records, key=lambda record: record.file), start=1))
    files = tuple(PartFile(record.file, record.size_bytes, record.sha256) for record in parts.values())
    present = entries(place)
    if m.MANIFEST in present and (known := _manifest_of(place, step)) and known.parts == files:
        return known
    _check_open(place, present)
    for part in range(1, len(parts) + 1):
        if parts[part].file != m.part_name(part, len(parts)):
            names = ", ".join(sorted(record.file for record in part_records))
            raise CheckpointIncomplete(f"{place.url} cannot be sealed: these parts are not a complete set: {names}")
        if present.get(parts[part].file) != parts[part].size_bytes:
            raise CheckpointIncomplete(
                f"{place.url} cannot be sealed: {parts[part].file} is missing, or its size has changed",
                hint="another process has changed the folder; save again",
            )
    tensors = _table(place, {part: record.entries for part, record in parts.items()})
    content = Manifest(
        format_version=m.format_of(tensors),
        step=step,
        created=datetime.now(UTC),
        job=facts.job,
        data=facts.data,
        random=facts.random,
        versions=facts.versions,
        metrics=facts.metrics,
        parts=files,
        tensors=tensors,
    )
    data = m.encode(content)
    # decoded as a reader would do, so that an error comes before the write
    written = m.decode(data, place.url_of(m.MANIFEST), step)
    write_file(place, m.MANIFEST, [data])
    return written


def _manifest_of(place: Folder, step: int) -> Manifest | None:
    data = read_file(place, m.MANIFEST)
    with suppress(CheckpointUnusable):
        return None if data is None else m.decode(data, place.url_of(m.MANIFEST), step)
    return None


def _check_open(place: Folder, present: Mapping[str, int | None]) -> None:
    if m.MANIFEST in present:
        raise CheckpointExists(
            f"{place.url} is sealed already", hint="delete that checkpoint first if it is to be replaced"
        )


def _table(place: Folder, held: Mapping[int, Iterable[PartEntry]]) -> tuple[TensorRecord, ...]:
    """The place of each tensor, in name order."""
    seen: dict[str, PartEntry] = {}
    stretches: dict[str, list[Stretch]] = {}
    for part, part_entries in held.items():
        for entry in part_entries:
            if entry.empty:
                continue
            known = seen.setdefault(entry.tensor, entry)
            if (known.dtype, known.shape) != (entry.dtype, entry.shape):
                raise CheckpointIncomplete(
                    f"{place.url} cannot be sealed: tensor '{entry.tensor}' is {shown_shape(known.shape)} "
                    f"{known.dtype} in one part and {shown_shape(entry.shape)} {entry.dtype} in part {part}"
                )
            stretches.setdefault(entry.tensor, []).append(Stretch(part, entry.first, entry.count, entry.box))
    for name, entry in seen.items():
        if fault := coverage_fault(name, entry.shape, stretches[name]):
            raise CheckpointIncomplete(
                f"{place.url} cannot be sealed: {fault}", hint="the members disagree about their parts; save again"
            )
    return tuple(
        TensorRecord(name, seen[name].dtype, seen[name].shape, tuple(sorted(stretches[name], key=lambda s: s.first)))
        for name in sorted(seen)
    )


# --- retention: which checkpoints are kept, and how the others are removed ----------------------------------------


def surplus(
    checkpoints: Mapping[int, Mapping[str, float | None]],
    *,
    last: int,
    every: int | None = None,
    best: tuple[str, bool] | None = None,
) -> list[int]:
    """The steps to delete, oldest first, from the metrics of each step.

    Three kinds are kept: the `last` newest, the multiples of `every`, and the best by a metric, given as (name, whether
    higher is better). A checkpoint without the metric, or with NaN, is never the best.

    >>> surplus({10: {"loss": 0.5}, 20: {"loss": 0.1}, 30: {"loss": 0.2}, 40: {}, 50: {}}, last=2, best=("loss", False))
    [10, 30]
    >>> surplus({10: {}, 15: {}, 20: {}, 25: {}}, last=1, every=10)
    [15]
    """
    if last < 1 or (every is not None and every < 1):
        raise ValueError("the number of kept checkpoints and the interval of steps must be 1 or more")
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
    """Remove the checkpoints that retention does not keep, after a run has sealed step `sealed`; see `surplus`.

    Checkpoints newer than `sealed` are neither counted nor removed: the run could not resume from them, and they would
    displace usable ones. Checkpoints with unreadable manifests are left alone.
    """
    steps = list_checkpoints(folder)
    if steps[:1] == [sealed]:
        tidy(folder)  # otherwise `tidy` would remove a save in progress
    metrics: dict[int, Mapping[str, float | None]] = {}
    for step in steps:
        if step <= sealed:
            with contextlib.suppress(CheckpointUnusable):
                metrics[step] = read_manifest(folder, step).metrics
    for step in surplus(metrics, last=last, every=every, best=best):
        delete(folder, step)


def delete(folder: Where, step: int) -> None:
    """Remove a checkpoint or an unfinished save. The manifest goes first, so an interrupted removal leaves an
    unfinished save."""
    place = folder_at(folder) / m.step_name(step)
    remove_file(place, m.MANIFEST)
    remove_folder(place)


def tidy(folder: Where) -> list[int]:
    """Remove the rest of interrupted saves; returns the steps of the removed folders, oldest first.

    A folder without a manifest is removed when a newer step is sealed, because the older save will not be finished. In
    sealed folders, drafts are removed, and parts that the manifest does not name.
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
    except CheckpointUnusable:  # without its manifest, the owners of the parts are unknown
        return drafts
    return drafts + [name for name in numbers if name not in named]
