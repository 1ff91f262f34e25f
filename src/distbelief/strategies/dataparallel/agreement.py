"""Before the first step of a generation: the members agree on the state with which they continue.

If members share a state, rank 0 initialises or repairs it. If each member has its own state, the furthest state counts,
and members behind it copy it. `MixedDevices` keeps states equal where members on different kinds of devices round
differently.
"""

from __future__ import annotations

import struct

import torch

from distbelief.strategies.base import BeginFrom
from distbelief.strategies.flatmodel.compute import ShardComputer
from distbelief.strategies.flatmodel.namedtensors import put_back
from distbelief.strategies.flatmodel.state import ReplicaState
from distbelief.strategies.flatmodel.tileoptimizer import Recipe
from distbelief.transport.exchange import Exchange

_POSITION = struct.Struct("?q16s")  # whether a state is initialised, its steps applied, the fingerprint of the last one


def agree_on_state(
    state: ReplicaState, exchange: Exchange, computer: ShardComputer, recipe: Recipe, begin_from: BeginFrom
) -> None:
    """Afterwards every member has the generation's state: all steps that any member, alive or dead, had wholly
    applied."""
    if exchange.shares_state:
        _agree_on_one(state, exchange, computer, recipe, begin_from)
    else:
        _agree_on_many(state, exchange, computer, recipe, begin_from)


def _agree_on_one(
    state: ReplicaState, exchange: Exchange, computer: ShardComputer, recipe: Recipe, begin_from: BeginFrom
) -> None:
    """All members share one state. The first generation writes it; a later generation finds it and repairs it."""
    exchange.gather(b"")  # all members have left the previous generation: no member of it writes any more
    if exchange.rank == 0 and state.initialised:
        state.repair()
    elif exchange.rank == 0 and not _load(state, computer, recipe, begin_from):
        _write_initial(state, computer)
    if exchange.rank == 0:
        state.expect(exchange.size)
    exchange.gather(b"")  # no member reads before the writer is done


def _agree_on_many(
    state: ReplicaState, exchange: Exchange, computer: ShardComputer, recipe: Recipe, begin_from: BeginFrom
) -> None:
    """Every member has its own state. The furthest state counts; new members and members behind it copy it."""
    positions = _positions(state, exchange)
    if not any(initialised for initialised, *_ in positions):
        # One member loads, and the others copy from it: a checkpoint may be far away.
        loaded = exchange.rank == 0 and _load(state, computer, recipe, begin_from)
        if exchange.gather(b"loaded" if loaded else b"")[0] != b"loaded":
            _write_initial(state, computer)
            return
        positions = _positions(state, exchange)
    # If several members have the same number of steps, the lowest rank's state is copied: where bits may differ
    # (exact=False), a member that comes back may have applied the last step with other bits than the other members.
    source = max((rank for rank, there in enumerate(positions) if there[0]), key=lambda r: (positions[r][1], -r))
    behind = [rank for rank, position in enumerate(positions) if position != positions[source]]
    if not behind:
        return
    mine = state.blocks()
    # A member that is behind keeps its own state until the copy is complete: the source may die meanwhile, and then
    # this may be the furthest state of all. Half a copy is no state: the stamps, which come last, are written last.
    behind_too = exchange.rank in behind
    keeps = behind_too and state.initialised
    apart = [keeps or (behind_too and block is mine[-1]) for block in mine]
    into = [
        torch.empty(block.numel(), dtype=torch.uint8) if kept else block
        for block, kept in zip(mine, apart, strict=True)
    ]
    for block in into:
        exchange.transfer(block, source, behind)
    if behind_too:
        for block, given in zip(mine, into, strict=True):
            if given is not block:
                block.copy_(given)


def _positions(state: ReplicaState, exchange: Exchange) -> list[tuple[bool, int, bytes]]:
    applied = state.steps_applied
    last = state.remembered(applied - 1)
    mine = _POSITION.pack(state.initialised, applied, last[-1].fingerprint.encode() if last else b"")
    return [_POSITION.unpack(theirs) for theirs in exchange.gather(mine)]


def _load(state: ReplicaState, computer: ShardComputer, recipe: Recipe, begin_from: BeginFrom) -> bool:
    saved = begin_from()
    if saved:
        put_back(saved, state, computer, recipe)
    return saved is not None


def _write_initial(state: ReplicaState, computer: ShardComputer) -> None:
    computer.write_values(state.memory, state.values_at)
    state.write_integers(0, computer.integer_bytes())
    state.begin_at(0)


_BEFORE = b" before"
"""Sent by a member whose last generation had mixed devices: a death there may have left different states."""


class MixedDevices:
    """Mixed devices (inexact mode): every member copies rank 0's parameters after each step, because different kinds of
    devices round differently and the states would drift apart.

    A collective call: all members construct it at the same point of a generation."""

    def __init__(self, computer: ShardComputer, state: ReplicaState, exchange: Exchange) -> None:
        self._state = state
        self._exchange = exchange
        self.mixed = False
        if exchange.shares_state:
            return
        kinds = exchange.gather(computer.device.type.encode() + (_BEFORE if computer.was_mixed else b""))
        self.mixed = any(kind.endswith(_BEFORE) for kind in kinds)
        self.take_one_state()
        self.mixed = computer.was_mixed = len({kind.removesuffix(_BEFORE) for kind in kinds}) > 1

    def take_one_state(self) -> None:
        """Call it on all members after each step."""
        if self.mixed:
            self._exchange.transfer(self._state.blocks()[0], 0, range(1, self._exchange.size))
