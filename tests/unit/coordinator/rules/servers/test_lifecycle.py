"""Parameter servers come, die, freeze and leave: what the coordinator decides, writes down and says."""

from __future__ import annotations

from dataclasses import replace

from distbelief.control import messages as m
from distbelief.coordinator.rules import state as s
from distbelief.coordinator.rules.servers import fleet
from tests.support.coordinator.fleet import SLICES, died, hired, killed, maps, ready, served, settled
from tests.support.coordinator.play import JOB, Run, ended, records, replies, report, starts, texts


def same(one: fleet.Fleet, other: fleet.Fleet) -> bool:
    """All but what clocks say, and what the servers tell again when they introduce themselves."""

    def timeless(found: fleet.Fleet) -> fleet.Fleet:
        there = {number: replace(server, heard_at=0.0, longest_gap_s=0.0) for number, server in found.there.items()}
        return replace(found, there=there, hired=dict.fromkeys(found.hired, 0.0), facts={}, deaths=0)

    return timeless(one) == timeless(other)


# --- they come -------------------------------------------------------------------------------------------------------


def test_the_run_starts_when_the_last_server_is_ready() -> None:
    run = Run(workers=2, servers=2)
    run.feed(ready(0))
    run.arrive(0, 1)
    assert run.state.phase == "gathering"
    outputs = run.feed(ready(1))
    assert run.state.phase == "training"
    (known,) = maps(outputs)
    assert (known.version, known.life, known.addresses) == (1, 1, {0: "tcp://here:0", 1: "tcp://here:1"})
    assert all(backup == 1 - primary for primary, backup in zip(known.primaries, known.backups, strict=True))
    told = [type(o.command) for o in outputs if isinstance(o, s.Send | s.SendServer)]
    assert told.index(m.Serve) < told.index(m.StartGeneration)  # the members ask the servers at once


def test_a_server_with_another_model_or_another_torch_ends_the_run() -> None:
    for odd in (ready(1, slices=[100, 80]), ready(1, facts={"threads": "2"})):
        run = Run(workers=1, servers=2)
        run.feed(ready(0))
        entry = ended(run.feed(odd))
        assert entry["status"] == "failed"
        assert "server 1" in entry["reason"]


def test_a_server_that_fails_ends_the_run_with_its_message() -> None:
    run = Run(workers=1, servers=1)
    entry = ended(run.feed(m.ServerFailed(0, "here", "no module named x", "install it", "tb")))
    assert "server 0: no module named x" in entry["reason"]
    assert entry["failure"]["hint"] == "install it"


def test_a_coordinator_that_does_not_know_a_server_asks_who_it_is() -> None:
    run = served()
    assert replies(run.feed(m.ServerBeat(5, 7, 0))) == [m.Introduce(7, 0)]
    assert replies(run.feed(m.ServerBeat(0, 7, 0)))[0].map.version == 1  # it missed the map
    assert replies(run.feed(m.ServerBeat(0, 7, 1))) == []


def test_a_worker_that_missed_a_map_is_told() -> None:
    run = served()
    assert [type(one) for one in replies(run.beat(0, servers=0))] == [m.Serve]
    assert replies(run.beat(0, servers=1)) == []


# --- they die --------------------------------------------------------------------------------------------------------


def test_a_death_promotes_the_backups_and_hires_another_one() -> None:
    run = served(3)
    outputs = run.feed(*died(1))
    (known,) = maps(outputs)
    assert 1 not in {*known.primaries, *known.backups, *known.addresses}
    assert known.life == 1
    assert hired(outputs) == [3]
    assert starts(outputs) == {}  # the members go on
    assert "server 1 (pid 201 on here)" in texts(outputs)
    run.feed(ready(3))
    known = settled(run)
    assert 3 in {*known.primaries, *known.backups}
    assert -1 not in known.backups
    assert (run.state.fleet.kills, run.state.fleet.target, len(run.state.fleet.there)) == (1, 3, 3)


