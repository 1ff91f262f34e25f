"""A member that is alone in its generation, in the test's own process, with a real keeper and real shared memory."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from distbelief.comm.exchange import Geometry
from distbelief.comm.keeper import KeeperClient, SegmentKeeper
from distbelief.comm.shared import SharedExchange
from distbelief.comm.words import Abort


@contextmanager
def kept() -> Iterator[KeeperClient]:
    """A client of a keeper that a thread serves."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    keeper = SegmentKeeper()

    def serve() -> None:
        try:
            while True:
                keeper.answer(ours)
        except EOFError:
            ours.close()

    server = threading.Thread(target=serve)
    server.start()
    try:
        yield KeeperClient(theirs)
    finally:
        theirs.close()
        server.join()
        keeper.close()


def exchange(client: KeeperClient, generation: int, geometry: Geometry) -> SharedExchange:
    return SharedExchange(client, f"generation {generation}", 0, geometry, Abort())
