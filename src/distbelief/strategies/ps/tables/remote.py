"""A worker's access to sparse tables on servers: it pulls the rows of a forward pass, and pushes their gradients.

Parts of tables are numbered after the slices of the dense parameters. A worker holds only the rows of the present
batch.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from distbelief.checkpoint.weights import Streamed
from distbelief.errors import DistBeliefError
from distbelief.strategies.ps.protocol.client import ServerClient, Stop
from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import Question, ReadState, SliceState
from distbelief.strategies.ps.tables.messages import (
    CountedRows,
    CountRows,
    ListRows,
    PulledRows,
    PullRows,
    ShardRowGradients,
    UpdateRowGradients,
)
from distbelief.strategies.ps.tables.payloads import payloads_by_part
from distbelief.strategies.ps.tables.rowbuckets import part_of
from distbelief.strategies.ps.tables.specs import TableSpec
from distbelief.strategies.tables.embedding import BLOCK_ROWS, EmbeddingTable
from distbelief.strategies.tables.rowgradients import RowGradients

ANY = -1
"""In place of a version: the present one."""


class RemoteTables:
    def __init__(self, tables: Sequence[EmbeddingTable], specs: Sequence[TableSpec], slices: range) -> None:
        self.specs = specs
        self.slices = slices
        """The numbers of the slices that are parts of tables."""
        self.comm_s = 0.0
        """Seconds of waiting for rows."""
        self._tables = tables

    def bind(self, client: ServerClient, stop: Stop, version: Callable[[], int]) -> None:
        """Pull rows through this client from now on. `version` returns the version that they must have."""
        self._client = client
        self._stop = stop
        self._version = version
        for number, table in enumerate(self._tables):
            table.served_by(partial(self._pull, number))

    # --- rows --------------------------------------------------------------------------------------------------------

    def _pull(self, table: int, rows: NDArray[np.int64], learning: bool) -> NDArray[np.float32]:
        started = time.perf_counter()
        values = np.zeros((len(rows), self.specs[table].form.width), np.float32)
        parts = part_of(rows, len(self.slices))
        places = {number: np.flatnonzero(parts == part) for part, number in enumerate(self.slices)}
        version, gone_on = self._version(), []

        def pulled(framed: Framed) -> None:
            message: PulledRows = framed.message
            if message.version < 0:
                gone_on.append(message.slice)
                return
            mine = places[message.slice]
            values[mine] = np.frombuffer(framed.payload, np.float32).reshape(len(mine), values.shape[1])

        questions = [
            partial(_pull, number, version, table, rows[mine].tobytes()) for number, mine in places.items() if mine.size
        ]
        self._client.ask(questions, self._stop, pulled)
        self.comm_s += time.perf_counter() - started
        # If the servers have applied the step of this shard meanwhile, another member has computed the shard. What this
        # worker computes counts nowhere, so the values do not matter.
        if gone_on and not learning:
            raise _gone_on(version)
        return values

    # --- gradients ---------------------------------------------------------------------------------------------------

    def push_step(self, step: int, shards: Sequence[int], found: Sequence[Sequence[RowGradients]], told: bytes) -> None:
        """Push the row gradients of these shards. `flush` sends them. `told`: the shards' loss rows."""
        if self._tables and shards:
            for number, one in zip(self.slices, payloads_by_part(found, len(self.slices)), strict=True):
                self._client.push(number, ShardRowGradients(step, list(shards), one.counts, told), one.content)

    def push_update(self, update: int, step: int, found: Sequence[RowGradients]) -> None:
        """Push the row gradients of an update to every part, also empty ones: a part gets all updates without gaps."""
        if self._tables:
            for number, one in zip(self.slices, payloads_by_part([found], len(self.slices)), strict=True):
                counts = [count for (count,) in one.counts]
                self._client.push(number, UpdateRowGradients(update, step, counts), one.content)

    # --- all of them -------------------------------------------------------------------------------------------------

    def counts(self, version: int) -> list[list[int]]:
        """By part, by table: the number of rows at this version. If a part has a later version already, the present
        number: this version cannot be saved then, and reading the part raises an error."""
        found: dict[int, CountedRows] = {}

        def ask(version: int, slices: Sequence[int]) -> None:
            questions = [partial(_count, number, version) for number in slices]
            each = lambda framed: found.__setitem__(framed.message.slice, framed.message)  # noqa: E731
            self._client.ask(questions, self._stop, each)

        ask(version, self.slices)
        ask(ANY, [number for number, one in found.items() if one.version < 0])
        return [found[number].counts for number in self.slices]

    def weights(self, version: int) -> dict[str, torch.Tensor | Streamed]:
        """All tables with ascending rows. Values come block by block: they may not fit in memory."""
        found: dict[str, torch.Tensor | Streamed] = {}
        for table, spec in enumerate(self.specs):
            rows = self._numbers(table, version)
            shape = (len(rows), spec.form.width)
            found[f"{spec.name}.rows"] = torch.from_numpy(rows)
            found[f"{spec.name}.values"] = Streamed(torch.float32, shape, self._blocks(table, rows))
        return found

    def _numbers(self, table: int, version: int) -> NDArray[np.int64]:
        found = [np.zeros(0, np.int64)]

        def heard(framed: Framed) -> None:
            if framed.message.version < 0:
                raise _gone_on(version)
            found.append(np.frombuffer(framed.payload, np.int64))

        self._client.ask([partial(_numbers, number, version, table) for number in self.slices], self._stop, heard)
        return np.sort(np.concatenate(found))

    def _blocks(self, table: int, rows: NDArray[np.int64]) -> Iterator[bytes]:
        for first in range(0, len(rows), BLOCK_ROWS):
            yield self._pull(table, rows[first : first + BLOCK_ROWS], learning=False).tobytes()

    def read(self, parts: Sequence[int], version: int, each: Callable[[int, list[int], memoryview], None]) -> None:
        """Read these parts: `each` is called with (part, number of rows by table, bytes)."""
        for part in parts:  # one after the other: together they may not fit in memory

            def read(framed: Framed, part: int = part) -> None:
                message: SliceState = framed.message
                if message.version < 0:
                    raise _gone_on(version)
                each(part, message.counts, framed.payload)

            self._client.ask([partial(_read, self.slices[part], version)], self._stop, read)


def _gone_on(version: int) -> DistBeliefError:
    return DistBeliefError(f"the servers have gone on from step {version}, whose rows this worker needs")


def _pull(number: int, version: int, table: int, rows: bytes, ticket: int) -> Question:
    return PullRows(ticket, number, version, table, rows)


def _numbers(number: int, version: int, table: int, ticket: int) -> Question:
    return ListRows(ticket, number, version, table)


def _count(number: int, version: int, ticket: int) -> Question:
    return CountRows(ticket, number, version)


def _read(number: int, version: int, ticket: int) -> Question:
    return ReadState(ticket, number, version)
