"""The state of a replica in one block of memory; stamps and an undo log make a commit in shared memory atomic.

    | stamps | history | note | integers, twice | values: parameters, float buffers | optimizer state |

Before a tile is updated, `open` copies its old bytes to the member's undo log and stamps the tile as open; after the
update, `close` stamps it as done. A member has one tile open at a time, and its undo log is always at the same place,
which stays in the processor's cache. So a member that dies in the middle of a commit leaves tiles that have the step,
tiles that do not have it, and at most one torn tile, whose old bytes are in the undo log: `repair` puts them back. Then
the step can only be finished, not undone. That is possible: the step was certain before the first tile was opened, and
nobody writes to the partial sums that it adds up (docs/decisions/0017).

Members that share no memory have a state each. A death takes the member's state along, so there is no undo log.

The integer buffers before and after a step lie in two places, used in turn. The results of the last steps (history) and
the last evaluation (note) are in the block too: if a member dies before it has reported them, another one can.
"""

from __future__ import annotations

import ctypes
import struct
import zlib
from collections.abc import Sequence

import numpy as np
import torch

from distbelief.errors import DistBeliefError
from distbelief.strategies.base import REMEMBERED, Applied
from distbelief.strategies.flatmodel.layout import Layout
from distbelief.strategies.flatmodel.tileoptimizer import Recipe, state_bytes
from distbelief.transport.device.exchange import DeviceExchange
from distbelief.transport.exchange import Exchange, tile_views
from distbelief.transport.shm.segment import Memory, Segment

_PAGE = 4096
_NOTE_BYTES = 1 << 19
_NOTE_HEAD = struct.Struct("qq")  # steps applied when the note was written, and its length
_STEP = np.dtype(
    [
        ("after", np.int64),  # the number of steps applied with it; unwritten memory has 0, which no step has
        ("loss", np.float64),
        ("samples", np.int64),
        ("fingerprint", "S16"),
        ("generation", np.int64),
        ("at", np.float64),
    ]
)


class UndoLog:
    """The old bytes of the tile that one member is updating: | tile and step | bytes |"""

    HEAD_BYTES = 64

    def __init__(self, segment: Segment) -> None:
        self._head = np.frombuffer(segment.buffer, np.int64, 2)
        self._at = segment.tensor(torch.uint8, self.HEAD_BYTES, segment.size_bytes - self.HEAD_BYTES)

    @property
    def holds(self) -> tuple[int, int]:
        """(tile, step): the saved bytes are the tile's before this step; tile -1: none. If two members' undo logs hold
        the same tile before the same step, their bytes are equal."""
        return int(self._head[0]) - 1, int(self._head[1])

    def save(self, tile: int, step: int, current: Sequence[torch.Tensor]) -> None:
        self._head[0] = 0
        at = self._at.data_ptr()
        for piece in current:
            # a third faster than Tensor.copy_ here: it does not read the target
            ctypes.memmove(at, piece.data_ptr(), piece.numel())
            at += piece.numel()
        self._head[1] = step
        self._head[0] = tile + 1

    def restore(self, current: Sequence[torch.Tensor]) -> None:
        at = 0
        for piece in current:
            piece.copy_(self._at[at : at + piece.numel()])
            at += piece.numel()


