"""Placement against a model of servers that really copy, promote and drop what they are told to."""

from __future__ import annotations

import random

import msgspec
import pytest

from distbelief.coordinator.rules.servers.placement import (
    NONE,
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
from distbelief.errors import DistBeliefError, JobError
from tests.support.ps.placement import ONE_HOST, Servers, parts


def test_first_placement_is_balanced_and_backups_are_elsewhere() -> None:
    sizes = random.Random(1).sample(range(1, 1000), 200)
    servers = Servers(parts(*sizes), ONE_HOST)
    servers.check_settled(held_too=True)
    primary, held = servers.loads()
    assert max(primary) <= 1.02 * sum(sizes) / 4
    assert max(held) <= 1.02 * 2 * sum(sizes) / 4


@pytest.mark.parametrize("hosts", ["aabb", "aaab", "abcc"])
def test_backups_prefer_another_host(hosts: str) -> None:
    servers = Servers(parts(*range(1, 60)), dict(enumerate(hosts)))

    def all_apart() -> bool:
        on = servers.placed.hosts
        return all(
            on[p] != on[b] for p, b in zip(servers.placed.map.primaries, servers.placed.map.backups, strict=True)
        )

    assert all_apart()
    servers.kill({1})
    servers.settle()
    assert all_apart()
    servers.join(9, "a")
    servers.settle()
    assert all_apart(), "what moves is apart again"


def test_one_server_has_no_backup_and_its_death_loses_all() -> None:
    servers = Servers(parts(3, 2, 1), {5: "a"})
    assert servers.placed.map.backups == (NONE, NONE, NONE)
    change = servers.kill({5})
    assert change.lost == (0, 1, 2)
    assert "checkpoint" in change.reason
    servers.join(6, "a")  # nothing to give to it, and no error
    assert servers.placed.map.primaries == (NONE, NONE, NONE)


def test_a_death_promotes_at_once_and_recruits() -> None:
    servers = Servers(parts(*[10] * 12), {0: "a", 1: "a", 2: "a"})
    of_dead = [n for n, primary in enumerate(servers.placed.map.primaries) if primary == 0]
    change = servers.kill({0})
    assert not change.lost
    assert {command.slice for command in change.commands if isinstance(command, Promote)} >= set(of_dead)
    assert 0 not in servers.placed.map.primaries
    servers.settle()
    servers.check_settled(held_too=True)


def test_a_recruit_is_not_promoted_before_it_has_the_copy() -> None:
    servers = Servers(parts(4), {0: "a"})
    servers.join(1, "a")
    assert servers.kill({0}).lost == (0,), "server 1 had only part of it"
    again = Servers(parts(4), {0: "a"})
    again.join(1, "a")
    again.finish(0, 1)
    assert again.kill({0}).lost == ()
    assert again.placed.map.primaries == (1,)


def test_a_copy_begins_again_when_its_source_dies() -> None:
    servers = Servers(parts(4), {0: "a", 1: "a", 2: "a"})
    primary, backup = servers.placed.map.primaries[0], servers.placed.map.backups[0]
    recruit = ({0, 1, 2} - {primary, backup}).pop()
    servers.kill({backup})
    assert servers.placed.recruits == (recruit,)
    servers.join(7, "a")
    servers.finish(0, recruit)
    servers.kill({primary})
    stale, change = copied(servers.placed, 0, primary, 7)
    assert stale == servers.placed, "the report of a dead primary is worth nothing"
    assert "not wanted" in change.reason
    servers.settle()
    assert servers.complete[0] == {recruit, 7}


def test_an_unwanted_copy_is_dropped() -> None:
    servers = Servers(parts(4, 4, 4), {0: "a", 1: "a", 2: "a"})
    number = servers.placed.map.primaries.index(0)
    outsider = ({0, 1, 2} - servers.complete[number]).pop()
    placed, change = copied(servers.placed, number, 0, outsider)
    assert placed == servers.placed
    assert change.commands == (Drop(number, outsider),)


def test_a_report_of_an_earlier_copy_to_the_same_server_changes_nothing() -> None:
    """It was recruited before, dropped what it had, and is recruited again: the report was on its way all the time."""
    placed, _ = with_server(first([Slice(0, 4)], {0: "a"}), 1, "a")
    assert placed.recruits == (1,)
    same, decision = copied(placed, 0, source=0, target=1, known=placed.map.version - 1)
    assert (same, decision.commands) == (placed, ())
    assert "an earlier copy" in decision.reason
    later, _ = copied(placed, 0, source=0, target=1, known=placed.map.version)
    assert later.map.backups == (1,)


@pytest.mark.parametrize("before", [1, 2, 3, 7])
def test_an_arrival_moves_about_its_share(before: int) -> None:
    sizes = random.Random(before).choices(range(50, 150), k=240)
    servers = Servers(parts(*sizes), dict.fromkeys(range(before), "a"))
    servers.join(before, "a")
    servers.settle()
    servers.check_settled(held_too=True)
    share = 2 * sum(sizes) / (before + 1)  # of what is held: everything twice
    assert 0.9 * share <= servers.moved_bytes <= 1.1 * share


def test_whoever_leaves_hands_over_everything_first() -> None:
    servers = Servers(parts(*[7] * 40), ONE_HOST)
    servers.leave(2)
    assert 2 not in servers.placed.map.primaries, "roles are exchanged at once"
    while servers.copying:
        assert all(len(holders) == 2 for holders in servers.complete.values()), "two complete holders all along"
        servers.finish(*min(servers.copying))
    assert 2 not in servers.alive
    servers.check_settled(held_too=True)


def test_whoever_leaves_gets_no_more_copies() -> None:
    servers = Servers(parts(*[7] * 12), {0: "a", 1: "a", 2: "a"})
    servers.join(3, "a")
    under_way = [number for number, target in servers.copying if target == 3]
    change = servers.leave(3)
    assert under_way
    assert set(change.commands) == {*(Drop(number, 3) for number in under_way), Release(3)}


def test_a_primary_that_leaves_in_the_middle_of_a_handover_is_not_kept_as_backup() -> None:
    servers = Servers(parts(*[7] * 12), {0: "a", 1: "a", 2: "a"})
    servers.join(3, "a")
    number = servers.placed.handovers.index(True)
    primary, backup = servers.placed.map.primaries[number], servers.placed.map.backups[number]
    servers.leave(primary)
    servers.finish(number, 3)
    assert (servers.placed.map.primaries[number], servers.placed.map.backups[number]) == (3, backup)


def test_of_two_one_may_leave_at_once_and_the_last_one_never() -> None:
    servers = Servers(parts(3, 4), {0: "a", 1: "a"})
    assert Release(0) in servers.leave(0).commands
    assert servers.placed.map.primaries == (1, 1)
    assert "no other server stays" in servers.leave(1).reason
    assert servers.alive == {1}
    servers.join(2, "a")
    servers.settle()
    assert servers.alive == {2}
    assert not servers.lost


def test_wrong_calls_say_what_is_wrong() -> None:
    with pytest.raises(JobError, match="no parameter server"):
        first(parts(1), {})
    with pytest.raises(JobError, match="numbered"):
        first([Slice(1, 1)], {0: "a"})
    placed = first(parts(1), {0: "a"})
    with pytest.raises(DistBeliefError, match="taken"):
        with_server(placed, 0, "a")
    assert without(placed, {9}) == (placed, Decision((), "no server of the map died"))
    assert leave(placed, 9)[0] == placed


def test_a_placement_travels_as_a_message() -> None:
    placed, change = without(first(parts(3, 2, 1), ONE_HOST), {1})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(placed), type=Placement) == placed
    assert msgspec.json.decode(msgspec.json.encode(change), type=Decision) == change