def test_an_exit_that_is_told_twice_counts_once() -> None:
    run = served(3)
    run.feed(*died(1))
    again = run.feed(*died(1), m.EngineAttached("here", servers_exited={1: -9}))
    assert (maps(again), hired(again)) == ([], [])
    assert run.state.fleet.kills == 1


def test_what_only_one_had_begins_anew_from_a_checkpoint() -> None:
    """Two servers: with the first the second had everything; then it dies too, before the new one has its copies."""
    run = served(2)
    run.feed(*died(0))
    run.feed(ready(2))
    outputs = run.feed(*died(1))
    (known,) = maps(outputs)
    assert known.life == 2
    assert set(known.primaries) == {2}
    assert sorted(starts(outputs)) == [0, 1]  # the members look where the parameters are
    assert "go back to a checkpoint" in texts(outputs)


def test_all_begin_from_the_checkpoint_that_was_newest_when_they_were_told() -> None:
    run = served(2)
    run.state = replace(run.state, saves=replace(run.state.saves, sealed=40))
    run.feed(*died(0), ready(2), *died(1))
    run.state = replace(run.state, saves=replace(run.state.saves, sealed=50))
    run.feed(ready(3))
    known = run.state.fleet.map()
    assert known is not None
    assert (known.life, known.sealed) == (2, 40)
    assert same(run.restarted().state.fleet, run.state.fleet)


def test_all_servers_gone() -> None:
    run = served(1)
    outputs = run.feed(*died(0))
    assert (maps(outputs), starts(outputs), hired(outputs)) == ([], {}, [1])
    assert run.state.fleet.map() is None
    assert replies(run.beat(0, servers=1)) == []
    outputs = run.feed(ready(1))
    (known,) = maps(outputs)
    assert (known.version, known.life, known.primaries) == (2, 2, [1, 1, 1])
    assert sorted(starts(outputs)) == [0, 1]


def test_a_server_that_dies_before_the_start_is_replaced() -> None:
    run = Run(workers=1, servers=2)
    run.feed(ready(0))
    assert hired(run.feed(*died(1))) == [2]
    run.arrive(0)
    assert run.state.phase == "gathering"
    (known,) = maps(run.feed(ready(2)))
    assert sorted(known.addresses) == [0, 2]


def test_servers_that_die_again_and_again_end_the_run() -> None:
    run = served(2)
    number = 2
    for _ in range(13):
        outputs = run.feed(*died(number - 1))
        assert hired(outputs) == [number]
        run.feed(ready(number))
        number += 1
    entry = ended(run.feed(*died(number - 1)))
    assert "14 servers have died one after the other, without a step in between" in entry["reason"]
    assert entry["failure"]["hint"] == f"look in logs/server-{number - 1}.log"


def test_a_step_in_between_makes_up_for_deaths() -> None:
    run = served(2)
    for number in range(1, 20):
        run.feed(*died(number), ready(number + 1))
        run.beat(0, step=number, reports=[report(number - 1)])
    assert run.state.phase == "training"
    assert run.state.fleet.kills == 19


def test_the_result_tells_of_servers() -> None:
    run = served(2)
    run.feed(*died(1))
    ends = [
        m.WorkerFinished(worker=w, generation=1, step=JOB.steps, weights_sha256="abc", loss=0.1, samples_per_s=1.0)
        for w in (0, 1)
    ]
    result = ended(run.feed(*ends))["result"]
    assert (result["servers"], result["servers_lost"]) == (2, 1)


# --- the coordinator dies --------------------------------------------------------------------------------------------


def test_another_coordinator_finds_the_same_fleet() -> None:
    run = served(3)
    for events in ([*died(1)], [ready(3)], [*died(0)], [*died(4), ready(5)]):
        run.feed(*events)
        assert same(run.restarted().state.fleet, run.state.fleet), events


def test_an_exit_that_nobody_heard_is_told_by_the_engine() -> None:
    run = served(2).restarted()
    attached = m.EngineAttached("here", servers={0: 200}, servers_exited={1: -9})
    outputs = run.feed(attached)
    assert hired(outputs) == [2]
    assert maps(outputs)[0].primaries == [0, 0, 0]
    assert hired(run.feed(attached, now=2.0)) == []
    assert hired(run.feed(attached, now=20.0)) == [2]  # the engine never heard of it


