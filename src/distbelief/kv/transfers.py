"""The calls of a store as changes of slices and questions to slices; and the memory of pushes.

The client of parameter servers (strategies/ps/protocol/client.py) sends every change until the slice's primary has
acknowledged it. A push copies the caller's tensor into a push buffer first, so the call returns at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from distbelief.errors import DistBeliefError
from distbelief.kv.messages import (
    CATALOGUE,
    AddToKey,
    AddToRows,
    Consult,
    Consulted,
    Entry,
    PullKey,
    PullKeyRows,
)
from distbelief.kv.supervisorlink import Deadline, SupervisorLink
from distbelief.kv.tensorbytes import as_bytes
from distbelief.strategies.ps.protocol.client import ServerClient, Stop
from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.tables.rowbuckets import bucket_of
from distbelief.transport.shm.segment import Segment, SegmentClient


@dataclass(frozen=True)
class _Wanted:
    key: str
    slice: int
    part: torch.Tensor
    """The part of the output for these values."""


class Transfers:
    """A client's pushes, pulls and questions to the catalogue."""

    def __init__(
        self,
        client: ServerClient,
        link: SupervisorLink,
        buffers: PushBuffers,
        who: tuple[int, int, bool],
        me: int,
        slices: int,
        timeout_s: float,
    ) -> None:
        """`who`: (rank, workers, whether pushes are synchronous)."""
        self.client = client
        self.link = link
        self.me = me
        self.slices = range(1, slices + 1)
        self.timeout_s = timeout_s
        self._buffers = buffers
        self._rank, self._workers, self._sync = who
        self._rounds: dict[str, int] = {}
        """Key -> the round of the next synchronous push."""

    def deadline(self, what: str, seconds: float | None = None) -> Deadline:
        hint = "look in the logs beside the connection file; give more time with kv.connect(…, timeout_s=…)"
        return Deadline(self.link, self.timeout_s if seconds is None else seconds, what, hint)

    def close(self) -> None:
        self.link.close()
        self.client.close()
        self._buffers.close()

    def settle(self) -> None:
        """Wait until every push is acknowledged."""
        self.client.settle(self.deadline("servers have not acknowledged the pushes"))
        self._buffers.reclaim(self.client.waits_for)

    # --- the catalogue -----------------------------------------------------------------------------------------------

    def change(self, content: Any) -> None:
        self.client.change(CATALOGUE, content, self.deadline("the service's catalogue did not answer"))

    def consult(
        self, keys: Sequence[str], sealed: bool = False, rank: int = -1, deadline: Stop | None = None
    ) -> Consulted:
        found: list[Consulted] = []
        after = self.client.sent(CATALOGUE)
        self.client.ask(
            [lambda ticket: Consult(ticket, CATALOGUE, self.me, after, list(keys), sealed, rank)],
            deadline or self.deadline("the service's catalogue did not answer"),
            lambda framed: found.append(framed.message),
        )
        return found[0]

    # --- tensors -----------------------------------------------------------------------------------------------------

    def push(self, key: str, entry: Entry, value: torch.Tensor) -> None:
        number = self._round(key, [stretch.slice for stretch in entry.stretches])
        item_bytes = value.dtype.itemsize
        size_bytes = value.numel() * item_bytes
        content: Any = None
        if size_bytes < SMALLEST:
            content = bytes_of(value)
            made = AddToKey(key, number, self._rank, self._workers)
            for one in entry.stretches:
                self.client.push(one.slice, made, content[one.first * item_bytes : one.end * item_bytes])
            return
        self._buffers.reclaim(self.client.waits_for)
        if self._buffers.reserved_bytes > MOST_RESERVED_BYTES:
            self.settle()
        buffer = self._buffers.reserve(size_bytes)
        buffer.tensor(value.dtype, value.numel()).view(value.shape).copy_(value)
        for one in entry.stretches:
            offset = one.first * item_bytes
            made = AddToKey(key, number, self._rank, self._workers, buffer.name, offset)
            if not buffer.name:
                content = buffer.segment.view(offset, (one.end - one.first) * item_bytes)
            buffer.pushes.append((one.slice, self.client.push(one.slice, made, content)))

    def pull(self, entries: dict[str, Entry], outs: Sequence[torch.Tensor]) -> None:
        """Copy the values of these keys into these tensors."""
        flat = [_flat(one) for one in outs]
        wanted = [
            _Wanted(key, one.slice, whole[one.first : one.end])
            for (key, entry), whole in zip(entries.items(), flat, strict=True)
            for one in entry.stretches
        ]
        missed = self._pull(wanted, inline=not self._buffers.shares)
        if missed:  # a server ended, or gave the slice away, before its memory was read
            self._pull(missed, inline=True)
        for out, whole in zip(outs, flat, strict=True):
            if whole.data_ptr() != out.data_ptr():
                out.copy_(whole.view(out.shape))
        self._buffers.reclaim(self.client.waits_for)

    def _pull(self, wanted: list[_Wanted], inline: bool) -> list[_Wanted]:
        """Returns the stretches whose memory could not be mapped."""
        asked: dict[int, _Wanted] = {}
        missed: list[_Wanted] = []

        def question(one: _Wanted) -> Callable[[int], PullKey]:
            after, number = self.client.sent(one.slice), self._rounds.get(one.key, 0)

            def made(ticket: int) -> PullKey:
                asked[ticket] = one
                return PullKey(ticket, one.slice, self.me, after, one.key, number, inline)

            return made

        def arrived(framed: Framed) -> None:
            reply, one = framed.message, asked[framed.message.ticket]
            _require(reply.there, one.key)
            if reply.segment:
                memory = self._buffers.values(one.key, one.slice, reply.segment)
                if memory is None:
                    missed.append(one)
                else:
                    one.part.copy_(memory.tensor(one.part.dtype, 0, one.part.numel()))
            elif one.part.numel():
                one.part.copy_(torch.frombuffer(framed.payload, dtype=one.part.dtype))

        key = wanted[0].key if wanted else ""
        self.client.ask([question(one) for one in wanted], self.deadline(self._unanswered(key)), arrived)
        return missed

    # --- tables ------------------------------------------------------------------------------------------------------

    def push_rows(self, key: str, rows: torch.Tensor, gradients: torch.Tensor) -> None:
        number = self._round(key, self.slices)
        for slice_, places in self._by_slice(rows, empty=number >= 0):
            some = rows[places]
            content = torch.cat([as_bytes(some), as_bytes(gradients[places])]).numpy()
            self.client.push(slice_, AddToRows(key, len(some), number, self._rank, self._workers), content)

    def pull_rows(self, key: str, rows: torch.Tensor, out: torch.Tensor) -> None:
        places: dict[int, torch.Tensor] = {}

        def asked(slice_: int, some: torch.Tensor) -> Callable[[int], PullKeyRows]:
            numbers, after = rows[some].numpy().tobytes(), self.client.sent(slice_)

            def made(ticket: int) -> PullKeyRows:
                places[ticket] = some
                return PullKeyRows(ticket, slice_, self.me, after, key, numbers, self._rounds.get(key, 0))

            return made

        def arrived(framed: Framed) -> None:
            _require(framed.message.there, key)
            some = places[framed.message.ticket]
            values = torch.frombuffer(framed.payload, dtype=torch.float32).view(len(some), -1)
            out[some.to(out.device)] = values.to(out.device)

        questions = [asked(slice_, some) for slice_, some in self._by_slice(rows)]
        self.client.ask(questions, self.deadline(self._unanswered(key)), arrived)

    def _by_slice(self, rows: torch.Tensor, empty: bool = False) -> Iterator[tuple[int, torch.Tensor]]:
        """(slice, places of its rows in `rows`) for each slice that has some of the rows; `empty`: for every slice."""
        owners = bucket_of(rows) % len(self.slices)
        order = torch.argsort(owners, stable=True)
        counts = torch.bincount(owners, minlength=len(self.slices)).tolist()
        for slice_, places in zip(self.slices, torch.split(order, counts), strict=True):
            if len(places) or empty:
                yield slice_, places

    # --- synchronous pushes ------------------------------------------------------------------------------------------

    def _round(self, key: str, slices: Sequence[int]) -> int:
        """The round of the next synchronous push; -1: not synchronous. A restarted worker asks the servers."""
        if not self._sync:
            return -1
        if key not in self._rounds:
            found: list[int] = []
            self.client.ask(
                [_rounds_of(self.me, key, number) for number in slices],
                self.deadline(f"servers did not answer about '{key}'"),
                lambda framed: found.append(framed.message.rounds),
            )
            self._rounds[key] = min(found, default=0)
        number = self._rounds[key]
        self._rounds[key] += 1
        return number

    def _unanswered(self, key: str) -> str:
        if self._sync:
            return f"the pushes of all {self._workers} workers to '{key}' were not there"
        return f"servers did not give the value of '{key}'"


