"""Finds, checks and loads checkpoints. Nothing is loaded unchecked, and nothing is unpickled.

A part's checksum covers all its bytes. So the first read from a part reads all of it and keeps the wanted tensors;
later reads fetch only the bytes that they need.
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

# --- the tensors of a checkpoint, read on access ------------------------------------------------------------------

_READERS = 4  # parts read at once: other threads can run during hashing and waiting

_Sinks = dict[int, dict[str, list[Filling]]]


class CheckpointTensors(LazyTensors):
    def __init__(self, folder: Folder, manifest: Manifest, check: bool) -> None:
        """`folder`: the step's folder. `check`: see `open_checkpoint`."""
        super().__init__({t.name: (getattr(torch, t.dtype), t.shape) for t in manifest.tensors})
        self._folder = folder
        self._manifest = manifest
        self._check = check
        self._records = {t.name: t for t in manifest.tensors}
        self._begins: dict[int, dict[str, int]] = {}
        """Part -> the offsets of its entries' bytes, for parts that are verified."""

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
        """Verify these parts (the first is 1) unless they are verified already. Members can divide the parts among
        themselves."""
        self._go_through({part: {} for part in parts if part not in self._begins}, check=True)

    def _go_through(self, sinks: _Sinks, check: bool) -> None:
        """Read several parts at once; raises the error of the first faulty part."""
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
    """Read and verify the manifest of a step; does not look at the parts."""
    place = folder_at(folder) / m.step_name(step)
    data = read_file(place, m.MANIFEST)
    if data is None:
        raise CheckpointMissing(
            f"there is no checkpoint of step {step}: {place.url_of(m.MANIFEST)} is missing",
            hint="a folder without a manifest is an interrupted save; choose another step",
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
    """The result of `read` for the newest usable checkpoint, and the newer checkpoints that are not usable: (step,
    why).

    `read` may skip a checkpoint by returning None. Only faults of a checkpoint are skipped. If the disk or the store
    cannot be read at all, the error is raised: a lost connection must not make a run start from an older step. The
    folder is listed again after each failure: a running job removes old checkpoints, perhaps the one just read, and has
    then sealed a newer one.
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
    """Read tensors of a checkpoint, all or the named ones, as new CPU tensors. Verifies the parts that hold them.

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
    """Open a checkpoint whose tensors are read on access, whole or as boxes.

    With `check`, the first read from a part reads all of it and verifies its checksum. So one `read_boxes` for all
    wanted tensors reads every file at most once, and holds the wanted boxes and one block for each of a few files in
    memory. Without `check`, only the wanted bytes are read; use it for a checkpoint that is verified already.

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
