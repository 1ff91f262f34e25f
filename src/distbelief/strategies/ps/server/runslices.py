"""The slices of a run of `ps` on a server, and their first state: slices of dense parameters, then parts of the sparse
tables, then in `ps:async` and `ps:ssp` the slice of leases.
"""

from __future__ import annotations

import torch

from distbelief.steadyclock import CLOCK
from distbelief.strategies.base import Saved, ServerHost, ServerJob
from distbelief.strategies.flatmodel.state import ReplicaState
from distbelief.strategies.ps.protocol.frames import RUN_MESSAGES
from distbelief.strategies.ps.protocol.pushcoding import PushCoding
from distbelief.strategies.ps.rules.leases import LeaseTerms
from distbelief.strategies.ps.rules.slicing import SliceShape
from distbelief.strategies.ps.server.asyncslice import AsynchronousSlice, LeaseSlice
from distbelief.strategies.ps.server.slicememory import SliceMemory
from distbelief.strategies.ps.server.sockets import run_server
from distbelief.strategies.ps.server.stores import SMALL_SLICE_BYTES, SliceSource, SliceStore
from distbelief.strategies.ps.server.syncslice import SumMemory, SynchronousSlice
from distbelief.strategies.ps.tables.saved import SavedTables, without_tables
from distbelief.strategies.ps.tables.slices import AsynchronousTableSlice, SynchronousTableSlice
from distbelief.strategies.ps.worker.prepared import PreparedParameterServer
from distbelief.transport.shm.segment import Segment


class RunSlices(SliceSource):
    messages = RUN_MESSAGES

    def __init__(self, host: ServerHost, loaded: ServerJob) -> None:
        prepared: PreparedParameterServer = loaded.prepared
        super().__init__(host, prepared.facts())
        self._job = loaded.job
        self._schedule = loaded.schedule
        self._steps = loaded.steps
        self._prepared = prepared
        self._strategy = prepared.strategy
        self._shapes = prepared.slices()
        self.sizes = [shape.size_bytes for shape in self._shapes]
        self._sums = SumMemory(max(shape.value_bytes for shape in self._shapes))
        self._table_slices, parts = prepared.table_slices(), prepared.table_parts
        # The number of rows is unknown in advance: for balancing, a part counts as much as another slice.
        self.sizes += [sum(self.sizes) // len(self.sizes)] * parts
        self._leases = len(self.sizes)
        if not self._strategy.in_steps:
            self.sizes.append(SMALL_SLICE_BYTES)
        self._first: tuple[int, ReplicaState, SavedTables] | None = None

    def make(self, number: int, first: bool) -> tuple[SliceStore, str]:
        """`first`: with the values that the parameters have when this life begins."""
        if number in self._table_slices:
            return self._made_tables(number - len(self._shapes), first), ""
        if number == self._leases:
            return LeaseSlice(self._terms(self._begun()[0].steps_applied if first else 0)), ""
        shape, prepared = self._shapes[number], self._prepared
        values, name = self._segment(number, shape.value_bytes)
        memory = SliceMemory(shape, prepared.layout, prepared.recipe, self._job, values)
        store: SynchronousSlice | AsynchronousSlice
        method = self._strategy.compression
        coding = PushCoding(method, shape, prepared.layout) if method else None
        if not self._strategy.in_steps:
            store = AsynchronousSlice(memory, self._open, self._strategy.dc, coding)
        else:
            store = SynchronousSlice(memory, self._job, self._schedule, self._open, coding, space=self._sums)
            store.clock = CLOCK.now
        if first:
            state, _ = self._begun()
            step = state.steps_applied
            if isinstance(store, AsynchronousSlice):
                store.begin(self._contents(state, shape), prepared.integer_numbers(state.integers(step)))
            else:
                store.begin(self._contents(state, shape), step, state.integers(step))
                if number == 0:
                    store.note = state.note()
        return store, name

    def _made_tables(self, part: int, first: bool) -> SliceStore:
        specs = self._prepared.tables
        store = (
            SynchronousTableSlice(specs, self._job, self._schedule)
            if self._strategy.in_steps
            else AsynchronousTableSlice(specs, self._job)
        )
        if first:
            state, tables = self._begun()
            store.begin(tables.part(part), state.steps_applied if self._strategy.in_steps else 0)
        return store

    def _contents(self, state: ReplicaState, shape: SliceShape) -> torch.Tensor:
        content = Segment.private(shape.size_bytes)
        at = 0
        for tile, size in zip(shape.tiles, shape.state_bytes, strict=True):
            state.copy_tile(tile, content, at)
            at += self._prepared.layout.tiles[tile].size_bytes + size
        return content.tensor(torch.uint8, 0, shape.size_bytes)

    def _terms(self, first: int) -> LeaseTerms:
        strategy, every = self._strategy, self._host.saves_every
        return LeaseTerms(first, self._steps, strategy.n_push, strategy.staleness, strategy.warm_up, every)

    def began(self) -> None:
        """All slices are made: drop their first state."""
        self._first = None

    def _begun(self) -> tuple[ReplicaState, SavedTables]:
        """The first state of this life, which is read once for all slices."""
        if self._first is None or self._first[0] != self.life:
            prepared, found = self._prepared, []

            def dense(step: int = -1) -> Saved | None:
                """The saved state of the dense parameters. That of the tables is kept: a server reads only its own
                parts."""
                saved = self._saved(step, lazily=bool(self._table_slices))
                found.append(SavedTables(saved, prepared.tables, prepared.table_parts))
                return without_tables(saved, prepared.tables) if saved else None

            state = prepared.first_state(dense)
            self._first = (
                self.life,
                state,
                found[-1] if found else SavedTables(None, prepared.tables, prepared.table_parts),
            )
        return self._first[1:]


def serve(host: ServerHost) -> int:
    """The process of a parameter server of `ps`."""
    return run_server(host, lambda host: RunSlices(host, host.load()))
