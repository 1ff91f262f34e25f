"""Systems of other people that are not part of torch, each in an environment of its own."""

from __future__ import annotations

from bench.compare.system import System

PEERS: tuple[System, ...] = ()
