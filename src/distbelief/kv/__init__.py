"""A key-value store on parameter servers, for any Python process: what MXNet's KVStore and ps-lite are for.

    from distbelief import kv

    with kv.serve(servers=2) as address:
        with kv.connect(address) as store:
            store.init("w", torch.zeros(3))
            store.push("w", torch.ones(3))
            store.pull("w")

The names are loaded when first used, so that the process that watches the servers starts without torch.
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
