"""The all-reduce replica with compressed gradients. Its state also has each member's residual.

    compression/residual/RANK/NAME   the residual of a parameter's gradient, on the member of that rank
    compression/query/NAME           PowerSGD's queries, which all members share

Any member may send a residual. A run that is resumed with n members gives the residual of rank r to rank r modulo n; a
member adds up its residuals, so their sum over all members stays the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np
import torch

from distbelief.checkpoint.manifest import PartEntry
from distbelief.checkpoint.parts import Slice, dtype_name
from distbelief.compression.exchanges.base import CompressedExchange
from distbelief.compression.exchanges.lowrank import LowRankSums
from distbelief.compression.exchanges.ondevice import CodedOnDevice
from distbelief.compression.option import canonical
from distbelief.strategies.base import BeginFrom, Division, Fetch, Portion, Saved, Seat, nothing_saved
from distbelief.strategies.dataparallel.devicereplica import DeviceReplica
from distbelief.strategies.dataparallel.replica import DataParallelReplica
from distbelief.strategies.flatmodel.compute import ShardComputer
from distbelief.strategies.flatmodel.copying import CopyPiece
from distbelief.strategies.flatmodel.layout import Layout
from distbelief.strategies.flatmodel.namedtensors import OWED, RESIDUAL, TilePortion
from distbelief.strategies.flatmodel.tileoptimizer import Recipe
from distbelief.transport.exchange import CompressedParameter, Compression, Exchange
from distbelief.transport.shm.segment import Segment

_QUERY = f"{OWED}query/"
_OWED_PIECE = -1
_LINE = 64


def compressing(layout: Layout, method: str, seed: int, always: bool, apart: bool = False) -> Compression:
    """The compression of the model's float32 parameters, for this layout."""
    places = tuple(
        CompressedParameter(index, entry.offset_bytes // 4, tuple(entry.shape))
        for index, entry in enumerate(layout.entries)
        if entry.kind == "parameter" and entry.dtype == torch.float32
    )
    tiles = frozenset(t.index for t in layout.tiles[: layout.parameter_tiles] if t.dtype == torch.float32)
    return Compression(canonical(method), tiles, places, seed, always, apart)


class CompressedReplica(DataParallelReplica):
    """The replica of all-reduce with compressed gradients. See `Replica`."""

    coder: CompressedExchange
    """The compressing exchange: `exchange`, or the one inside of it where gradients are on a device."""

    def __init__(
        self, computer: ShardComputer, recipe: Recipe, schedule: Division, seat: Seat, exchange: Exchange, fetch: Fetch,
        exact: bool, begin_from: BeginFrom = nothing_saved,
    ) -> None:  # fmt: skip
        coder = coder_of(exchange)
        assert coder is not None
        self.coder = coder
        found = _Found(begin_from)
        super().__init__(computer, recipe, schedule, seat, exchange, fetch, exact, found)
        self._take_up(found)
        self._told = False

    def _take_up(self, found: _Found) -> None:
        """If the run was loaded from a checkpoint, read this member's residual from it."""
        step = int(self.exchange.gather(str(found.step).encode())[0])
        if step < 0:
            return
        saved = found.saved or found(step)
        if saved is not None:
            owed = self._owed(saved.tensors)
            self.coder.residuals.put(step, owed)

    def _owed(self, saved: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """This member's residual, from the saved residuals of all members."""
        size = self.exchange.size
        vector = torch.zeros(self.coder.residuals.before.numel())
        members = {int(name.removeprefix(RESIDUAL).partition("/")[0]) for name in saved if name.startswith(RESIDUAL)}
        for place, name in self._named():
            for member in sorted(one for one in members if one % size == self.exchange.rank):
                if (key := f"{RESIDUAL}{member}/{name}") in saved:
                    vector[place.part].add_(saved[key].reshape(-1))
        for name, query in self._queries(vector).items():
            query.copy_(saved[name] if name in saved and saved[name].shape == query.shape else self._fresh[name])
        return vector

    def _named(self) -> list[tuple[CompressedParameter, str]]:
        entries = self._computer.layout.entries
        return [(place, entries[place.mark].name) for place in self.coder.compression.places]

    def _queries(self, vector: torch.Tensor) -> dict[str, torch.Tensor]:
        if not isinstance(self.coder, LowRankSums):
            return {}
        entries = self._computer.layout.entries
        return {f"{_QUERY}{entries[mark].name}": query for mark, query in self.coder.queries(vector).items()}

    @cached_property
    def _fresh(self) -> dict[str, torch.Tensor]:
        """The queries at the start of a run, for checkpoints with another compression or none."""
        assert isinstance(self.coder, LowRankSums)
        return self._queries(self.coder.fresh())

    def _update(self, step: int, scale: float, units: int, untouched: np.ndarray) -> None:
        super()._update(step, scale, units, untouched)
        self.coder.keep_untouched(untouched)

    # --- for people --------------------------------------------------------------------------------------------------

    def traffic(self) -> tuple[int, int]:
        return self.coder.traffic

    def plan_lines(self) -> Sequence[str]:
        lines, self.coder.news = self.coder.news, []
        if not self._told and self.exchange.size > 1:
            self._told = True
            method = self.coder.compression.method
            lines.insert(0, f"gradients are compressed ({method}); they go over gloo, also between workers of one host")
        return lines

    # --- for checkpoints ---------------------------------------------------------------------------------------------

    @cached_property
    def _owing(self) -> list[OwingPortion]:
        return [OwingPortion(portion, self._owed_places(rank)) for rank, portion in enumerate(self._portions)]

    def portions(self) -> Sequence[Portion]:
        return self._owing

    def _owed_places(self, rank: int) -> dict[str, tuple[slice, tuple[int, ...]]]:
        """Names of the residual's parts on the member of this rank -> (elements, shape)."""
        found = {f"{RESIDUAL}{rank}/{name}": (place.part, place.shape) for place, name in self._named()}
        if rank == 0:
            vector = self.coder.residuals.before
            for name, query in self._queries(vector).items():
                first = query.storage_offset() - vector.storage_offset()
                found[name] = slice(first, first + query.numel()), tuple(query.shape)
        return found

    def _copier(self, applied: int) -> CopyPiece:
        copy_tile, owed = super()._copier(applied), self.coder.residuals.at(applied)
        elements = self._owing[self.exchange.rank].elements

        def copy(piece: int, memory: Segment, at_bytes: int) -> None:
            if piece != _OWED_PIECE:
                copy_tile(piece, memory, at_bytes)
                return
            room = memory.tensor(torch.float32, at_bytes, elements)
            if owed is None:
                room.zero_()
            else:
                room.copy_(owed[:elements])

        return copy

    def _piece_starts(self) -> Mapping[int, int]:
        return {**super()._piece_starts(), _OWED_PIECE: self._owing[self.exchange.rank].owed_at}


class CompressedDeviceReplica(CompressedReplica, DeviceReplica):
    """`CompressedReplica` and `DeviceReplica` together. The exchange is CodedOnDevice."""

    exchange: CodedOnDevice


class OwingPortion:
    """A member's tiles and its residual. See `Portion`."""

    def __init__(self, tiles: TilePortion, owed: Mapping[str, tuple[slice, tuple[int, ...]]]) -> None:
        self.tiles = tiles
        self._owed = owed
        self.owed_at = -(-tiles.size_bytes // _LINE) * _LINE
        self.elements = max((part.stop for part, _ in owed.values()), default=0)
        self.size_bytes = self.owed_at + 4 * self.elements

    def entries(self) -> list[PartEntry]:
        kind = dtype_name(torch.float32)
        mine = [PartEntry(name, kind, shape, 0, part.stop - part.start) for name, (part, shape) in self._owed.items()]
        return [*self.tiles.entries(), *mine]

    def slices(self, copy: Segment, outside: Mapping[str, torch.Tensor]) -> list[Slice]:
        mine = [
            Slice(name, copy.tensor(torch.float32, self.owed_at + 4 * part.start, part.stop - part.start), shape)
            for name, (part, shape) in self._owed.items()
        ]
        return [*self.tiles.slices(copy, outside), *mine]


class _Found:
    """Calls `begin_from`, and remembers the state that it returned."""

    def __init__(self, begin_from: BeginFrom) -> None:
        self._begin_from = begin_from
        self.saved: Saved | None = None

    @property
    def step(self) -> int:
        """The checkpoint's step; -1: there is no checkpoint, or it has no residuals."""
        known = self.saved is not None and any(name.startswith(OWED) for name in self.saved.tensors)
        return self.saved.step if self.saved and known else -1

    def __call__(self, step: int = -1) -> Saved | None:
        self.saved = self._begin_from(step)
        return self.saved


def coder_of(exchange: Exchange) -> CompressedExchange | None:
    """The compressing exchange inside this exchange, or None."""
    found = exchange.coder if isinstance(exchange, CodedOnDevice) else exchange
    return found if isinstance(found, CompressedExchange) else None
