"""A model of servers that really copy, promote and drop what they are told to; every event checks the invariants."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from distbelief.coordinator.rules.servers.placement import (
    NONE,
    CopyTo,
    Decision,
    Drop,
    Placement,
    Promote,
    Release,
    Slice,
    copied,
    first,
    leave,
    with_server,
    without,
)

ONE_HOST = {0: "a", 1: "a", 2: "a", 3: "a"}


def parts(*sizes: int) -> list[Slice]:
    return [Slice(number, size) for number, size in enumerate(sizes)]


class Servers:
    """What servers hold, by the commands alone; the policy's own view is compared with it after every event."""

    def __init__(self, slices: Sequence[Slice], hosts: dict[int, str]) -> None:
        self.placed = first(slices, hosts)
        self.alive = set(hosts)
        roles = zip(self.placed.map.primaries, self.placed.map.backups, strict=True)
        self.complete = {number: {*pair} - {NONE} for number, pair in enumerate(roles)}
        self.copying: dict[tuple[int, int], int] = {}  # (slice, target) → source
        self.lost: set[int] = set()
        self.moved_bytes = 0

    def kill(self, dead: set[int]) -> Decision:
        self._gone(dead)
        placed, change = without(self.placed, dead)
        empty = {number for number, holders in self.complete.items() if not holders}
        assert set(change.lost) == empty - self.lost, "lost is what no complete holder lives of, and nothing else"
        self.lost |= empty
        return self._obey(placed, change)

    def join(self, server: int, host: str) -> Decision:
        self.alive.add(server)
        return self._obey(*with_server(self.placed, server, host))

    def leave(self, server: int) -> Decision:
        return self._obey(*leave(self.placed, server))

    def finish(self, number: int, target: int) -> Decision:
        source = self.copying.pop((number, target))
        self.complete[number].add(target)
        return self._obey(*copied(self.placed, number, source, target))

    def settle(self) -> None:
        for _ in range(10_000):
            if not self.copying:
                return
            self.finish(*min(self.copying))
        raise AssertionError("it goes on copying for ever")

    def _gone(self, dead: set[int]) -> None:
        self.alive -= dead
        for holders in self.complete.values():
            holders -= dead
        self.copying = {
            key: source for key, source in self.copying.items() if key[1] not in dead and source not in dead
        }

    def _obey(self, placed: Placement, change: Decision) -> Decision:
        assert placed.map.version == self.placed.map.version + (placed != self.placed)
        assert change.reason
        assert "\n" not in change.reason
        self.placed = placed
        for command in change.commands:
            match command:
                case Promote(number, server):
                    assert server in self.complete[number], "only a complete holder is promoted"
                case CopyTo(number, source, target):
                    assert source in self.complete[number]
                    assert target in self.alive
                    assert target not in self.complete[number], "bytes that are there already"
                    self.copying[number, target] = source
                    self.moved_bytes += placed.slices[number].size_bytes
                case Drop(number, server):
                    self.complete[number].discard(server)
                    self.copying.pop((number, server), None)
                case Release(server):
                    assert not any(server in holders for holders in self.complete.values())
                    self.alive.discard(server)
        self._check()
        return change

    def _check(self) -> None:
        placed = self.placed
        assert set(placed.hosts) == self.alive
        for number, holders in self.complete.items():
            primary, backup, recruit = (x[number] for x in (placed.map.primaries, placed.map.backups, placed.recruits))
            assert (primary == NONE) == (number in self.lost)
            assert primary == NONE or primary != backup
            assert {primary, backup} - {NONE} == holders, "the map has all complete holders, and no others"
            assert ({recruit} - {NONE}) == {target for one, target in self.copying if one == number}
            assert recruit == NONE or recruit not in holders

    def loads(self) -> tuple[list[int], list[int]]:
        primary: Counter[int] = Counter()
        held: Counter[int] = Counter()
        for part in self.placed.slices:
            primary[self.placed.map.primaries[part.number]] += part.size_bytes
            held[self.placed.map.primaries[part.number]] += part.size_bytes
            held[self.placed.map.backups[part.number]] += part.size_bytes
        staying = sorted(set(self.placed.hosts) - set(self.placed.leaving))
        return [primary[server] for server in staying], [held[server] for server in staying]

    def check_settled(self, held_too: bool) -> None:
        """Every slice has two holders again, and servers differ by little, or about the largest slice."""
        staying = set(self.placed.hosts) - set(self.placed.leaving)
        largest = max(part.size_bytes for part in self.placed.slices)
        if len(staying) >= 2:
            for number, holders in self.complete.items():
                assert number in self.lost or (len(holders) == 2 and holders <= staying)
            primary, held = self.loads()
            near = 0.05 * sum(primary) / len(staying)
            assert max(primary) - min(primary) <= max(largest * 4 / 3, near)
            assert not held_too or max(held) - min(held) <= max(largest * 2, 2 * near)
        if staying:
            assert not self.placed.leaving
