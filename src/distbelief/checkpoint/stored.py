"""The tensors of a checkpoint, read lazily. What was not checked is not given.

A part's checksum is over all of its bytes, so the first reading from a part reads all of it, as a stream, and keeps
what is wanted. From then on it is trusted, and only the bytes that are needed are read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from distbelief.checkpoint.filling import Extent, Filling
from distbelief.checkpoint.lazy import LazyTensors, Wanted
from distbelief.checkpoint.manifest import Manifest, PartEntry
from distbelief.checkpoint.partreading import check_part, find_in_part, pour
from distbelief.checkpoint.storage import Folder, entries

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
