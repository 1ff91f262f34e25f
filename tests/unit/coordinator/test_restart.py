"""The real coordinator process when something dies, itself included, and when somebody asks from outside."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from distbelief.control import messages as m
from distbelief.coordinator import client
from distbelief.errors import DistBeliefError
from tests.support.coordinator.process import (
    AUTHORITY,
    CANARY,
    JOB,
    attach,
    beat,
    coordinator,
    engine_and_workers,
    finish,
    tell,
    told,
)


def test_a_killed_worker_is_replaced_and_the_others_go_on(tmp_path: Path) -> None:
    with coordinator(tmp_path) as process:
        engine, workers = engine_and_workers(process)
        first, _ = [told(socket) for socket in workers]
        assert isinstance(first, m.StartGeneration)
        attach(engine)
        tell(engine, m.WorkerExited(worker=1, status=-9))
        start = told(workers[0])
        assert isinstance(start, m.StartGeneration)
        assert (start.generation, [member.worker for member in start.members]) == (2, [0])
        assert start.past == [m.PastGeneration(1, first.members)]
        assert told(engine) == m.StartWorker(epoch=1, worker=2, host="here")
        assert [record["kind"] for record in process.records()][-3:] == ["lost", "generation", "hired"]
        assert "worker 1 (host here, pid 1001) was killed by SIGKILL" in process.records()[-2]["reason"]


def test_a_killed_coordinator_is_replaced_at_the_same_address_and_knows_the_run(tmp_path: Path) -> None:
    with coordinator(tmp_path) as first:
        engine, workers = engine_and_workers(first)
        start, _ = [told(socket) for socket in workers]
        tell(workers[0], beat(0, start, 1))
        tell(engine, m.WorkerExited(worker=1, status=-9))
        assert isinstance(told(workers[0]), m.StartGeneration)  # recorded by then, and the step's line is in the file
        first.process.kill()
        first.process.wait()
        with coordinator(tmp_path, order={"listen": first.answer["address"]}) as second:
            assert second.answer == {"address": first.answer["address"], "epoch": 2}
            # The old connections find the new coordinator; what was lost in between is told again and again.
            tell(workers[0], m.Heartbeat(0, 1, 2, 1, m.Timing()))
            while not isinstance(answer := told(workers[0]), m.Introduce):
                pass
            assert answer == m.Introduce(epoch=2, reported=1)
            tell(workers[0], m.WorkerJoined(worker=0, host="here", pid=1000))
            tell(workers[0], m.WorkerReady(worker=0, job=JOB, canary=CANARY))
            tell(workers[0], m.Heartbeat(0, 2, 1, 1, m.Timing()))
            again = told(workers[0])
            assert isinstance(again, m.StartGeneration)
            assert (again.epoch, again.generation, [one.worker for one in again.members]) == (2, 2, [0])
            reports = [m.StepReport(step, 0.5, 8, f"f{step + 1}", 1.0, 2) for step in (0, 1)]
            tell(workers[0], m.Heartbeat(0, 2, 2, 2, m.Timing(), reports))
            tell(workers[0], finish(0, generation=2))
            assert second.wait() == 0
            assert [line["step"] for line in second.metrics() if line["kind"] == "step"] == [0, 1]
            assert [r["generation"] for r in second.records() if r["kind"] == "generation"] == [1, 2]
            assert [r["epoch"] for r in second.records() if r["kind"] == "epoch"] == [1, 2]


def test_whoever_may_read_the_run_directory_can_ask_for_another_number_of_workers(tmp_path: Path) -> None:
    with pytest.raises(DistBeliefError, match="is no run directory"):
        client.ask(tmp_path, m.ScaleRequested(workers=3))
    with coordinator(tmp_path) as process:
        engine, workers = engine_and_workers(process)
        for socket in workers:
            told(socket)
        told_of = tmp_path / "coordinator.json"
        assert told_of.stat().st_mode & 0o777 == 0o600
        written = json.loads(told_of.read_text())
        assert written.pop("processes")
        assert written == {
            "address": process.answer["address"],
            "run_secret": AUTHORITY.secret.hex(),
            "coordinator_key": AUTHORITY.coordinator_key.decode(),
            "start": "",
            "pid": process.process.pid,
            "launcher": os.getpid(),
            "epoch": 1,
            "host": "",
        }
        attach(engine)
        answer = client.ask(tmp_path, m.ScaleRequested(workers=3), timeout_s=60)
        assert answer == m.Answer(epoch=1, ok=True, text="1 more worker is being started")
        assert told(engine) == m.StartWorker(epoch=1, worker=2, host="here")
        assert not client.ask(tmp_path, m.ScaleRequested(workers=0), timeout_s=60).ok
        assert client.ask_for_seat(tmp_path, os.getpid(), timeout_s=60) == 3
        process.process.send_signal(signal.SIGTERM)
        assert process.wait() == 0
        assert not told_of.exists()
        with pytest.raises(DistBeliefError, match="is not running"):
            client.ask(tmp_path, m.ScaleRequested(workers=3))
