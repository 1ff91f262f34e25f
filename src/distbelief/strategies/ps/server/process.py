"""A parameter server as a process: its sockets are opened, then it loads the job as a worker does, then it serves the
slices that the coordinator gives to it.
"""

from __future__ import annotations

from collections.abc import Callable

import zmq

from distbelief.control.messages import EXIT_REPORTED
from distbelief.errors import DistBeliefError
from distbelief.strategies.base import Saved, ServerHost
from distbelief.strategies.ps.protocol.messages import VALUES_AT
from distbelief.strategies.ps.server.sockets import ServerSockets, Slices
from distbelief.transport.shm.segment import Segment

SMALL_SLICE_BYTES = 4096
"""The size of the slice of leases, or of a search, for balancing."""
KEPT_SEGMENTS = 256
"""At most this many of the workers' slots stay mapped."""


def serve(host: ServerHost, make: Callable[[ServerHost], Slices]) -> int:
    """The life of a parameter server. `make` loads the job and says which slices there are. Returns the exit status."""
    with zmq.Context() as context:
        server = ServerSockets(host, context)
        try:
            server.serve(make(host))
        except BaseException as error:
            server.fail(error)
            return EXIT_REPORTED
        finally:
            server.close()
    return 0


class SliceSource:
    """What makers of slices need: shared memory, checkpoints, and the workers' slots. See `Slices`."""

    def __init__(self, host: ServerHost, facts: dict[str, str]) -> None:
        self.life: int = 0
        self.sealed: int = 0
        self._host = host
        # The device that workers compute on does not concern a server: it computes no shard.
        self._facts = {name: value for name, value in facts.items() if name != "device"}
        self._mapped: dict[str, Segment] = {}

    def facts(self) -> dict[str, str]:
        return self._facts

    def _segment(self, number: int, value_bytes: int) -> tuple[Segment, str]:
        """Memory for the values of a slice, and its name if workers can map it."""
        size_bytes, segments = VALUES_AT + value_bytes, self._host.segments
        name = f"server {self._host.worker}/life {self.life}/slice {number}" if segments else ""
        return segments.segment(name, size_bytes) if segments else Segment.private(size_bytes), name

    def _open(self, name: str) -> Segment:
        """A worker's slot, by its name."""
        if self._host.segments is None:
            raise DistBeliefError(f"'{name}' is memory of another host")
        if name not in self._mapped:
            while len(self._mapped) >= KEPT_SEGMENTS:
                del self._mapped[next(iter(self._mapped))]
            self._mapped[name] = self._host.segments.segment(name)
        return self._mapped[name]

    def _saved(self, step: int = -1, lazily: bool = False) -> Saved | None:
        """The checkpoint or weights that this life begins from; None: the job's initial values. `lazily`: tensors are
        read when they are asked for."""
        return self._host.saved(self.life, self.sealed, lazily)