def bytes_of(value: torch.Tensor) -> Any:
    """A copy of the bytes of a tensor."""
    return as_bytes(value.cpu()).clone().numpy()


def _flat(out: torch.Tensor) -> torch.Tensor:
    """A flat view of the output; other memory if the output is not contiguous or not on the CPU."""
    return out.view(-1) if out.is_contiguous() and out.is_cpu else torch.empty(out.numel(), dtype=out.dtype)


def _rounds_of(me: int, key: str, number: int) -> Callable[[int], PullKey]:
    return lambda ticket: PullKey(ticket, number, me, 0, key, values=False)


def _require(there: bool, key: str) -> None:
    if not there:
        raise DistBeliefError(
            f"a server has no data of '{key}'", hint="it was declared, but its servers do not know it: report this"
        )


SMALLEST = 1 << 16
MOST_RESERVED_BYTES = 256 << 20
"""If more than this is unacknowledged, a push waits for the pushes before it."""


@dataclass
class PushBuffer:
    name: str
    """The name under which servers can map it; empty: they cannot."""
    segment: Segment
    pushes: list[tuple[int, int]] = field(default_factory=list)
    """(slice, number) of the pushes that are sent from it."""

    @property
    def size_bytes(self) -> int:
        return self.segment.size_bytes

    def tensor(self, dtype: torch.dtype, count: int) -> torch.Tensor:
        return self.segment.tensor(dtype, 0, count)


