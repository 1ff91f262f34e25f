"""Which server holds which slice, as servers come, die, leave and report copies: events in, a map and commands out.

Every slice has a primary and, if there are two servers or more, a backup on another server. The map names only servers
that have all of a slice (*complete* holders), so only a complete holder is ever promoted. A server that is still
receiving its copy is a recruit; recruits are kept beside the map. A slice is lost only if all its complete holders die.
Server numbers are never used twice: a server that restarts gets a new number, because it has lost its contents.

After each event the placement is settled, in this order: slices of leaving servers are handed over; every slice gets a
backup; and once every slice has one, loads are balanced. Loads are counted as they will be when all copies under way
are complete, so nothing is ordered twice. Balancing first evens out the bytes of primaries, since primaries do the
work: it exchanges the roles of a primary and its backup, which moves no bytes, and copies only for the rest. Then it
evens out the bytes held; a moved backup changes no primary. Every move lowers the sum of the squares of the loads, so
balancing ends.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import product
from typing import Final

from distbelief.coordinator.rules.servers.roles import (
    NONE,
    CopyTo,
    Decision,
    Draft,
    Drop,
    Map,
    Placement,
    Promote,
    Release,
    Slice,
)
from distbelief.errors import DistBeliefError, JobError

NEAR: Final = 0.05
"""No move between two servers whose loads differ by less than this part of the mean load: moves disturb training."""

Fit = Callable[[int, int, int], int | None]
"""(slice, from, to) → the cost of moving the slice, for choosing among slices; None: the move is not allowed."""


# --- events ---------------------------------------------------------------------------------------------------------


def first(slices: Sequence[Slice], hosts: Mapping[int, str], version: int = 1) -> Placement:
    """Place slices that no server has yet: all holders load the same values, so no copies are needed.

    Primaries are placed first, then backups. The largest slice goes first, each to the server with the fewest bytes; a
    backup goes to another host than its primary if there is one.

    >>> first([Slice(0, 5), Slice(1, 3), Slice(2, 2)], {0: "a", 1: "a"}).map
    Map(version=1, primaries=(0, 1, 1), backups=(1, 0, 0))
    """
    if not hosts:
        raise JobError("there is no parameter server to place slices on", hint="Start at least one server.")
    if [part.number for part in slices] != list(range(len(slices))) or any(part.size_bytes < 0 for part in slices):
        raise JobError("slices are numbered 0, 1, 2, … and have sizes of 0 or more", hint="Give them in this order.")
    none = (NONE,) * len(slices)
    draft = Draft(Placement(Map(version, none, none), tuple(slices), dict(hosts), none, (False,) * len(slices)))
    loads = Loads(draft)
    largest_first = sorted(slices, key=lambda part: (-part.size_bytes, part.number))
    for part in largest_first:
        draft.primaries[part.number] = min(hosts, key=lambda server: (loads.primary[server], server))
        loads.count(part.number)
    for part in largest_first:
        loads.count(part.number, -1)
        draft.backups[part.number] = choose(draft, loads, draft.primaries[part.number])
        loads.count(part.number)
    return draft.value(version)


def without(placement: Placement, dead: Collection[int]) -> tuple[Placement, Decision]:
    """One or several servers died. The backups of their slices are promoted, and new backups receive copies.

    >>> placed = first([Slice(0, 4), Slice(1, 4)], {0: "a", 1: "a", 2: "a"})
    >>> placed, change = without(placed, {0})
    >>> change.reason, change.commands[0]
    ('server 0 died: 1 slice promoted on its backup, 2 copies for new backups', Promote(slice=0, server=2))
    """
    gone = set(dead) & placement.hosts.keys()
    draft = Draft(placement)
    for server in gone:
        del draft.hosts[server]
        draft.leaving.discard(server)
    lost = [part.number for part in placement.slices if not _survives(draft, part.number, gone)]
    promoted = sum(isinstance(command, Promote) for command in draft.commands)
    settle(draft)
    copies = sum(isinstance(command, CopyTo) for command in draft.commands)
    names = ", ".join(str(server) for server in sorted(gone))
    reason = f"server{'s' * (len(gone) > 1)} {names} died: {_many(promoted, 'slice')} promoted on its backup"
    if promoted != 1:
        reason = reason.replace("its backup", "their backups")
    reason += f", {_many(copies, 'copy', 'copies')} for new backups"
    if lost:
        reason += f"; {_many(len(lost), 'slice')} lost: no other server had a complete copy, go back to a checkpoint"
    return draft.done(reason if gone else "no server of the map died", lost)


def with_server(placement: Placement, server: int, host: str) -> tuple[Placement, Decision]:
    """A server joined. It receives copies, and becomes primary of a part of them as soon as each copy is complete.

    >>> placed, change = with_server(first([Slice(0, 4), Slice(1, 4)], {0: "a"}), 1, "a")
    >>> placed.map.backups, placed.recruits, change.commands
    ((-1, -1), (1, 1), (CopyTo(slice=0, source=0, target=1), CopyTo(slice=1, source=0, target=1)))
    """
    if server in placement.hosts or server < 0:
        raise DistBeliefError(
            f"a server of number {server} cannot join: the number is {'taken' if server >= 0 else 'negative'}",
            hint="Give each server that starts a number that was not used before.",
        )
    draft = Draft(placement)
    draft.hosts[server] = host
    settle(draft)
    moved = sum(placement.slices[c.slice].size_bytes for c in draft.commands if isinstance(c, CopyTo))
    copies = sum(isinstance(command, CopyTo) for command in draft.commands)
    return draft.done(f"server {server} joined: it gets {_many(copies, 'copy', 'copies')} of {moved} bytes")


def leave(placement: Placement, server: int) -> tuple[Placement, Decision]:
    """A server is to leave. It hands its slices over first; a `Release`, now or in a later decision, lets it go."""
    if server not in placement.hosts:
        return placement, Decision((), f"server {server} is not running, so it cannot leave")
    draft = Draft(placement)
    draft.leaving.add(server)
    for part in placement.slices:
        if draft.recruits[part.number] == server:
            draft.dismiss(part.number)
    settle(draft)
    if not draft.staying:
        return draft.done(f"server {server} is to leave, but no other server stays: it waits for another server")
    copies = sum(isinstance(command, CopyTo) for command in draft.commands)
    return draft.done(f"server {server} leaves: {_many(copies, 'copy', 'copies')} go to others first")


def copied(
    placement: Placement, number: int, source: int, target: int, known: int | None = None
) -> tuple[Placement, Decision]:
    """The primary reports that a copy is complete. A report of a copy that is no longer wanted changes nothing.

    `known` is the version of the primary's map. If the primary does not know of this recruit yet, its report is about
    an earlier copy, which the target may have dropped since.

    >>> placed, _ = with_server(first([Slice(0, 4)], {0: "a"}), 1, "a")
    >>> placed, change = copied(placed, 0, source=0, target=1)
    >>> placed.map, change.reason
    (Map(version=3, primaries=(0,), backups=(1,)), 'slice 0: server 1 has a complete copy')
    """
    draft = Draft(placement)
    holders = {placement.map.primaries[number], placement.map.backups[number]}
    if (source, target) != (placement.map.primaries[number], placement.recruits[number]):
        if target in placement.hosts and target not in {*holders, placement.recruits[number]}:
            draft.commands.append(Drop(number, target))
        return draft.done(f"slice {number}: the copy from server {source} to {target} is not wanted any more")
    if known is not None and placement.named and known < placement.named[number]:
        return draft.done(f"slice {number}: server {source} reports an earlier copy to {target}")
    if placement.handovers[number]:
        draft.commands.append(Promote(number, target))
    draft.primaries[number], draft.backups[number] = draft.wanted(number)
    draft.recruits[number], draft.handovers[number] = NONE, False
    now = {draft.primaries[number], draft.backups[number], NONE}
    draft.commands += [Drop(number, server) for server in sorted(holders - now)]
    settle(draft)
    role = " and is primary now" if placement.handovers[number] else ""
    return draft.done(f"slice {number}: server {target} has a complete copy{role}")


def _survives(draft: Draft, number: int, gone: set[int]) -> bool:
    """Remove dead servers from one slice's roles; False if no complete holder is left."""
    if draft.recruits[number] in gone:
        draft.recruits[number], draft.handovers[number] = NONE, False
    if draft.backups[number] in gone:
        draft.backups[number] = NONE
    if draft.primaries[number] not in gone:
        return True
    draft.primaries[number], draft.backups[number] = draft.backups[number], NONE
    if draft.primaries[number] == NONE:
        if draft.recruits[number] != NONE:
            draft.dismiss(number)
        return False
    draft.commands.append(Promote(number, draft.primaries[number]))
    if draft.recruits[number] != NONE:  # its copy came from the dead primary and may be incomplete: start again
        draft.recruit(number, draft.recruits[number])
    return True


