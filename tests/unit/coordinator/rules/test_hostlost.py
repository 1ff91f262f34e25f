"""Somebody who has started the agent of a host says that it is gone: Ray, of its actors."""

from __future__ import annotations

from distbelief.control import messages as m
from tests.support.coordinator.hosts import offer, placed, spread, trained
from tests.support.coordinator.play import heartbeat, records, replies, sends, starts, texts

GONE = m.HostLost("a", "its actor has died")


def test_the_others_go_on_at_once_and_places_elsewhere_are_taken() -> None:
    run = trained(spread())
    outputs = run.feed(GONE)
    assert starts(outputs).keys() == {2}, "b's worker alone"
    assert "the host a is lost: its actor has died" in texts(outputs)
    assert [record["worker"] for record in records(outputs) if record["kind"] == "estranged"] == [0, 1]
    assert replies(outputs) == [m.Answer(7, True, "heard")]
    assert placed(outputs) == {}, "there is no room"
    run.feed(offer("c", "nonce c", room=2))
    assert placed(run.feed(m.EngineAttached("c", room=2))) == {3: "c", 4: "c"}


def test_it_may_be_said_twice_and_of_a_host_that_nobody_knows() -> None:
    run = trained(spread())
    run.feed(GONE)
    generation = run.state.generation
    for event in (GONE, m.HostLost("nowhere", "?")):
        assert replies(run.feed(event)) == [m.Answer(7, True, "heard")]
    assert run.state.generation == generation


def test_workers_that_live_all_the_same_are_taken_back() -> None:
    run = trained(spread())
    run.feed(GONE)
    outputs = run.feed(heartbeat(0, 1, 7, 1))
    assert starts(outputs).keys() == {0, 2}


def test_before_the_start_others_with_new_numbers_take_their_places() -> None:
    """Those that were being started may live: no number is ever two processes'."""
    run = spread()
    run.feed(GONE)
    run.feed(offer("c", "nonce c", room=2))
    assert placed(run.feed(m.EngineAttached("c", room=2))) == {3: "c", 4: "c"}
    run.join(2, host="b")
    run.join(3, 4, host="c")
    run.join(0, host="a")  # it lives after all
    run.ready(2, 3, 4)
    assert run.members == [2, 3, 4]
    left = [command for to, command in sends(run.ready(0)) if to == 0]
    assert [type(one) for one in left] == [m.EndRun]
    assert run.restarted().state.target == 3
