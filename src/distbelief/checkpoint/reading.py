"""Finding, checking and loading checkpoints. Nothing is loaded that was not checked, and nothing is ever unpickled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from distbelief.checkpoint import manifest as m
from distbelief.checkpoint.faults import CheckpointMismatch, CheckpointMissing, CheckpointUnusable
from distbelief.checkpoint.fit import differences, form, forms, misfit
from distbelief.checkpoint.manifest import DTYPES, Manifest, PartEntry, TensorRecord
from distbelief.checkpoint.parts import check_part, memory_of
from distbelief.checkpoint.storage import Folder, Where, entries, folder_at, read_file

_READERS = 4  # parts read at once: hashing and waiting both let other threads run


def list_checkpoints(folder: Where) -> list[int]:
    """The steps that have a manifest, newest first."""
    place = folder_at(folder)
    return [step for step in all_steps(place) if m.MANIFEST in entries(place / m.step_name(step))]


def all_steps(place: Folder) -> list[int]:
    """Every step that has a folder, sealed or not, newest first."""
    found = (m.step_of(name) for name, size in entries(place).items() if size is None)
    return sorted((step for step in found if step is not None), reverse=True)


def read_manifest(folder: Where, step: int) -> Manifest:
    """The manifest of a step, itself checked; the parts are not looked at."""
    place = folder_at(folder) / m.step_name(step)
    data = read_file(place, m.MANIFEST)
    if data is None:
        raise CheckpointMissing(
            f"there is no checkpoint of step {step}: {place.url_of(m.MANIFEST)} is missing",
            hint="a folder without it is the rest of a save that was cut short; choose another step",
        )
    return m.decode(data, place.url_of(m.MANIFEST), step)


def verify(folder: Where, step: int) -> Manifest:
    """Read every byte of a checkpoint and compare it with the manifest. Raises CheckpointUnusable."""
    manifest = read_manifest(folder, step)
    _read_parts(folder, manifest, {part: {} for part in range(1, len(manifest.parts) + 1)})
    return manifest


def newest_sound(folder: Where) -> tuple[Manifest | None, list[tuple[int, str]]]:
    """The newest checkpoint that verifies, and the newer ones that do not: (step, why).

    Only faults of a checkpoint are skipped. When the disk or the store cannot be read at all, that is raised: to start
    from an older step because of a lost connection would be wrong.
    """
    skipped: list[tuple[int, str]] = []
    for step in list_checkpoints(folder):
        try:
            return verify(folder, step), skipped
        except CheckpointUnusable as error:
            skipped.append((step, error.message))
    return None, skipped


def read_tensors(folder: Where, manifest: Manifest, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint, all or those named, as new CPU tensors. The parts they lie in are checked on the way.

    >>> from distbelief.checkpoint.manifest import Facts
    >>> from distbelief.checkpoint.parts import Slice
    >>> from distbelief.checkpoint.saving import seal, write_part
    >>> part = write_part("memory://read", 1, 1, 1, [Slice.whole("w", torch.ones(2))])
    >>> read_tensors("memory://read", seal("memory://read", 1, Facts(), [part]))
    {'w': tensor([1., 1.])}
    """
    wanted = [t for t in manifest.tensors if names is None or t.name in names]
    fresh = {t.name: torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for t in wanted}
    sinks: dict[int, dict[str, memoryview]] = {}
    for t in wanted:
        data, width = memory_of(fresh[t.name]), DTYPES[t.dtype][1]
        for stretch in t.stretches:
            key = PartEntry(t.name, t.dtype, t.shape, stretch.first, stretch.count).key
            held = data[stretch.first * width : (stretch.first + stretch.count) * width]
            sinks.setdefault(stretch.part, {})[key] = held
    _read_parts(folder, manifest, sinks)
    return fresh


def load_into(
    folder: Where,
    manifest: Manifest,
    tensors: Mapping[str, torch.Tensor],
    *,
    select: Callable[[str], bool] = lambda name: True,
) -> None:
    """Load a checkpoint into tensors by name: all of it, or, after any error, none of it.

    Everything is read into new tensors first, which takes their size in memory once more while it lasts. `select`
    leaves out tensors of the checkpoint that are not wanted, such as the optimizer's.
    """
    wanted = [t for t in manifest.tensors if select(t.name)]
    _require_one_model((folder_at(folder) / m.step_name(manifest.step)).url, wanted, tensors)
    fresh = read_tensors(folder, manifest, {t.name for t in wanted})
    with torch.no_grad():
        for name in list(fresh):
            tensors[name].copy_(fresh.pop(name))


def _require_one_model(url: str, held: Sequence[TensorRecord], tensors: Mapping[str, torch.Tensor]) -> None:
    there = {t.name: form(t.dtype, t.shape) for t in held}
    if lines := differences(there, "the checkpoint", forms(tensors), "the model"):
        raise misfit(
            f"{url} is a checkpoint of another model",
            lines,
            hint="load it with the job that it was saved from; nothing was loaded",
            kind=CheckpointMismatch,
        )


def _read_parts(folder: Where, manifest: Manifest, sinks: Mapping[int, Mapping[str, memoryview]]) -> None:
    """Check the parts that have sinks, several at once; raises what is wrong with the first of them."""
    place = folder_at(folder) / m.step_name(manifest.step)
    sizes = entries(place)

    def check(part: int) -> None:
        file = manifest.parts[part - 1]
        check_part(place, file, sizes.get(file.file), manifest.entries_of(part), sinks[part])

    with ThreadPoolExecutor(max_workers=_READERS) as readers:
        for _ in readers.map(check, sorted(sinks)):
            pass
