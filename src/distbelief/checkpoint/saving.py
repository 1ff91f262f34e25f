"""Saving a checkpoint: every member writes its part, then one of them seals it.

Until the manifest is there the checkpoint does not exist, so parts may be written in any order, by anybody, and again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime

from distbelief.checkpoint import manifest as m
from distbelief.checkpoint.coverage import Stretch, coverage_fault, shown_shape
from distbelief.checkpoint.faults import CheckpointExists, CheckpointIncomplete, CheckpointUnusable
from distbelief.checkpoint.manifest import Facts, Manifest, PartEntry, PartFile, PartRecord, TensorRecord
from distbelief.checkpoint.parts import Slice, arranged, blocks
from distbelief.checkpoint.storage import Folder, Where, entries, folder_at, read_file, write_file


def write_part(folder: Where, step: int, part: int, parts: int, slices: Iterable[Slice]) -> PartRecord:
    """Write part 1, 2, … of `parts`; it is durable when this returns. Keep the record for `seal`.

    The tensors are read while it runs: they must not change. A second copy is made only of one tensor at a time, and
    only where it is not contiguous or not on the CPU.
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
    """Make the parts a checkpoint: check that they hold everything exactly once, then write the manifest.

    May be tried again after an error: parts that are sealed already are found so.

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
            raise CheckpointIncomplete(f"{place.url} cannot be sealed: these parts are no whole set: {names}")
        if present.get(parts[part].file) != parts[part].size_bytes:
            raise CheckpointIncomplete(
                f"{place.url} cannot be sealed: {parts[part].file} is not there, or not with the size it was written",
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
    written = m.decode(data, place.url_of(m.MANIFEST), step)  # what readers will get, or an error before it is written
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
    """Where each tensor lies, in name order."""
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
                f"{place.url} cannot be sealed: {fault}", hint="the members disagree about who saves what; save again"
            )
    return tuple(
        TensorRecord(name, seen[name].dtype, seen[name].shape, tuple(sorted(stretches[name], key=lambda s: s.first)))
        for name in sorted(seen)
    )
