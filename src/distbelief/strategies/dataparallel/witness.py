"""With `--recheck all` on one host: every tile's sum and update are computed twice, by two members.

Each member is the witness of the tiles of the next member. It has a private copy of these tiles (values and optimizer
state), to which it applies every step itself: it adds up the partial sums and runs the optimizer on its copy. Before
any member updates a tile, all members exchange the checksums of these copies. The owner of a tile compares its own
result with the witness's before it marks the tile as done, so a step in which they differ is not committed.

Owner and witness read the same partial sums. So after the witnesses have read them, every member compares its partial
sums with the checksums that the recheck of the step agreed on.

A copy goes on from step to step. So a bit that flips in the state between two steps is found too.

The member that finds a difference may die before its report arrives. The other members would then finish the step, and
new witnesses would copy the state as it is. So the difference is recorded in memory that outlives the member, and the
next generation ends the run with it (`DisputeRecord`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import msgspec
import numpy as np
import torch

from distbelief.errors import ResultsDiffer
from distbelief.strategies.base import Seat
from distbelief.strategies.flatmodel.compute import ShardComputer
from distbelief.strategies.flatmodel.layout import Layout
from distbelief.strategies.flatmodel.recheck import IF_AGAIN, Recheck, checksum, member_names
from distbelief.strategies.flatmodel.rules.rechecks import shortened
from distbelief.strategies.flatmodel.state import ReplicaState
from distbelief.strategies.flatmodel.tileoptimizer import Recipe, TileMemory, TileUpdates, set_buffers, state_bytes
from distbelief.transport.exchange import Exchange
from distbelief.transport.shm.memfd import require_memory
from distbelief.transport.shm.segment import Segment

_RECORD_BYTES = 4096
_RECORDS = 64
"""One per rank, so that two members do not write to the same place; ranks beyond this number share places."""
_HEAD = struct.Struct("qqq")  # length of the message, step, shard

Sum = Callable[[int], torch.Tensor]
"""Tile -> the step's sum of its gradients, scaled as for the optimizer; or of its buffers."""


class DisputeRecord:
    """The difference between an owner and a witness that ends the run, in the shared memory of the run."""

    def __init__(self, exchange: Exchange) -> None:
        self._buffer = exchange.state(_RECORD_BYTES * _RECORDS, "dispute").buffer
        self._rank = exchange.rank

    def write(self, error: ResultsDiffer) -> None:
        at = self._rank % _RECORDS * _RECORD_BYTES
        message = error.message.encode()[: _RECORD_BYTES - _HEAD.size]
        self._buffer[at + _HEAD.size : at + _HEAD.size + len(message)] = message
        _HEAD.pack_into(self._buffer, at, len(message), error.step, error.shard)

    def require_none(self) -> None:
        """Raise the difference that a member of an earlier generation recorded. Call it after all members have met."""
        for at in range(0, _RECORDS * _RECORD_BYTES, _RECORD_BYTES):
            length, step, shard = _HEAD.unpack_from(self._buffer, at)
            if length:
                message = bytes(self._buffer[at + _HEAD.size : at + _HEAD.size + length]).decode(errors="replace")
                raise ResultsDiffer(message, IF_AGAIN, step, shard)


class Witness:
    """Collective: all members construct it at the same point of a generation, and call `expect` in every step."""

    def __init__(
        self, computer: ShardComputer, recipe: Recipe, seat: Seat, state: ReplicaState, exchange: Exchange,
        recheck: Recheck, record: DisputeRecord,
    ) -> None:  # fmt: skip
        self._record = record
        self._layout = layout = computer.layout
        self._seat = seat
        self._state = state
        self._exchange = exchange
        self._recheck = recheck
        self._expected: dict[int, int] = {}
        owned = [msgspec.msgpack.decode(one) for one in exchange.gather(msgspec.msgpack.encode(list(exchange.tiles)))]
        tiles: list[int] = owned[(seat.rank + 1) % len(owned)]
        states = {t: state_bytes(recipe, layout, t) if t < layout.parameter_tiles else 0 for t in tiles}
        sizes = {t: layout.tiles[t].size_bytes + states[t] for t in tiles}
        require_memory("rechecks", sum(sizes.values()))
        self._copies = {tile: Segment.private(size) for tile, size in sizes.items()}
        self._values = {
            t: copy.tensor(layout.tiles[t].dtype, 0, layout.tiles[t].numel) for t, copy in self._copies.items()
        }
        for tile, copy in self._copies.items():
            state.copy_tile(tile, copy, 0)
        self.parameter_tiles = [t for t in tiles if t < layout.parameter_tiles]
        memory = [
            TileMemory(t, self._values[t], self._copies[t].tensor(torch.uint8, layout.tiles[t].size_bytes, states[t]))
            for t in self.parameter_tiles
        ]
        self._updates = TileUpdates(computer.job.seed, recipe, layout, memory, apart=True)

    def confirm_squares(self, step: int, mine: dict[int, float], everybody: Sequence[float]) -> None:
        """Compare the squares of the witnessed tiles' norms, computed by this member, with those of the owners."""
        for tile, square in mine.items():
            if struct.pack("d", square) != struct.pack("d", everybody[tile]):  # bits, because NaN != NaN
                raise self._error(step, tile, (self._seat.rank + 1) % len(self._seat.ranges), self._seat.rank)

    def expect(self, step: int, gradient: Sum, average: Sum, rate: float, untouched: np.ndarray, within: float) -> None:
        """Apply the step to the copies, and learn the checksums of this member's tiles from their witness."""
        found: dict[int, int] = {}
        for tile, copy in self._copies.items():
            if self._state.has(tile, step):  # an earlier generation has updated the tile; the copy is newer
                continue
            if tile < self._layout.parameter_tiles:
                self._updates.apply(step, {tile: gradient(tile)}, rate, untouched, within)
            else:
                set_buffers(self._values[tile], average(tile), self._layout.pieces[tile], untouched)
            found[tile] = checksum(copy, 0, copy.size_bytes)
        gathered = self._exchange.gather(msgspec.msgpack.encode(found))
        before = (self._seat.rank - 1) % len(gathered)
        self._expected = msgspec.msgpack.decode(gathered[before], type=dict[int, int])
        if changed := self._recheck.changed_sums():
            raise self._recorded(self._recheck.changed_in_memory(self._seat.rank, step, changed))

    def confirm(self, step: int, tile: int) -> None:
        """Compare a tile that this member has updated with its witness's copy."""
        if self._state.checksum(tile) != self._expected[tile]:
            error = self._error(step, tile, self._seat.rank, (self._seat.rank - 1) % len(self._seat.ranges))
            self._state.undo()
            raise error

    def _recorded(self, error: ResultsDiffer) -> ResultsDiffer:
        self._record.write(error)
        return error

    def _error(self, step: int, tile: int, owner: int, witness: int) -> ResultsDiffer:
        names, where = member_names(self._seat), contents(self._layout, [tile])
        error = ResultsDiffer(
            f"{names[owner]} and {names[witness]} got different values of {where} from step {step}: the sum "
            f"of the gradients, the optimizer or the memory of one of them is wrong. "
            f"{self._recheck.last_good(step)}",
            IF_AGAIN,
            step,
            -1,
        )
        return self._recorded(error)


def contents(layout: Layout, tiles: Sequence[int]) -> str:
    """The parameters and buffers of these tiles, for people."""
    entries = dict.fromkeys(piece.entry for tile in tiles for piece in layout.pieces[tile])
    return shortened([layout.entries[entry].name for entry in entries])
