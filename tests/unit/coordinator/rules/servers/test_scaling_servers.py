"""Another number of parameter servers is asked for while a run trains."""

from __future__ import annotations

import random

import pytest

from distbelief.control import messages as m
from distbelief.coordinator.rules import state as s
from tests.support.coordinator.fleet import died, hired, killed, maps, ready, served, settled
from tests.support.coordinator.play import Run, records, replies, texts


def asked(run: Run, servers: int) -> tuple[m.Answer, list[s.Output]]:
    outputs = run.feed(m.ServersRequested(servers))
    (answer,) = [reply for reply in replies(outputs) if isinstance(reply, m.Answer)]
    return answer, outputs


def goodbyes(outputs: list[s.Output]) -> set[int]:
    return {o.server for o in outputs if isinstance(o, s.SendServer) and isinstance(o.command, m.EndRun)}


def holders(run: Run) -> set[int]:
    known = settled(run)
    return {*known.primaries, *known.backups}


def test_more_servers_are_started_and_get_slices() -> None:
    run = served(2)
    answer, outputs = asked(run, 3)
    assert (answer.ok, answer.text, hired(outputs)) == (True, "1 more server is being started", [2])
    assert "3 servers were asked for instead of 2" in texts(outputs)
    run.feed(ready(2))
    assert holders(run) == {0, 1, 2}


def test_fewer_hand_over_first_and_go() -> None:
    run = served(3)
    answer, outputs = asked(run, 1)
    assert answer.text.startswith("2 servers leave when the others have copies; with one server there is no backup")
    assert (hired(outputs), goodbyes(outputs), run.state.fleet.target) == ([], set(), 1)  # nobody goes before that
    assert holders(run) == {0, -1}
    assert goodbyes(run.outputs) == {1, 2}
    for server in (1, 2):
        assert [type(one) for one in replies(run.feed(m.ServerBeat(server, 7, 1)))] == [m.EndRun]  # told again
        gone = run.feed(m.ServerExited(server, 0))
        assert (hired(gone), maps(gone), run.state.fleet.kills) == ([], [], 0)
    assert asked(run, 2)[0].ok
    assert hired(run.outputs)[-1] == 3  # a number is given once


def test_one_that_leaves_may_die_before_it_is_empty() -> None:
    run = served(3)
    asked(run, 2)
    assert not goodbyes(run.outputs)
    outputs = run.feed(*died(2))
    assert (hired(outputs), run.state.fleet.kills) == ([], 1)
    assert "another one is started" not in texts(outputs)
    assert holders(run) == {0, 1}


def test_the_one_that_was_to_stay_dies_so_one_of_the_others_does() -> None:
    run = served(3)
    asked(run, 1)
    outputs = run.feed(*died(0))
    assert hired(outputs) == [3]
    assert run.state.fleet.life == 2  # what only it had is lost
    run.feed(ready(3), m.EngineAttached("here", servers={1: 201, 2: 202, 3: 203}))
    assert holders(run) == {1, -1}
    assert goodbyes(run.outputs) == {2, 3}


def test_one_that_is_on_its_way_is_called_off() -> None:
    run = served(2)
    asked(run, 4)
    _, outputs = asked(run, 3)
    assert killed(outputs) == [3]
    assert [type(one) for one in replies(run.feed(ready(3)))] == [m.EndRun]
    run.feed(m.ServerExited(3, -9))
    assert (run.state.fleet.kills, sorted(run.state.fleet.hired)) == (0, [2])


def test_all_slices_are_lost_while_one_leaves() -> None:
    """The parameters begin anew on whoever is to stay, and the others go."""
    run = served(3)
    asked(run, 2)
    run.feed(*died(0, 1))
    run.feed(ready(3), ready(4))
    assert {*run.state.fleet.there} >= {3, 4}
    assert 2 not in holders(run) or not run.state.fleet.there[2].leaving


@pytest.mark.parametrize(("servers", "words"), [(0, "1 to 1,000"), (-1, "1 to 1,000"), (2000, "not 2,000")])
def test_numbers_that_make_no_sense(servers: int, words: str) -> None:
    answer, outputs = asked(served(2), servers)
    assert not answer.ok
    assert words in answer.text
    assert not records(outputs)


def test_runs_that_cannot_be_scaled_so() -> None:
    assert "no parameter servers" in asked(Run(workers=1).started(0), 2)[0].text
    assert "not all servers are ready yet" in asked(Run(workers=1, servers=2), 3)[0].text
    assert "already" in asked(served(2), 2)[0].text


@pytest.mark.parametrize("seed", range(40))
def test_wherever_the_coordinator_dies_it_comes_to_the_number_that_was_wanted(seed: int) -> None:
    chance = random.Random(seed)
    run = served(2)
    alive = {0, 1}
    for _ in range(12):
        before = len(run.journal)
        match chance.choice(["scale", "scale", "die", "come", "copy", "beat"]):
            case "scale":
                run.feed(m.ServersRequested(chance.randint(1, 4)))
            case "die" if len(alive) > 1:
                victim = chance.choice(sorted(alive))
                alive.discard(victim)
                run.feed(*died(victim))
            case "come":
                coming = sorted(run.state.fleet.hired)
                alive |= set(coming)
                run.feed(*map(ready, coming))
            case "copy":
                settled(run)
            case _:
                pass
        entries = run.journal
        kept = entries if chance.random() < 0.5 else entries[: chance.randint(before, len(entries))]
        if chance.random() < 0.4 and run.state.fleet.placement is not None:
            if kept == entries:
                live, found = run.state.fleet, run.restarted().state.fleet
                assert (live.target, live.placement) == (found.target, found.placement)
                assert live.next_server == found.next_server
            known = alive | run.state.fleet.hired.keys()
            gone = {number: -9 for number in range(run.state.fleet.next_server) if number not in known}
            run = run.restarted(kept)
            run.feed(m.EngineAttached("here", servers={n: 200 + n for n in alive}, servers_exited=gone), now=100.0)
    run.state, _ = s.step(run.state, m.ServersRequested(2), 1.0)
    if run.state.phase != "training" or run.state.fleet.placement is None:
        return
    for _ in range(6):
        coming = sorted(run.state.fleet.hired)
        run.feed(*map(ready, coming))
        settled(run)
        run.feed(m.EngineAttached("here"), now=200.0)
        empty = run.state.fleet.there.keys() - holders(run)
        run.feed(*(m.ServerExited(number, 0) for number in empty if run.state.fleet.there[number].leaving))
    assert len(run.state.fleet.there) == 2
    assert holders(run) == set(run.state.fleet.there)
