"""The purity check: before training, every worker of an exact strategy computes a shard several times and compares.

samples.py reads the samples of the canary's shard twice, and in another epoch, and sums up the data for a comparison
with other workers; shards.py computes that shard again, after another shard and after itself; hidden.py finds the
Python state that made a difference; calls.py moves counters, and checks what updates the parameters. rules/findings.py
says it in words. docs/purity.md is the same for users.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Impurity:
    """A reason why the same shard does not always have the same result."""

    what: str
    way_out: str


@dataclass(frozen=True)
class Checked:
    canary: str
    """The canary's fingerprint."""
    impurities: Sequence[Impurity] = ()
