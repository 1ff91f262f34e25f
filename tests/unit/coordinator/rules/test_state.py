"""Gathering, by plain calls: events in, outputs out."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from distbelief.control import messages as m
from distbelief.coordinator.rules import state as s
from distbelief.errors import DistBeliefError
from tests.support.coordinator.play import CANARY, JOB, Run, ended, failure, finished, heartbeat, lines, records, sends


def test_the_run_waits_for_all_and_then_starts() -> None:
    run = Run(workers=3)
    assert run.feed(m.EngineAttached(host="here")) == []
    assert run.join(2, 0, 1) == []
    (reference,) = run.ready(2)
    assert isinstance(reference, s.Record)
    assert reference.entry["kind"] == "reference"
    assert reference.entry["worker"] == 2
    assert reference.entry["job"] == msgspec.to_builtins(JOB)
    assert reference.entry["canary"] == msgspec.to_builtins(CANARY)
    assert run.ready(0) == []
    outputs = run.ready(1)
    assert isinstance(outputs[0], s.Record), "the decision is recorded before anybody hears of it"
    assert outputs[0].entry["kind"] == "generation"
    start = m.StartGeneration(
        epoch=7,
        generation=1,
        members=[
            m.Member(0, "here", (0, 2), 100),
            m.Member(1, "here", (2, 3), 101),
            m.Member(2, "here", (3, 4), 102),
        ],
        transport="shm",
    )
    assert sends(outputs) == [(0, start), (1, start), (2, start)]
    assert run.state.phase == "training"
    assert lines(outputs) == []


def test_every_record_has_a_reason_an_epoch_and_a_time() -> None:
    run = Run(workers=4).started(0, 1, 2, 3)
    run.arrive(5)
    run.join(6)
    run.ready(6, job=replace(JOB, steps=9))
    run.kill(5)
    run.kill(1)
    run.feed(m.LeaveRequested(worker=2), m.ScaleRequested(workers=5), m.JoinRequested(pid=9), failure(0))
    kinds = [entry["kind"] for entry in records(run.outputs)]
    assert kinds[:4] == ["reference", "generation", "spare", "refused"]
    assert {*kinds[4:]} == {"lost", "exited", "generation", "hired", "leaves", "scaled", "admitted", "ended"}
    assert kinds[-1] == "ended"
    assert all(entry["reason"] and entry["epoch"] == 7 and "at" in entry for entry in records(run.outputs))
    msgspec.json.encode(records(run.outputs))


def test_workers_beyond_the_shards_are_spares() -> None:
    run = Run(workers=5).started(0, 1, 2, 3, 4)
    told = sends(run.outputs)
    assert [worker for worker, _ in told] == [0, 1, 2, 3, 4]
    start = told[4][1]
    assert isinstance(start, m.StartGeneration)
    assert [member.worker for member in start.members] == [0, 1, 2, 3]
    assert [line["text"] for line in lines(run.outputs, "notice")] == ["5 workers for 4 shards: worker 4 is a spare"]
    assert records(run.outputs, "generation")[0]["spares"] == [4]


def test_shares_decide_the_sizes() -> None:
    run = Run(workers=2, shares=[3.0, 1.0]).started(0, 1)
    assert [member.shards for member in run.state.members] == [(0, 3), (3, 4)]
    run = Run(workers=5, shares=[1.0, 1.0, 1.0, 1.0, 9.0]).started(0, 1, 2, 3, 4)
    assert [member.shards for member in run.state.members] == [(0, 1), (1, 2), (2, 3), (3, 4)]


@pytest.mark.parametrize(
    ("config", "second_host", "transport"),
    [("auto", "here", "shm"), ("auto", "there", "gloo"), ("gloo", "here", "gloo"), ("shm", "here", "shm")],
)
def test_transport(config: str, second_host: str, transport: str) -> None:
    run = Run(workers=2, transport=config)
    run.join(0)
    run.join(1, host=second_host)
    run.ready(0, 1)
    assert run.state.start is not None
    assert run.state.start.transport == transport


def test_shared_memory_across_hosts_is_told_to_be_impossible() -> None:
    run = Run(workers=2, transport="shm")
    run.join(0)
    run.join(1, host="there")
    entry = ended(run.ready(0, 1))
    assert entry["status"] == "failed"
    assert "2 hosts: here, there" in entry["reason"]
    assert "gloo" in entry["failure"]["hint"]


def test_a_worker_that_computes_otherwise_ends_the_gathering() -> None:
    run = Run(workers=3)
    run.join(0, 1, 2)
    run.ready(0)
    outputs = run.ready(2, canary=m.Canary(fingerprint="a1b2", facts={"threads": "2"}))
    entry = ended(outputs)
    assert entry["status"] == "failed"
    assert "worker 2 computes with 2 threads, the run with 1" in entry["reason"]
    assert entry["failure"]["worker"] == 2
    assert records(outputs)[0]["kind"] == "refused"
    assert sends(outputs)[0] == (2, m.Refuse(epoch=7, reason=entry["reason"]))
    assert [worker for worker, _ in sends(outputs)[1:]] == [0, 1, s.ENGINE]


def test_without_exactness_the_canary_does_not_matter_but_the_job_does() -> None:
    run = Run(workers=3, exact=False)
    run.join(0, 1, 2)
    run.ready(0)
    run.ready(1, canary=m.Canary(fingerprint="ffff", facts={"threads": "8"}))
    assert run.state.phase == "gathering"
    assert "does not train the same job" in ended(run.ready(2, job=replace(JOB, samples=5)))["reason"]


def test_repeated_messages_change_nothing() -> None:
    run = Run(workers=2)
    run.join(0, 0)
    assert len(run.ready(0, 0)) == 1
    run.join(1)
    started = run.ready(1)
    assert sends(started)
    assert run.ready(1, 0) == []
    assert run.join(0, 1) == []
    assert run.state.workers[0].ready


def test_messages_out_of_place_are_errors_and_change_nothing() -> None:
    run = Run(workers=2)
    with pytest.raises(s.ProtocolError):
        run.feed(finished(0))
    run.join(0)
    with pytest.raises(s.ProtocolError, match="alive"):
        run.feed(m.WorkerJoined(worker=0, host="here", pid=555))
    assert run.state.workers[0].pid == 100
    run = Run(workers=5).started(0, 1, 2, 3, 4)
    with pytest.raises(s.ProtocolError, match="no seat"):
        run.feed(finished(4))


def test_whoever_is_not_known_is_asked_to_introduce_itself() -> None:
    """Its messages may have been lost, or were told to a coordinator that is gone."""
    run = Run()
    ask = [s.Reply(m.Introduce(epoch=7, reported=0))]
    assert run.feed(heartbeat(generation=0)) == ask
    assert run.ready(0) == ask
    run.join(0)
    assert run.feed(heartbeat(generation=0)) == ask, "it has not said that it is ready"
    run.ready(0)
    assert run.feed(heartbeat(generation=0)) == []


def test_gathering_for_too_long_names_who_is_missing() -> None:
    run = Run(workers=3, gather_timeout_s=10.0)
    run.join(0, 1)
    run.ready(0)
    assert run.feed(s.Ticked(), now=11.0) == []
    entry = ended(run.feed(s.Ticked(), now=11.1))
    assert entry["status"] == "failed"
    assert "worker 1 (host here, pid 101) has joined but not finished loading the job" in entry["reason"]
    assert "worker 2 never joined" in entry["reason"]
    assert "worker 0" not in entry["reason"]


def test_every_arrival_extends_the_gathering() -> None:
    run = Run(workers=2, gather_timeout_s=10.0)
    run.feed(m.WorkerJoined(worker=0, host="here", pid=1), now=9.0)
    run.feed(m.WorkerReady(worker=0, job=JOB, canary=CANARY), now=18.0)
    assert run.feed(s.Ticked(), now=27.0) == []
    run.feed(m.WorkerJoined(worker=1, host="here", pid=2), now=27.0)
    run.feed(m.WorkerReady(worker=1, job=JOB, canary=CANARY), now=36.0)
    assert run.feed(s.Ticked(), now=1000.0) == [], "training has no such limit"


@pytest.mark.parametrize(
    "config",
    [
        {"workers": 0},
        {"workers": 2, "shares": [1.0]},
        {"workers": 1, "shares": [0.0]},
        {"workers": 1, "transport": "x"},
        {"workers": 2, "min_workers": 0},
        {"workers": 2, "min_workers": 3},
    ],
)
def test_a_wrong_configuration_does_not_decode(config: dict) -> None:
    with pytest.raises((msgspec.ValidationError, DistBeliefError)):
        msgspec.convert(config, s.RunConfig)


def test_what_the_first_ready_worker_has_to_tell_is_told_once() -> None:
    run = Run(workers=2)
    for worker in (0, 1):
        run.join(worker)
        run.feed(m.WorkerReady(worker=worker, job=JOB, canary=CANARY, notices=["the result depends on the cluster"]))
    assert [line["text"] for line in lines(run.outputs, "notice")] == ["the result depends on the cluster"]
