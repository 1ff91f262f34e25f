"""The slices of `sandblaster` on a server, with what they begin with: the model's values, or a checkpoint's vectors."""

from __future__ import annotations

import torch

from distbelief.strategies.base import BeginFrom, Saved, ServerHost, ServerJob
from distbelief.strategies.flatmodel.state import ReplicaState
from distbelief.strategies.ps.rules.slicing import SliceShape, parameter_stretch
from distbelief.strategies.ps.server.process import LEDGER_BYTES, SliceSource
from distbelief.strategies.ps.server.slicememory import OpenSegment
from distbelief.strategies.ps.server.stores import SliceStore
from distbelief.strategies.sandblaster.member import START
from distbelief.strategies.sandblaster.messages import MESSAGES, StepsDone
from distbelief.strategies.sandblaster.prepared import PreparedSandblaster
from distbelief.strategies.sandblaster.saved import saved_state, saved_vectors, state_bytes
from distbelief.strategies.sandblaster.slices import SearchSlice, VectorSlice
from distbelief.transport.shm.segment import Segment


class VectorStores:
    """`begin_from`: read once for all slices of a life."""

    def __init__(self, prepared: PreparedSandblaster, portions: int, open_segment: OpenSegment) -> None:
        self._prepared = prepared
        self._portions = portions
        self._open = open_segment
        self._first: tuple[ReplicaState, Saved | None] | None = None

    def forget(self) -> None:
        """All slices are made, or begin anew: what they began with is not needed any more."""
        self._first = None

    def search(self, begin_from: BeginFrom | None) -> SearchSlice:
        """`begin_from`: None if it gets a copy of another one's."""
        store = SearchSlice(self._portions)
        if begin_from:
            state, saved = self._begun(begin_from)
            past = [StepsDone(one.step, one.step + 1, one.loss, one.samples, one.at) for one in state.remembered(0)]
            store.begin(state.steps_applied, state_bytes(saved_state(saved)), state.note(), past)
        return store

    def slice(self, shape: SliceShape, values: Segment, begin_from: BeginFrom | None) -> VectorSlice:
        layout = self._prepared.layout
        store = VectorSlice(shape, layout, self._portions, values, self._open)
        if begin_from:
            state, saved = self._begun(begin_from)
            content = torch.zeros(shape.value_bytes, dtype=torch.uint8)
            for tile in shape.tiles:
                at = layout.tiles[tile].offset_bytes - shape.first_byte
                content[at : at + layout.tiles[tile].size_bytes] = state.values[tile].view(torch.uint8)
            search = saved_state(saved)
            if saved and search:
                vectors = saved_vectors(saved, search, layout, shape, content)
            else:
                _, (first, end) = parameter_stretch(layout, shape)
                dtype = layout.tiles[0].dtype
                vectors = {START: content[: (end - first) * dtype.itemsize].view(dtype)}
            store.begin(content, vectors, state.integers(state.steps_applied))
        return store

    def _begun(self, begin_from: BeginFrom) -> tuple[ReplicaState, Saved | None]:
        if self._first is None:
            saved = begin_from()
            self._first = self._prepared.first_state(lambda step=-1: saved), saved
        return self._first


class SearchStores(SliceSource):
    """They as the slices of a run."""

    messages = MESSAGES

    def __init__(self, host: ServerHost, loaded: ServerJob) -> None:
        prepared: PreparedSandblaster = loaded.prepared
        super().__init__(host, prepared.facts())
        self._shapes = prepared.slices()
        self._vectors = VectorStores(prepared, loaded.schedule.shards, self._open)
        self.sizes = [*prepared.slice_sizes, LEDGER_BYTES]

    def make(self, number: int, first: bool) -> tuple[SliceStore, str]:
        begin_from = self._saved if first else None
        if number == len(self._shapes):
            return self._vectors.search(begin_from), ""
        values, name = self._segment(number, self._shapes[number].value_bytes)
        return self._vectors.slice(self._shapes[number], values, begin_from), name

    def began(self) -> None:
        self._vectors.forget()
