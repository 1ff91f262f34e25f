"""What follows from a placement as it is: who gets a copy, who is promoted, what moves so that loads are equal.

In this order: what a leaving server has is handed over; every slice gets a backup; and once every slice has it, loads
are balanced. Loads are those that will be when all copies under way are complete, so nothing is ordered twice.

First the bytes of primaries are balanced, as they make the work: by exchanging the roles of a primary and its backup,
which moves no bytes, and by copies only for what is left. Then the bytes held are. Neither undoes the other: a moved
backup changes no primary. Every move lessens the sum of the squares of the loads, so it ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Final

from distbelief.coordinator.rules.servers.roles import NONE, Draft, Drop, Release

NEAR: Final = 0.05
"""Two servers whose loads differ by less than this part of the mean load are equal enough: moves disturb training."""

Fit = Callable[[int, int, int], int | None]
"""(slice, from, to) → how well the slice is suited for this move, the lower the better; None: not at all."""


class Loads:
    """The bytes per staying server, as primary and altogether."""

    def __init__(self, draft: Draft) -> None:
        self.draft = draft
        self.primary = dict.fromkeys(draft.staying, 0)
        self.held = dict.fromkeys(draft.staying, 0)
        for part in draft.slices:
            self.count(part.number)

    def count(self, number: int, sign: int = 1) -> None:
        size = sign * self.draft.slices[number].size_bytes
        primary, backup = self.draft.wanted(number)
        if primary in self.primary:
            self.primary[primary] += size
        for server in (primary, backup):
            if server in self.held:
                self.held[server] += size

    def recruit(self, number: int, target: int, handover: bool = False) -> None:
        self.count(number, -1)
        self.draft.recruit(number, target, handover)
        self.count(number)

    def swap(self, number: int) -> None:
        self.count(number, -1)
        self.draft.swap(number)
        self.count(number)


def settle(draft: Draft) -> None:
    """Work all that follows into the draft."""
    _hand_over(draft)
    loads = Loads(draft)
    if _give_backups(draft, loads):
        _balance_primaries(draft, loads)
        _balance_held(draft, loads)
    _release(draft)


def _hand_over(draft: Draft) -> None:
    for part in draft.slices:
        number = part.number
        backup = draft.backups[number]
        can = backup != NONE and backup not in draft.leaving and draft.recruits[number] == NONE
        if can and draft.primaries[number] in draft.leaving:
            draft.swap(number)


def _give_backups(draft: Draft, loads: Loads) -> bool:
    """Whether every slice has its backup already."""
    staying = draft.staying
    whole = True
    for part in sorted(draft.slices, key=lambda part: (-part.size_bytes, part.number)):
        number = part.number
        primary, backup = draft.primaries[number], draft.backups[number]
        if primary == NONE or (primary in loads.held and backup in loads.held):
            continue
        if draft.recruits[number] == NONE:
            target = choose(draft, loads, primary)
            if target != NONE:
                loads.recruit(number, target)  # a primary that leaves changes roles with it once it is complete
            elif backup != NONE and primary in staying:  # the last one that stays: nobody else could be backup
                draft.commands.append(Drop(number, backup))
                draft.backups[number] = NONE
        whole = whole and draft.recruits[number] == NONE
    return whole


def choose(draft: Draft, loads: Loads, primary: int) -> int:
    """Who is to be the next holder beside the primary: on another host if there is one, the least loaded."""
    others = [server for server in draft.staying if server != primary]
    return min(others, key=lambda s: (not draft.apart(s, primary), loads.held[s], s), default=NONE)


def _balance_primaries(draft: Draft, loads: Loads) -> None:
    def exchange(number: int, source: int, target: int) -> int | None:
        return 0 if draft.primaries[number] == source and draft.backups[number] == target else None

    def handover(number: int, source: int, target: int) -> int | None:
        primary, backup = draft.primaries[number], draft.backups[number]
        if primary != source or backup == target:
            return None
        return -loads.held[backup]  # the backup is relieved, so it should be one that holds much

    for number, _ in _moves(draft, loads.primary, exchange):
        loads.swap(number)
    for number, target in _moves(draft, loads.primary, handover):
        loads.recruit(number, target, handover=True)


def _balance_held(draft: Draft, loads: Loads) -> None:
    def moved(number: int, source: int, target: int) -> int | None:
        primary, backup = draft.primaries[number], draft.backups[number]
        if backup != source or primary == target:
            return None
        was, will = draft.apart(primary, source), draft.apart(primary, target)
        return None if was and not will else int(was or not will)

    for number, target in _moves(draft, loads.held, moved):
        loads.recruit(number, target)


def _moves(draft: Draft, load: dict[int, int], fit: Fit) -> Iterator[tuple[int, int]]:
    """Slice and target of one move after the other; the caller makes each before it asks for the next."""
    held: dict[int, list[int]] = {server: [] for server in load}  # stays true: no move ends before its copy is complete
    for part in draft.slices:
        primary, backup = draft.primaries[part.number], draft.backups[part.number]
        if part.size_bytes and primary in load and backup in load:
            held[primary].append(part.number)
            held[backup].append(part.number)
    while (move := _move(draft, load, fit, held)) is not None:
        yield move


def _move(draft: Draft, load: dict[int, int], fit: Fit, held: dict[int, list[int]]) -> tuple[int, int] | None:
    """The move that evens out the most between the most and the least loaded servers for which there is any.

    It has to be worth its bytes: a slice of more than three quarters of the difference would change little.
    """
    enough = NEAR * sum(load.values()) / max(len(load), 1)
    for source, target in sorted(product(load, load), key=lambda pair: (load[pair[1]] - load[pair[0]], pair)):
        gap = load[source] - load[target]
        if gap <= enough:
            return None
        ranked = []
        for number in held[source]:
            size = draft.slices[number].size_bytes
            if 4 * size <= 3 * gap and draft.recruits[number] == NONE:
                suited = fit(number, source, target)
                if suited is not None:
                    ranked.append((abs(gap - 2 * size), suited, number))
        if ranked:
            return min(ranked)[2], target
    return None


def _release(draft: Draft) -> None:
    busy = {*draft.primaries, *draft.backups, *draft.recruits}
    for server in sorted(draft.leaving - busy):
        draft.leaving.remove(server)
        del draft.hosts[server]
        draft.commands.append(Release(server))