class PushBuffers:
    """The memory of a client's pushes. A buffer keeps its content until its pushes are acknowledged, then it is reused.
    If servers can map the memory, messages only name it; else they carry its bytes."""

    def __init__(self, client: int, segments: SegmentClient | None) -> None:
        self._client = client
        self._segments = segments
        self._made = 0
        self._free: list[PushBuffer] = []
        self._reserved: list[PushBuffer] = []
        self._mapped: dict[tuple[str, int], tuple[str, Segment]] = {}

    @property
    def reserved_bytes(self) -> int:
        return sum(one.size_bytes for one in self._reserved)

    @property
    def shares(self) -> bool:
        return self._segments is not None

    def reserve(self, size_bytes: int) -> PushBuffer:
        """A buffer of at least this size."""
        size = max(SMALLEST, 1 << (size_bytes - 1).bit_length())
        fitting = (one for one in self._free if one.size_bytes >= size)
        found = min(fitting, key=lambda one: one.size_bytes, default=None)
        if found is not None:
            self._free.remove(found)
        elif self._segments is not None:
            self._made += 1
            name = f"client {self._client}/{self._made}"
            found = PushBuffer(name, self._segments.segment(name, size))
        else:
            found = PushBuffer("", Segment.private(size))
        found.pushes.clear()
        self._reserved.append(found)
        return found

    def reclaim(self, waits_for: Callable[[int, int], bool]) -> None:
        """Reuse the buffers whose pushes are all acknowledged."""
        still: list[PushBuffer] = []
        for one in self._reserved:
            one.pushes = [push for push in one.pushes if waits_for(*push)]
            (still if one.pushes else self._free).append(one)
        self._reserved = still

    def close(self) -> None:
        if self._segments is not None:
            self._segments.close()

    def values(self, key: str, slice_: int, name: str) -> Segment | None:
        """The mapped memory of a key's stretch on a server; None: it cannot be mapped any more. Memory of the slice's
        previous primary is unmapped."""
        assert self._segments is not None
        held = self._mapped.get((key, slice_))
        if held is None or held[0] != name:
            try:
                held = self._mapped[key, slice_] = (name, self._segments.segment(name))
            except DistBeliefError:
                return None
        return held[1]
