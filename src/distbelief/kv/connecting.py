"""`kv.connect`: from a connection file to a store that can be used."""

from __future__ import annotations

import contextlib
import socket as sockets
from pathlib import Path

from distbelief.control.credentials import Authority
from distbelief.errors import DistBeliefError
from distbelief.kv import connection
from distbelief.kv.buffers import Buffers
from distbelief.kv.link import Link
from distbelief.kv.messages import MESSAGES
from distbelief.kv.store import Store
from distbelief.kv.traffic import Traffic
from distbelief.strategies.ps.protocol.client import ServerClient
from distbelief.transport.shm.segment import SegmentClient


def connect(
    address: str | Path,
    *,
    rank: int = 0,
    workers: int = 1,
    sync: bool = False,
    timeout_s: float = 60.0,
    shared_memory: bool = True,
) -> Store:
    """Connect to a key-value service. `address` is its connection file: `kv.serve` gives it, `distbelief kv` prints it.

    `rank` and `workers` say who this is among how many: for `barrier`, and for `sync=True`, where a push counts when
    all workers' pushes of the key are there. A call that takes longer than `timeout_s` raises. Values stay in shared
    memory where servers are on this machine, unless `shared_memory` is False.

    >>> import torch
    >>> from distbelief import kv
    >>> with kv.serve(servers=1) as address, kv.connect(address) as store:
    ...     store.init("w", torch.zeros(3))
    ...     store.set_optimizer("sgd", lr=0.5)
    ...     store.push("w", torch.ones(3))
    ...     store.pull("w")
    tensor([-0.5000, -0.5000, -0.5000])
    """
    if workers < 1 or not 0 <= rank < workers:
        raise DistBeliefError(f"there is no rank {rank} among {workers} workers", hint="ranks go from 0 to workers - 1")
    known = connection.read(Path(address))
    authority = Authority(bytes.fromhex(known.secret))
    link = Link(known.address, authority.owner())
    welcome = link.begin(timeout_s)
    client = ServerClient(authority.worker(welcome.client), MESSAGES)
    buffers = Buffers(welcome.client, _segment_client(known) if shared_memory else None)
    who = (rank, workers, sync)
    traffic = Traffic(client, link, buffers, who, welcome.client, welcome.slices, timeout_s)
    try:
        link.tell(client.learn)
        client.slices(traffic.patience("no map of the servers came"))
    except BaseException:
        traffic.close()
        raise
    return Store(traffic, rank, workers)


def _segment_client(known: connection.Connection) -> SegmentClient | None:
    """Of the machine's shared memory, if the servers are on it too."""
    if not known.keeper or known.boot != connection.this_boot():
        return None
    sock = sockets.socket(sockets.AF_UNIX, sockets.SOCK_SEQPACKET)
    with contextlib.suppress(OSError):
        sock.connect(known.keeper)
        return SegmentClient(sock)
    sock.close()
    return None