def play(seed: int) -> int:
    """One random life of a cluster. Returns the number of events."""
    chance = random.Random(seed)
    hosts = ["a"] if seed % 2 else ["a", "b", "c"]
    number = chance.randrange(1, 6)
    top = chance.choice([1, 5, 100])
    sizes = [chance.randrange(0, top + 1) for _ in range(chance.randrange(1, 25))]
    servers = Servers(parts(*sizes), {server: chance.choice(hosts) for server in range(number)})
    events = chance.randrange(5, 40)
    for _ in range(events):
        living = sorted(servers.alive)
        match chance.choices(["copy", "kill", "join", "leave", "settle"], [10, 2, 3, 1, 1])[0]:
            case "copy" if servers.copying:
                servers.finish(*chance.choice(sorted(servers.copying)))
            case "kill" if living:
                servers.kill(set(chance.sample(living, min(len(living), chance.choice([1, 1, 1, 2, 3])))))
            case "join" if len(living) < 8:
                servers.join(number, chance.choice(hosts))
                number += 1
            case "leave" if living:
                servers.leave(chance.choice(living))
            case "settle":
                servers.settle()
                servers.check_settled(held_too=len(hosts) == 1)
    servers.settle()
    servers.check_settled(held_too=len(hosts) == 1)
    return events


def test_random_lives_keep_every_invariant() -> None:
    assert sum(play(seed) for seed in range(300)) > 5_000
