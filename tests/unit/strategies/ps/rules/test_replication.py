"""Clients, servers, deaths and lost messages in one thread: no change that was answered is ever lost, none counts
twice, and all who have a slice have the same bits."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import pytest

from distbelief.coordinator.rules.servers import placement
from distbelief.coordinator.rules.servers.placement import NONE, Slice
from distbelief.strategies.ps.rules.replication import (
    Acknowledge,
    AnswerClient,
    Forward,
    Name,
    Output,
    RefuseClient,
    ReplicatedSlice,
    ReportCopied,
    Roles,
    SendCopy,
)


class Ordered:
    """A store that remembers the order: two of them are equal only if they applied the same in the same order."""

    def __init__(self) -> None:
        self.contents: list[int] = []

    def apply(self, content: int) -> None:
        self.contents.append(content)

    def state(self) -> list[int]:
        return list(self.contents)

    def load(self, state: list[int]) -> None:
        self.contents = list(state)


class Cluster:
    """One slice on several servers, a maker of maps, and clients that send again what is not answered."""

    def __init__(self, seed: int, servers: int, losing: float) -> None:
        self.chance = random.Random(seed)
        self.losing = losing
        self.placed = placement.first([Slice(0, 100)], {server: f"host{server}" for server in range(servers)})
        self.next_server = servers
        self.holdings: dict[int, ReplicatedSlice] = {}
        self.links: dict[tuple[int, int], deque[Any]] = {}  # (from, to) -> in order; -1 is the maker of maps
        self.open: dict[Name, int] = {}
        self.answered: set[Name] = set()
        self.sent = 0
        for server in range(servers):
            self._start(server)

    def _roles(self) -> Roles:
        found = self.placed.map
        return Roles(found.version, found.primaries[0], found.backups[0], self.placed.recruits[0])

    def _start(self, server: int) -> None:
        self.holdings[server] = ReplicatedSlice(server, Ordered(), self._roles())
        self._perform(server, self.holdings[server].begin())

    def _tell_map(self) -> None:
        for server in self.holdings:
            self.links.setdefault((-1, server), deque()).append(self._roles())

    def _perform(self, server: int, outputs: list[Output]) -> None:
        for one in outputs:
            match one:
                case AnswerClient(name):
                    self.answered.add(name)
                    self.open.pop(name, None)
                case RefuseClient():
                    pass  # it is sent again, to the primary of that time
                case ReportCopied(target):
                    self.links.setdefault((server, -1), deque()).append(target)
                case Forward() | SendCopy() | Acknowledge():
                    if self.chance.random() >= self.losing:
                        self.links.setdefault((server, one.to), deque()).append(one)

    def push(self) -> None:
        name = (self.chance.randrange(3), self.sent)
        self.open[name] = self.sent
        self.sent += 1
        self.send(name)

    def send(self, name: Name) -> None:
        """To the primary by the newest map, or by an old one: to any."""
        primary = self.placed.map.primaries[0]
        to = primary if self.chance.random() < 0.8 else self.chance.choice(sorted(self.holdings))
        if to in self.holdings:
            self._perform(to, self.holdings[to].change(name, self.open[name]))

    def deliver(self) -> None:
        ready = sorted(link for link, queue in self.links.items() if queue)
        if not ready:
            return
        source, to = self.chance.choice(ready)
        message = self.links[source, to].popleft()
        if to == -1:
            self.placed, _ = placement.copied(self.placed, 0, source, message)
            self._tell_map()
            return
        replicated = self.holdings.get(to)
        if replicated is None:
            return
        match message:
            case Roles():
                self._perform(to, replicated.learn(message))
            case Forward():
                self._perform(to, replicated.forwarded(source, message))
            case SendCopy():
                self._perform(to, replicated.copied(source, message))
            case Acknowledge():
                self._perform(to, replicated.acknowledged(source, message))

    def kill(self, wanted: int = NONE) -> None:
        """That one, or any that can die without loss: there is another complete holder."""
        found = self.placed.map
        if found.backups[0] == NONE and len(self.holdings) < 2:
            return
        victims = [one for one in self.holdings if one != found.primaries[0] or found.backups[0] != NONE]
        victim = wanted if wanted in victims else self.chance.choice(sorted(victims))
        del self.holdings[victim]
        for link in [link for link in self.links if victim in link]:
            del self.links[link]
        self.placed, change = placement.without(self.placed, {victim})
        assert not change.lost
        self._tell_map()
        # What was answered survives: whoever is primary now has it.
        primary = self.holdings[self.placed.map.primaries[0]]
        missing = [name for name in self.answered if not primary.applied.holds(*name)]
        assert not missing

    def join(self) -> None:
        server, self.next_server = self.next_server, self.next_server + 1
        self.placed, _ = placement.with_server(self.placed, server, f"host{server}")
        self._start(server)
        self._tell_map()

    def remind(self) -> None:
        for server, replicated in list(self.holdings.items()):
            self._perform(server, replicated.remind())

    def settle(self) -> None:
        """Nothing happens any more, and no message is lost: everything is answered and equal in the end."""
        self.losing = 0.0
        for _ in range(200):
            while any(self.links.values()):
                self.deliver()
            self.remind()
            for name in list(self.open):
                self.send(name)
            if not self.open and not any(self.links.values()):
                return
        raise AssertionError(f"not answered: {self.open}")


def check(cluster: Cluster) -> None:
    cluster.settle()
    found = cluster.placed.map
    primary = cluster.holdings[found.primaries[0]].store
    assert isinstance(primary, Ordered)
    assert sorted(primary.contents) == list(range(cluster.sent))  # each once
    if found.backups[0] != NONE:
        backup = cluster.holdings[found.backups[0]].store
        assert isinstance(backup, Ordered)
        assert backup.contents == primary.contents


@pytest.mark.parametrize("losing", [0.0, 0.1])
@pytest.mark.parametrize("servers", [1, 2, 4])
def test_whatever_is_answered_survives_and_counts_once(servers: int, losing: float) -> None:
    for seed in range(60):
        cluster = Cluster(seed, servers, losing)
        for _ in range(400):
            what = cluster.chance.random()
            if what < 0.25:
                cluster.push()
            elif what < 0.32 and cluster.open:
                cluster.send(cluster.chance.choice(sorted(cluster.open)))
            elif what < 0.34:
                cluster.remind()
            elif what < 0.35 and servers > 1:
                cluster.kill()
            elif what < 0.365 and len(cluster.holdings) < servers + 1:
                cluster.join()
            else:
                cluster.deliver()
        check(cluster)


def test_twenty_primaries_are_killed_in_one_run() -> None:
    """One after the other, each as soon as there is a new backup."""
    cluster = Cluster(1, servers=3, losing=0.0)
    kills = 0
    while kills < 20:
        cluster.push()
        for _ in range(cluster.chance.randrange(12)):
            cluster.deliver()
        primary, backup = cluster.placed.map.primaries[0], cluster.placed.map.backups[0]
        if backup != NONE and primary in cluster.holdings:
            cluster.kill(primary)
            cluster.join()
            kills += 1
    check(cluster)
    assert kills == 20


def test_nothing_is_answered_before_the_backup_has_it() -> None:
    replicated = ReplicatedSlice(0, Ordered(), Roles(1, primary=0, backup=1))
    (hello,) = replicated.begin()
    assert isinstance(hello, Forward)
    (forward,) = replicated.change((5, 0), 7)
    assert isinstance(forward, Forward)
    backup = ReplicatedSlice(1, Ordered(), Roles(1, primary=0, backup=1))
    (there,) = backup.forwarded(0, hello)
    assert isinstance(there, Acknowledge)
    assert replicated.acknowledged(1, there) == []
    (took,) = backup.forwarded(0, forward)
    assert isinstance(took, Acknowledge)
    assert replicated.acknowledged(1, took) == [AnswerClient((5, 0))]


def test_an_old_primary_cannot_answer() -> None:
    """It was cut off, and does not know that its backup has been promoted."""
    old = ReplicatedSlice(0, Ordered(), Roles(1, primary=0, backup=1))
    (hello,) = old.begin()
    assert isinstance(hello, Forward)
    new = ReplicatedSlice(1, Ordered(), Roles(1, primary=0, backup=1))
    (there,) = new.forwarded(0, hello)
    assert isinstance(there, Acknowledge)
    old.acknowledged(1, there)
    new.learn(Roles(2, primary=1))
    (forward,) = old.change((5, 0), 7)
    assert isinstance(forward, Forward)
    assert new.forwarded(0, forward) == []
    assert new.change((5, 0), 7) == [AnswerClient((5, 0))]
    assert old.learn(Roles(2, primary=1)) == [RefuseClient((5, 0), 2)]
    assert old.change((5, 1), 8) == [RefuseClient((5, 1), 2)]


def test_what_was_said_to_an_earlier_term_does_not_count() -> None:
    """The same two servers, in the same roles as before; a message of that time arrives late."""
    replicated = ReplicatedSlice(0, Ordered(), Roles(1, primary=0, backup=1))
    replicated.begin()
    replicated.learn(Roles(2, primary=1, backup=0))
    replicated.learn(Roles(3, primary=0, backup=1))
    replicated.change((5, 0), 7)
    assert replicated.acknowledged(1, Acknowledge(0, 1, (1, 9), 9)) == []
    assert replicated.acknowledged(1, Acknowledge(0, 3, replicated.last, 9)) == [AnswerClient((5, 0))]


def test_what_a_recruit_said_of_a_copy_that_it_has_dropped_does_not_count() -> None:
    """It was backup, then another one was, and now it is recruited again: it has nothing."""
    replicated = ReplicatedSlice(0, Ordered(), Roles(1, primary=0, backup=1))
    replicated.begin()
    replicated.change((5, 0), 7)
    replicated.learn(Roles(2, primary=0, backup=2))
    replicated.learn(Roles(3, primary=0, recruit=1))
    assert replicated.acknowledged(1, Acknowledge(0, 1, replicated.last, version=1)) == []  # it was long on its way
    assert replicated.acknowledged(1, Acknowledge(0, 1, replicated.last, version=3)) == [ReportCopied(1)]
