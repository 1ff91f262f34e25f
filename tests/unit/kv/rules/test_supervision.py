"""The servers of a key-value service: events in, decisions out."""

from __future__ import annotations

from distbelief.coordinator.rules.servers.fleet import Fleet
from distbelief.kv.rules import supervision
from distbelief.kv.rules.supervision import Fail, Kill, Output, Say, Start, Tell, TellAll


def begun(servers: int = 2) -> Fleet:
    fleet, outputs = supervision.begun(servers, 0.0)
    assert outputs == [Start(number) for number in range(servers)]
    for number in range(servers):
        fleet, outputs = come(fleet, number)
    assert TellAll() in outputs
    return fleet


def come(fleet: Fleet, number: int, now: float = 0.0) -> supervision.Result:
    return supervision.ready(fleet, number, "host", 100 + number, f"tcp://{number}", now)


def copies(fleet: Fleet) -> Fleet:
    """All copies under way are reported."""
    for _ in range(100):
        placed = fleet.placement
        assert placed is not None
        wanted = [number for number, recruit in enumerate(placed.recruits) if recruit >= 0]
        if not wanted:
            return fleet
        number = wanted[0]
        fleet, _ = supervision.copied(fleet, number, placed.map.primaries[number], placed.recruits[number])
    raise AssertionError("it never settles")


def started(outputs: list[Output]) -> list[int]:
    return [one.server for one in outputs if isinstance(one, Start)]


def test_a_service_begins_when_all_servers_are_there() -> None:
    fleet, _ = supervision.begun(2, 0.0)
    fleet, outputs = come(fleet, 0)
    assert outputs == []
    assert fleet.map() is None
    fleet, outputs = come(fleet, 1)
    assert outputs == [TellAll()]
    known = fleet.map()
    assert known is not None
    assert known.life == 1
    assert len(known.primaries) == 17
    assert {*zip(known.primaries, known.backups, strict=True)} == {(0, 1), (1, 0)}


def test_a_death_promotes_and_recruits_and_loses_nothing() -> None:
    fleet, outputs = supervision.exited(begun(), 0, -9, 1.0)
    assert started(outputs) == [2]
    assert TellAll() in outputs
    known = fleet.map()
    assert known is not None
    assert set(known.primaries) == {1}
    assert 0 not in known.addresses
    fleet, outputs = come(fleet, 2)
    assert TellAll() in outputs
    assert fleet.placement is not None
    assert set(fleet.placement.recruits) == {2}
    fleet = copies(fleet)
    known = fleet.map()
    assert known is not None
    assert {*known.primaries, *known.backups} == {1, 2}
    assert known.life == 1
    assert fleet.deaths == 0


def test_when_all_holders_die_a_new_life_begins_empty() -> None:
    fleet, _ = supervision.exited(begun(), 0, -9, 1.0)
    fleet, outputs = supervision.exited(fleet, 1, -9, 1.0)
    assert started(outputs) == [3]
    assert any(isinstance(one, Say) and "lost" in one.text for one in outputs)
    assert fleet.map() is None
    for number in (2, 3):
        fleet, _ = come(fleet, number)
    known = fleet.map()
    assert known is not None
    assert known.life == 2
    assert known.version > 2


def test_one_dies_before_the_other_has_a_copy_while_another_lives() -> None:
    fleet = begun(3)
    fleet, _ = supervision.exited(fleet, 0, -9, 1.0)
    fleet, _ = supervision.exited(fleet, 1, -9, 1.0)
    known = fleet.map()
    assert known is not None
    assert known.life == 2
    assert set(known.primaries) == {2}


def test_servers_that_die_again_and_again_end_it() -> None:
    fleet, _ = supervision.begun(1, 0.0)
    outputs: list[Output] = []
    for number in range(3):
        fleet, outputs = supervision.exited(fleet, number, 1, 0.0)
    assert isinstance(outputs[-1], Fail)
    assert "server-2.log" in outputs[-1].hint


def test_an_exit_counts_once_and_the_dead_do_not_come_back() -> None:
    fleet, _ = supervision.exited(begun(), 0, -9, 1.0)
    assert supervision.exited(fleet, 0, -9, 1.0) == (fleet, [])
    assert come(fleet, 0) == (fleet, [])


def test_whoever_knows_an_older_map_is_told_again() -> None:
    fleet = begun()
    assert supervision.beat(fleet, 0, fleet.version, 1.0)[1] == []
    assert supervision.beat(fleet, 0, fleet.version - 1, 1.0)[1] == [Tell()]
    assert come(fleet, 0)[1] == [Tell()]
    assert supervision.beat(fleet, 9, 0, 1.0)[1] == []


def test_a_frozen_server_is_killed_once_and_one_that_often_is_silent_later() -> None:
    fleet = begun()
    now = supervision.SILENT_S + 1
    fleet, _ = supervision.beat(fleet, 1, fleet.version, now)
    fleet, outputs = supervision.ticked(fleet, now)
    assert [one for one in outputs if isinstance(one, Kill)] == [Kill(0)]
    assert supervision.ticked(fleet, now + 1)[1] == []
    assert supervision.ticked(fleet, now + 2 * supervision.SILENT_S)[1] == []  # server 1 was silent for as long before


def test_a_report_that_makes_no_sense_changes_nothing() -> None:
    fleet = begun()
    assert supervision.copied(fleet, 99, 0, 1) == (fleet, [])
    assert supervision.copied(fleet, 1, 0, 1)[1] == []