def test_a_server_that_was_asked_for_and_died_is_not_waited_for() -> None:
    """Its end was on record when another one came: the next coordinator asks for nobody in its place."""
    run = served(2)
    run.feed(*died(1), *died(2), ready(3))
    other = run.restarted()
    assert not other.state.fleet.hired
    assert hired(other.feed(m.EngineAttached("here", servers={0: 200, 3: 203}), now=60.0)) == []


def test_copies_that_the_old_coordinator_did_not_hear_of() -> None:
    run = served(2)
    run.feed(*died(1), ready(2))
    other = run.restarted()
    for number in range(len(SLICES)):
        other.feed(m.SliceCopied(0, number, 2, other.state.fleet.version))
    known = other.state.fleet.map()
    assert known is not None
    assert all({primary, backup} == {0, 2} for primary, backup in zip(known.primaries, known.backups, strict=True))


# --- they freeze -----------------------------------------------------------------------------------------------------


def progressing(run: Run, step: int, now: float) -> None:
    run.beat(0, step=step, now=now, reports=[report(step - 1, at=now)])
    run.beat(1, step=step, now=now)


def test_a_silent_server_is_left_alone_while_the_run_goes_on() -> None:
    run = served(2)
    for step in range(1, 40):
        progressing(run, step, now=1.0 + 0.5 * step)
        assert killed(run.feed(s.Ticked(), now=1.0 + 0.5 * step)) == []


def test_a_silent_server_is_killed_when_the_run_stands_still() -> None:
    run = served(2)
    progressing(run, 1, now=2.0)
    outputs: list[s.Output] = []
    for tenth in range(20, 70):
        now = tenth / 10
        run.feed(m.ServerBeat(0, 7, 1), now=now)
        run.beat(0, 1, step=1, now=now, waiting=True)
        outputs += run.feed(s.Ticked(), now=now)
    assert killed(outputs) == [1]  # once
    assert [entry["server"] for entry in records(outputs, "server_fenced")] == [1]
    assert "frozen" in texts(outputs)
    again = run.feed(m.EngineAttached("here", servers={0: 200, 1: 201}), now=8.0)
    assert killed(again) == [1]  # the engine may have missed it
    assert hired(run.feed(*died(1), now=8.1)) == [2]


# --- how long the run stands still -----------------------------------------------------------------------------------


def test_the_pause_after_each_loss_is_measured_and_on_record() -> None:
    run = served(3)
    progressing(run, 1, now=2.0)
    run.feed(*died(0), now=3.0)
    run.beat(0, step=2, now=3.3, reports=[report(1, at=2.9)])  # it was applied before
    assert not records(run.outputs, "server_pause")
    for one in (run.restarted(), run):  # a new coordinator knows that there is something to wait for
        reports = [report(2, at=3.25), report(3, at=3.5)]
        beat = m.Heartbeat(0, one.state.epoch, one.state.generation, 4, m.Timing(), reports)
        (entry,) = records(one.feed(beat, now=3.6), "server_pause")
        assert (entry["server"], entry["pause_s"]) == (0, 0.25)
    assert run.restarted().state.fleet.pauses == (0.25,)
    progressing(run, 5, now=4.0)
    assert len(records(run.outputs, "server_pause")) == 1


def test_of_a_server_that_froze_the_pause_is_from_its_last_sign_of_life() -> None:
    run = served(2)
    progressing(run, 1, now=2.0)
    for tenth in range(20, 70):
        now = tenth / 10
        run.feed(m.ServerBeat(0, 7, 1), *([m.ServerBeat(1, 7, 1)] if now < 2.5 else []), now=now)
        run.beat(0, 1, step=1, now=now, waiting=True)
        run.feed(s.Ticked(), now=now)
    run.feed(*died(1), now=7.0)
    run.beat(0, step=2, now=7.5, reports=[report(1, at=7.4)])
    (entry,) = records(run.outputs, "server_pause")
    assert abs(entry["pause_s"] - 5.0) < 0.11
