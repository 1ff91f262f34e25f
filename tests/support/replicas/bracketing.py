"""Sums written out: in which order shards are added."""

from __future__ import annotations

from distbelief.shards import Range, split
from distbelief.strategies.flatmodel.rules.stepwork import Partials

Bracketing = int | tuple["Bracketing", "Bracketing"]


def plain_tree(node: Range, occupied: int) -> Bracketing:
    if node[1] - node[0] == 1:
        return node[0]
    left, right = split(node)
    if right[0] >= occupied:
        return plain_tree(left, occupied)
    return plain_tree(left, occupied), plain_tree(right, occupied)


def execute(partials: Partials) -> dict[int, Bracketing]:
    """The contents of the slots at the end, written out as sums of shards."""
    slots: dict[int, Bracketing] = {}
    for work in partials.work:
        slots[work.slot] = work.shard
        for into, other in work.additions:
            slots[into] = (slots[into], slots[other])
    return slots