class ReplicaState:
    """Views of the state's memory. A tile's stamp is 2t when t steps are applied to it, and 2t+1 while step t is being
    applied: the tile is open, and may be torn."""

    def __init__(self, layout: Layout, recipe: Recipe, exchange: Exchange, integer_bytes: int) -> None:
        self.layout = layout
        sizes = [state_bytes(recipe, layout, t) if t < layout.parameter_tiles else 0 for t in range(len(layout.tiles))]
        history_at = _pages(8 * (2 + len(layout.tiles)))
        self._note_at = history_at + _pages(REMEMBERED * _STEP.itemsize)
        self._integers_at = self._note_at + _NOTE_BYTES
        self._integer_bytes = integer_bytes
        records_bytes = self._integers_at + _pages(2 * integer_bytes)
        numbers_bytes = _pages(layout.size_bytes) + _pages(sum(sizes))
        if isinstance(exchange, DeviceExchange):
            self.segment: Segment = exchange.state(records_bytes)
            self.memory: Memory = exchange.numbers(numbers_bytes)
            self.values_at = 0
        else:
            self.segment = self.memory = exchange.state(records_bytes + numbers_bytes)
            self.values_at = records_bytes
        self._records_bytes = records_bytes
        self._numbers_bytes = numbers_bytes
        optimizer_at = self.values_at + _pages(layout.size_bytes)
        self._stamps = np.frombuffer(self.segment.buffer, np.int64, 1 + len(layout.tiles))
        self._history = np.frombuffer(self.segment.buffer, _STEP, REMEMBERED, history_at)
        self.values = tile_views(self.memory, layout.tiles, self.values_at)
        self.optimizer = []
        self._current: list[list[torch.Tensor]] = []
        for tile, size_bytes in zip(layout.tiles, sizes, strict=True):
            self.optimizer.append(self.memory.tensor(torch.uint8, optimizer_at, size_bytes))
            stretches = [(self.values_at + tile.offset_bytes, tile.size_bytes), (optimizer_at, size_bytes)]
            stretches = [(at, size) for at, size in stretches if size]
            self._current.append([self.memory.tensor(torch.uint8, at, size) for at, size in stretches])
            optimizer_at += size_bytes
        self._undo_logs = np.frombuffer(self.segment.buffer, np.int64, 1, 8 * (1 + len(layout.tiles)))
        self._exchange = exchange
        self._undo_bytes = max((t.size_bytes + size for t, size in zip(layout.tiles, sizes, strict=True)), default=0)
        self._undo_log = self._undo_log_of(exchange.rank) if exchange.shares_state else None

    @property
    def initialised(self) -> bool:
        return bool(self._stamps[0])

    def begin_at(self, step: int) -> None:
        """Declare that the values are those after `step` steps. Only the member that writes the first state calls
        it."""
        self._stamps[1:] = 2 * step
        self._stamps[0] = True

    def expect(self, members: int) -> None:
        """From now on up to `members` members have an undo log. No member may be writing."""
        self._undo_logs[0] = max(self._undo_logs[0], members)

    def _undo_log_of(self, rank: int) -> UndoLog:
        return UndoLog(self._exchange.state(UndoLog.HEAD_BYTES + self._undo_bytes, f"undolog/{rank}"))

    def forget(self) -> None:
        """Mark the state as not initialised, and clear the optimizer state."""
        self._stamps[0] = False
        for memory in self.optimizer:
            memory.zero_()

    def copy_tile(self, tile: int, into: Segment, at_bytes: int) -> None:
        """Copy a tile's values, then its optimizer state."""
        to = into.tensor(torch.uint8, 0, into.size_bytes)[at_bytes:]
        for current in self._current[tile]:
            if current.is_cuda:
                to[: current.numel()].copy_(current, non_blocking=True)
            else:
                ctypes.memmove(to.data_ptr(), current.data_ptr(), current.numel())
            to = to[current.numel() :]

    def blocks(self) -> list[torch.Tensor]:
        """All memory that another replica must copy for this state. The page with the first stamps comes last."""
        first = self.segment.tensor(torch.uint8, 0, _PAGE)
        rest = self.segment.tensor(torch.uint8, _PAGE, self._records_bytes - _PAGE)
        return [self.memory.tensor(torch.uint8, self.values_at, self._numbers_bytes), rest, first]

    @property
    def steps_applied(self) -> int:
        """Steps that every tile has."""
        return int(self._stamps[1:].min()) // 2

    def open(self, tile: int, step: int) -> None:
        """Save the tile's old bytes in the undo log and mark the tile as open: it may be torn until `close`."""
        if self._undo_log:
            self._undo_log.save(tile, step, self._current[tile])
        self._stamps[1 + tile] = 2 * step + 1

    def close(self, tile: int, step: int) -> None:
        self._stamps[1 + tile] = 2 * step + 2

    def undo(self) -> None:
        """Put back the old bytes of the tile that this member has open."""
        assert self._undo_log is not None
        tile, step = self._undo_log.holds
        self._undo_log.restore(self._current[tile])
        self._stamps[1 + tile] = 2 * step

    def checksum(self, tile: int) -> int:
        """A CRC-32 of a tile's values and optimizer state."""
        found = 0
        for current in self._current[tile]:
            found = zlib.crc32(current.numpy().data, found)
        return found

    def open_all(self, step: int) -> None:
        """Open all tiles, where there is no undo log."""
        self._stamps[1:] = 2 * step + 1

    def close_all(self, step: int) -> None:
        self._stamps[1:] = 2 * step + 2

    def has(self, tile: int, step: int) -> bool:
        """Whether the step is applied to the tile."""
        return int(self._stamps[1 + tile]) >= 2 * step + 2

    @property
    def is_applied_in_part(self) -> bool:
        """Whether some tiles have a step that others lack."""
        return int(self._stamps[1:].max()) > 2 * self.steps_applied

    def repair(self) -> list[int]:
        """Restore the old bytes of torn tiles, and return these tiles. No other member may be writing."""
        torn = []
        for rank in range(int(self._undo_logs[0])):
            tile, step = (undo_log := self._undo_log_of(rank)).holds
            if tile >= 0 and int(self._stamps[1 + tile]) == 2 * step + 1:
                undo_log.restore(self._current[tile])
                self._stamps[1 + tile] = 2 * step
                torn.append(tile)
        if (self._stamps[1:] % 2).any():
            raise DistBeliefError("a tile in shared memory is torn, and no undo log has its old bytes")
        return torn

    # --- integer buffers, history and note ----------------------------------------------------------------------------

    def integers(self, applied: int) -> bytes:
        """The integer buffers after `applied` steps, which is the present number of steps or one less."""
        return bytes(self.segment.view(self._integers_at + applied % 2 * self._integer_bytes, self._integer_bytes))

    def write_integers(self, applied: int, content: bytes) -> None:
        if content:
            self.segment.view(self._integers_at + applied % 2 * self._integer_bytes, self._integer_bytes)[:] = content

    def remember(self, applied: Applied) -> None:
        """Store the result of a step. Call it before the last tile is closed, so that every applied step has a
        result."""
        place = self._history[applied.step % REMEMBERED]
        place["after"] = 0
        place["loss"], place["samples"], place["at"] = applied.loss, applied.samples, applied.at
        place["fingerprint"], place["generation"] = applied.fingerprint, applied.generation
        place["after"] = applied.step + 1

    def remembered(self, first: int, until: int | None = None) -> list[Applied]:
        """The results of the applied steps from `first` on, as far back as they are kept. `until`: the number of
        applied steps, where several steps are applied at once."""
        applied = self.steps_applied if until is None else until
        steps = np.arange(max(first, applied - REMEMBERED, 0), applied)
        places = self._history[steps % REMEMBERED]
        return [
            Applied(after - 1, loss, samples, fingerprint.decode(), generation, at)
            for after, loss, samples, fingerprint, generation, at in places[places["after"] == steps + 1].tolist()
        ]

    def write_note(self, applied: int, content: bytes) -> None:
        """Store a note with the state after `applied` steps."""
        if len(content) > _NOTE_BYTES - _NOTE_HEAD.size:
            raise ValueError(f"a note of {len(content)} bytes is too long")
        buffer = self.segment.buffer
        _NOTE_HEAD.pack_into(buffer, self._note_at, -1, 0)
        at = self._note_at + _NOTE_HEAD.size
        buffer[at : at + len(content)] = content
        _NOTE_HEAD.pack_into(buffer, self._note_at, applied, len(content))

    def note(self) -> tuple[int, bytes]:
        """(steps applied when the note was written, content). Empty content: there is no note."""
        head = _NOTE_HEAD.unpack_from(self.segment.buffer, self._note_at)
        applied, length = head
        at = self._note_at + _NOTE_HEAD.size
        content = bytes(self.segment.buffer[at : at + length])
        if applied < 0 or head != _NOTE_HEAD.unpack_from(self.segment.buffer, self._note_at):  # being written
            return -1, b""
        return applied, content


def _pages(size_bytes: int) -> int:
    return -(-size_bytes // _PAGE) * _PAGE