def _many(count: int, one: str, more: str = "") -> str:
    return f"{count} {one if count == 1 else more or one + 's'}"


# --- settling -------------------------------------------------------------------------------------------------------


class Loads:
    """The bytes of each staying server: of the slices of which it is primary, and of all that it holds."""

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
    """Add to the draft all that follows from its present roles."""
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
    """Find a backup for each slice that has none. Returns whether every slice has its backup already."""
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
                loads.recruit(
                    number, target
                )  # a leaving primary swaps roles with the recruit once the copy is complete
            elif backup != NONE and primary in staying:  # only one server stays: no other could be backup
                draft.commands.append(Drop(number, backup))
                draft.backups[number] = NONE
        whole = whole and draft.recruits[number] == NONE
    return whole


def choose(draft: Draft, loads: Loads, primary: int) -> int:
    """The next holder beside the primary: the least loaded server on another host, or on the same host if there is no
    other."""
    others = [server for server in draft.staying if server != primary]
    return min(others, key=lambda s: (not draft.apart(s, primary), loads.held[s], s), default=NONE)


def _balance_primaries(draft: Draft, loads: Loads) -> None:
    def exchange(number: int, source: int, target: int) -> int | None:
        return 0 if draft.primaries[number] == source and draft.backups[number] == target else None

    def handover(number: int, source: int, target: int) -> int | None:
        primary, backup = draft.primaries[number], draft.backups[number]
        if primary != source or backup == target:
            return None
        return -loads.held[backup]  # the backup drops the slice, so prefer the backup with the most bytes

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
    """The moves as (slice, target). The caller carries each one out before it asks for the next."""
    held: dict[int, list[int]] = {
        server: [] for server in load
    }  # stays true while moves are chosen: each ends only when its copy is complete
    for part in draft.slices:
        primary, backup = draft.primaries[part.number], draft.backups[part.number]
        if part.size_bytes and primary in load and backup in load:
            held[primary].append(part.number)
            held[backup].append(part.number)
    while (move := _move(draft, load, fit, held)) is not None:
        yield move


def _move(draft: Draft, load: dict[int, int], fit: Fit, held: dict[int, list[int]]) -> tuple[int, int] | None:
    """The move that evens out the most, between the pair of servers with the largest difference that has a move.

    A slice of more than three quarters of the difference is not moved: that would change little.
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
