"""Whoever asks what a run is like is told, and the run is as before."""

from __future__ import annotations

from distbelief.control import messages as m
from distbelief.coordinator.rules import state as s
from tests.support.coordinator.play import CANARY, Run


def told(run: Run) -> m.RunFacts:
    before = run.state
    (reply,) = run.feed(m.FactsAsked(number=5), now=77.0)
    assert run.state is before
    assert isinstance(reply, s.Reply)
    assert isinstance(reply.command, m.RunFacts)
    assert (reply.command.number, reply.command.now) == (5, 77.0)
    return reply.command


def test_before_anybody_is_ready() -> None:
    run = Run(workers=2)
    assert told(run).facts == {}
    run.join(0)
    assert told(run).members == {0: "here"}


def test_while_it_trains() -> None:
    run = Run(workers=2).started(0, 1)
    facts = told(run)
    assert facts.facts == CANARY.facts
    assert facts.members == {0: "here", 1: "here"}
    assert facts.phase == "training"
    assert set(facts.software) == {"distbelief", "python"}


def test_when_it_is_over() -> None:
    run = Run(workers=1).started(0)
    run.feed(m.StopRequested("enough", at_once=True))
    assert told(run).phase == "ended"
