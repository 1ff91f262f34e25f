"""What every step must give: the fault-free run, computed at once. Pure.

A number stands for a tensor. A shard's gradient is a hash of (step, shard, state before); a sum is a hash of its two
parts, so it differs when a part is missing, doubled, torn, or in another place of the tree.
"""

from __future__ import annotations

from collections.abc import Sequence

from distbelief.shards import Schedule, split


def gradient(step: int, shard: int, state: int) -> int:
    return hash((step, shard, state))


def add(left: int, right: int) -> int:
    return hash((left, right))


def row(step: int, shard: int, state: int) -> int:
    """What travels per shard beside the gradient: its loss."""
    return hash((state, shard, step))


def updated(old: int, total: int, tile: int, step: int) -> int:
    return hash((old, total, tile, step))


def fingerprint_of(rows: Sequence[int]) -> str:
    return f"{hash(tuple(rows)) & 0xFFFFFFFFFFFFFFFF:016x}"


class Reference:
    def __init__(self, schedule: Schedule, steps: int, tiles: int) -> None:
        self.schedule = schedule
        self.steps = steps
        self.occupied = [schedule.occupied(step) for step in range(steps)]
        self.totals: list[int] = []
        self.fingerprints: list[str] = []
        self.states: list[tuple[int, ...]] = [tuple(hash((tile, 1)) for tile in range(tiles))]
        for step in range(steps):
            before = self.states[-1]
            state = hash(before)
            total = self._tree(step, state, (0, schedule.shards), self.occupied[step])
            self.totals.append(total)
            self.fingerprints.append(fingerprint_of([row(step, v, state) for v in range(self.occupied[step])]))
            self.states.append(tuple(updated(old, total, tile, step) for tile, old in enumerate(before)))
        self.all_samples = sum(map(self.samples, range(steps)))

    def samples(self, step: int) -> int:
        _, first, end = self.schedule.batch(step)
        return end - first

    def _tree(self, step: int, state: int, node: tuple[int, int], occupied: int) -> int:
        low, high = node
        if high - low == 1:
            return gradient(step, low, state)
        left, right = split(node)
        if right[0] >= occupied:
            return self._tree(step, state, left, occupied)
        return add(self._tree(step, state, left, occupied), self._tree(step, state, right, occupied))
