"""Finding, checking and loading checkpoints. Nothing is loaded unchecked, and nothing is ever unpickled.

The checksum of a part covers all its bytes. So the first read from a part streams all of it and keeps the tensors that
are wanted; later reads take only the bytes that they need.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

from distbelief.checkpoint import manifest as m
from distbelief.checkpoint.faults import CheckpointMissing, CheckpointUnusable
from distbelief.checkpoint.lazy import Extent, Filling, LazyTensors, Wanted
from distbelief.checkpoint.manifest import Manifest, PartEntry
from distbelief.checkpoint.parts import check_part, find_in_part, pour
from distbelief.checkpoint.storage import Folder, Where, entries, folder_at, read_file

# --- the tensors of a checkpoint, read when they are asked for ----------------------------------------------------

_READERS = 4  # parts read at once: hashing and waiting both let other threads run

_Sinks = dict[int, dict[str, list[Filling]]]


class CheckpointTensors(LazyTensors):
    def __init__(self, folder: Folder, manifest: Manifest, check: bool) -> None:
        """`folder`: that of the step. `check`: see `open_checkpoint`."""
        super().__init__({t.name: (getattr(torch, t.dtype), t.shape) for t in manifest.tensors})
        self._folder = folder
        self._manifest = manifest
        self._check = check
        self._records = {t.name: t for t in manifest.tensors}
        self._begins: dict[int, dict[str, int]] = {}
        """Part -> where the bytes of its entries begin; of parts that are trusted."""

    def read(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        fresh = [self.blank(name, box) for name, box in wanted]
        sinks: _Sinks = {}
        for (name, box), into in zip(wanted, fresh, strict=True):
            t = self._records[name]
            for s in t.stretches:
                extent = Extent.of(t.shape, s.first, s.count, s.box)
                if into.numel() and extent.touches(box):
                    key = PartEntry(t.name, t.dtype, t.shape, s.first, s.count, s.box).key
                    sinks.setdefault(s.part, {}).setdefault(key, []).append(Filling(extent, box, into))
        self._go_through(sinks, self._check)
        return fresh

    def check(self, names: Iterable[str] | None = None) -> None:
        every = range(1, len(self._manifest.parts) + 1)
        self.check_parts(every if names is None else {s.part for name in names for s in self._records[name].stretches})

    def check_parts(self, parts: Iterable[int]) -> None:
        """Check these parts (1 is the first), as far as they were not read from yet. So members can divide the work."""
        self._go_through({part: {} for part in parts if part not in self._begins}, check=True)

    def _go_through(self, sinks: _Sinks, check: bool) -> None:
        """Several parts at once; raises what is wrong with the first of them."""
        sizes = entries(self._folder) if sinks.keys() - self._begins.keys() else {}

        def go(part: int) -> None:
            file = self._manifest.parts[part - 1]
            if part not in self._begins:
                size, held = sizes.get(file.file), self._manifest.entries_of(part)
                if check:
                    self._begins[part] = check_part(self._folder, file, size, held, sinks[part])
                    return
                self._begins[part] = find_in_part(self._folder, file, size, held)
            for key, fillings in sinks[part].items():
                for filling in fillings:
                    pour(self._folder, file.file, self._begins[part][key], filling.spans(), filling)

        with ThreadPoolExecutor(max_workers=_READERS) as readers:
            for _ in readers.map(go, sorted(sinks)):
                pass


Found = TypeVar("Found")


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
    _opened(folder, manifest, check=True).check()
    return manifest


def newest_sound(
    folder: Where, read: Callable[[Where, int], Found | None], at_most: int | None = None
) -> tuple[Found | None, list[tuple[int, str]]]:
    """What `read` makes of the newest checkpoint that can be used, and the newer ones that cannot: (step, why).

    `read` may pass one over by returning None. Only faults of a checkpoint are skipped. When the disk or the store
    cannot be read at all, that is raised: to start from an older step because of a lost connection would be wrong.
    The folder is listed again after each one: a run that goes on removes old checkpoints, perhaps the one that was
    being read, and has then sealed another.
    """
    tried: dict[int, str] = {}
    while left := [
        step for step in list_checkpoints(folder) if step not in tried and (at_most is None or step <= at_most)
    ]:
        tried[left[0]] = ""
        try:
            found = read(folder, left[0])
        except CheckpointUnusable as error:
            tried[left[0]] = error.message
        else:
            if found is not None:
                return found, _faults(tried)
    return None, _faults(tried)


def _faults(tried: Mapping[int, str]) -> list[tuple[int, str]]:
    return [(step, why) for step, why in tried.items() if why]


def read_tensors(folder: Where, manifest: Manifest, names: Collection[str] | None = None) -> dict[str, torch.Tensor]:
    """Tensors of a checkpoint, all or those named, as new CPU tensors. The parts they lie in are checked on the way.

    >>> from distbelief.checkpoint.manifest import Facts
    >>> from distbelief.checkpoint.parts import Slice
    >>> from distbelief.checkpoint.saving import seal, write_part
    >>> part = write_part("memory://read", 1, 1, 1, [Slice.whole("w", torch.ones(2))])
    >>> read_tensors("memory://read", seal("memory://read", 1, Facts(), [part]))
    {'w': tensor([1., 1.])}
    """
    tensors = _opened(folder, manifest, check=True)
    return tensors.read_whole([name for name in tensors if names is None or name in names])


def open_checkpoint(folder: Where, step: int, check: bool = True) -> tuple[Manifest, CheckpointTensors]:
    """A checkpoint whose tensors are read when they are asked for, whole or a box of them.

    With `check`, the first time that something of a part is wanted all of it is read, in front of its checksum. So
    `read_boxes` for all that is wanted reads every file that it needs once, and holds no more than what is wanted and
    a block for each of a few files. Without, only the bytes that are wanted are read: when somebody has verified it.

    >>> from distbelief.checkpoint.manifest import Facts
    >>> from distbelief.checkpoint.parts import Slice
    >>> from distbelief.checkpoint.saving import seal, write_part
    >>> columns = Slice.of_box("w", torch.ones(3, 1), (3, 2), ((0, 3), (0, 1)))
    >>> others = Slice.of_box("w", torch.zeros(3, 1), (3, 2), ((0, 3), (1, 2)))
    >>> parts = [write_part("memory://open", 1, k, 2, [piece]) for k, piece in enumerate([columns, others], start=1)]
    >>> _ = seal("memory://open", 1, Facts(), parts)
    >>> _, tensors = open_checkpoint("memory://open", 1)
    >>> tensors.outlines, tensors.read_box("w", ((1, 2), (0, 2)))
    ({'w': (torch.float32, (3, 2))}, tensor([[1., 0.]]))
    """
    manifest = read_manifest(folder, step)
    return manifest, _opened(folder, manifest, check)


def _opened(folder: Where, manifest: Manifest, check: bool) -> CheckpointTensors:
    return CheckpointTensors(folder_at(folder) / m.step_name(manifest.step), manifest, check)
