"""Which server holds which slice, as servers come, die, leave and report copies. Events in; a map and commands out.

Every slice has a primary and, where there are two servers or more, a backup elsewhere. Only a server that has all of
a slice (a *complete* holder) is ever in the map, so only such a one is promoted; one that is *wanted* but still gets
its copy is a recruit beside the map. A slice is lost only if all its complete holders die.

Servers are numbered by whoever starts them. One that comes back comes under a new number: it has nothing of what it
had.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from distbelief.coordinator.rules.servers.roles import (
    NONE,
    Command,
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
from distbelief.coordinator.rules.servers.settling import Loads, choose, settle
from distbelief.errors import DistBeliefError, JobError

__all__ = [
    "NONE",
    "Command",
    "CopyTo",
    "Decision",
    "Drop",
    "Map",
    "Placement",
    "Promote",
    "Release",
    "Slice",
    "copied",
    "first",
    "leave",
    "with_server",
    "without",
]


def first(slices: Sequence[Slice], hosts: Mapping[int, str], version: int = 1) -> Placement:
    """Place slices that no server has yet: all holders start from the same values, so no copies are needed.

    Largest first, each to the server with the fewest bytes; then backups likewise, on another host if there is one.

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
    """Servers have died, one or several at once. Their backups are promoted, and new backups get copies.

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
        reason += f"; {_many(len(lost), 'slice')} lost: nobody else had all of it, go back to a checkpoint"
    return draft.done(reason if gone else "no server of the map died", lost)


def with_server(placement: Placement, server: int, host: str) -> tuple[Placement, Decision]:
    """A server has come: it gets copies of its part, and is promoted where it is to be primary once it has them.

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
    return draft.done(f"server {server} came: {_many(copies, 'copy', 'copies')} of {moved} bytes go out")


def leave(placement: Placement, server: int) -> tuple[Placement, Decision]:
    """A server wishes to leave: all that it has is handed over first. `Release` says, now or later, that it may go."""
    if server not in placement.hosts:
        return placement, Decision((), f"server {server} is not there, it cannot leave")
    draft = Draft(placement)
    draft.leaving.add(server)
    for part in placement.slices:
        if draft.recruits[part.number] == server:
            draft.dismiss(part.number)
    settle(draft)
    if not draft.staying:
        return draft.done(f"server {server} is to leave, but nobody stays to hand over to: it waits for another server")
    copies = sum(isinstance(command, CopyTo) for command in draft.commands)
    return draft.done(f"server {server} leaves: {_many(copies, 'copy', 'copies')} go to others first")


def copied(
    placement: Placement, number: int, source: int, target: int, known: int | None = None
) -> tuple[Placement, Decision]:
    """The primary reports that a copy is complete. A report that is not asked for any more changes nothing.

    `known`: the version of the map that the primary goes by. A report of one that has not heard of this recruit is
    about an earlier copy, which the server may have dropped since.

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
        return draft.done(f"slice {number}: what server {source} tells of is an earlier copy to {target}")
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
    """Take the dead out of one slice's roles; False when no complete holder is left."""
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
    if draft.recruits[number] != NONE:  # what it got came from the dead one, and may be behind: from the beginning
        draft.recruit(number, draft.recruits[number])
    return True


def _many(count: int, one: str, more: str = "") -> str:
    return f"{count} {one if count == 1 else more or one + 's'}"
