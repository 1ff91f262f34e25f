"""What every kind of slices on a server is made from: shared memory, checkpoints, and what the workers have."""

from __future__ import annotations

from distbelief.errors import DistBeliefError
from distbelief.strategies.base import Saved
from distbelief.strategies.ps.protocol.messages import VALUES_AT
from distbelief.transport.shm.segment import KeeperClient, Segment
from distbelief.worker.origin import newest_saved, weights_of
from distbelief.worker.spec import WorkerSpec

LEDGER_BYTES = 4096
"""About what a ledger takes, for balancing."""
KEPT_SEGMENTS = 256
"""So many of the workers' slots stay mapped."""


class SliceSource:
    """See `serveredge.Slices`."""

    def __init__(self, spec: WorkerSpec, keeper: KeeperClient | None, facts: dict[str, str]) -> None:
        self.life: int = 0
        self.sealed: int = 0
        self._spec = spec
        # Where workers are on other hosts, nobody could map what lies in shared memory.
        self._keeper = keeper if spec.shares_memory else None
        # What workers compute on is nothing to it: it computes no shard.
        self._facts = {name: value for name, value in facts.items() if name != "device"}
        self._mapped: dict[str, Segment] = {}

    def facts(self) -> dict[str, str]:
        return self._facts

    def _segment(self, number: int, value_bytes: int) -> tuple[Segment, str]:
        """Memory for the values of a slice, and its name where workers can map it."""
        size_bytes = VALUES_AT + value_bytes
        name = f"server {self._spec.worker}/life {self.life}/slice {number}" if self._keeper else ""
        return self._keeper.segment(name, size_bytes) if self._keeper else Segment.private(size_bytes), name

    def _open(self, name: str) -> Segment:
        """A worker's slot, by its name."""
        if self._keeper is None:
            raise DistBeliefError(f"'{name}' is memory of another host")
        if name not in self._mapped:
            while len(self._mapped) >= KEPT_SEGMENTS:
                del self._mapped[next(iter(self._mapped))]
            self._mapped[name] = self._keeper.segment(name)
        return self._mapped[name]

    def _saved(self, step: int = -1, lazily: bool = False) -> Saved | None:
        """What this life begins from, if not from the job's own values. `lazily`: no more is read than is asked for."""
        origin = self._spec.origin
        if origin is None:
            return None
        saved = None
        if origin.checkpoints and (self.life > 1 or origin.resumed):
            # A run that was resumed may have sealed none since: then it begins again from the one that it found.
            at_most = None if origin.resumed and not self.sealed else self.sealed
            saved, skipped = newest_saved(origin.checkpoints, lazily, at_most)
            for bad, why in skipped:
                print(f"the checkpoint of step {bad} cannot be used: {why}", flush=True)
        return saved or (weights_of(origin.weights, lazily) if origin.weights else None)
