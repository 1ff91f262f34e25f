"""Members that compute on different kinds of devices, where bits do not count: they round differently, so all go on
from what the first of them has made of a step. Else their states would drift apart."""

from __future__ import annotations

from distbelief.strategies.flatmodel.compute import ShardComputer
from distbelief.strategies.flatmodel.state import ReplicaState
from distbelief.transport.exchange import Exchange

_BEFORE = b" before"
"""Said by a member whose last generation was mixed: some may have died in it while all were to take one state."""


class KindsOfDevices:
    """Of one generation. All members make one, at the same moment."""

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
        """After each step."""
        if self.mixed:
            self._exchange.transfer(self._state.blocks()[0], 0, range(1, self._exchange.size))
