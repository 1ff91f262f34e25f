"""A key-value store on parameter servers, for any Python process, for users of MXNet's KVStore and ps-lite.

    from distbelief import kv

    with kv.serve(servers=2) as address:
        with kv.connect(address) as store:
            store.init("w", torch.zeros(3))
            store.push("w", torch.ones(3))
            store.pull("w")

**Processes.** `kv.serve` and `distbelief kv` start a *supervisor* (supervisor.py; rules/supervision.py decides). It
starts the servers from a warm process, replaces a server that dies or freezes, and sends the map (which server is
primary and backup of which slice) to servers and clients. A client finds it by the connection file (service.py) and
keeps a thread that exchanges heartbeats and maps with it (supervisorlink.py).

**Slices.** Servers are parameter servers (strategies/ps): every slice has a primary and a backup that apply the same
changes in the same order. Slice 0 is the catalogue (catalogue.py): it lists the keys, the places of their stretches,
and the workers at a barrier. The other slices hold stretches of tensors, with their optimizers, and rows of tables
(keyslice.py).

**Calls.** `Store` (store.py) checks what the caller gives (checks.py). `Transfers` (transfers.py) turns it into changes
of slices and questions to slices. A change is sent until its slice's primary has acknowledged it, and applied once. So
no push is lost or counted twice when a server dies. There are no checkpoints: if all holders of a slice die, the values
are lost, and clients get an error.

**First values.** The catalogue gives each new key an owner, the client that places its first value. If the owner dies,
another client takes over with a higher attempt number, and slices refuse values of older attempts.

The names below are loaded when first used, so that the supervisor starts without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from distbelief.kv.service import serve
    from distbelief.kv.store import Store, connect

_HOME = {
    "Store": "distbelief.kv.store",
    "connect": "distbelief.kv.store",
    "serve": "distbelief.kv.service",
}

__all__ = ["Store", "connect", "serve"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'distbelief.kv' has no attribute {name!r}")
