"""A coordinator's state machine to play events to, for the tests next to this file."""

from __future__ import annotations

import msgspec

from distbelief.comm import messages as m
from distbelief.coordinator import state as s

JOB = m.JobFacts(name="digits", shards=4, steps=10, global_batch=32, samples=1000, parameters=100, strategy="allreduce")
CANARY = m.Canary(fingerprint="c3d4", facts={"threads": "1"})


class Run:
    """A state and everything it ever put out."""

    def __init__(self, workers: int = 2, generation: int = 0, **config: object) -> None:
        self.state = s.begin(s.RunConfig(workers=workers, **config), epoch=7, now=0.0, generation=generation)
        self.outputs: list[s.Output] = []

    def feed(self, *events: s.Input, now: float = 1.0) -> list[s.Output]:
        new: list[s.Output] = []
        for event in events:
            self.state, outputs = s.step(self.state, event, now)
            new += outputs
        self.outputs += new
        return new

    def join(self, *workers: int, host: str = "here") -> list[s.Output]:
        return self.feed(*(m.WorkerJoined(worker=w, host=host, pid=100 + w) for w in workers))

    def ready(self, *workers: int, job: m.JobFacts = JOB, canary: m.Canary = CANARY) -> list[s.Output]:
        return self.feed(*(m.WorkerReady(worker=w, job=job, canary=canary) for w in workers))

    def started(self, *workers: int) -> Run:
        self.join(*workers)
        self.ready(*workers)
        assert self.state.phase == "training"
        return self


def sends(outputs: list[s.Output]) -> list[tuple[int, m.Command]]:
    return [(o.worker, o.command) for o in outputs if isinstance(o, s.Send)]


def records(outputs: list[s.Output], kind: str = "") -> list[dict]:
    return [o.entry for o in outputs if isinstance(o, s.Record) and kind in ("", o.entry["kind"])]


def lines(outputs: list[s.Output], kind: str = "") -> list[dict]:
    return [o.line for o in outputs if isinstance(o, s.Report) and kind in ("", o.line["kind"])]


def ended(outputs: list[s.Output]) -> dict:
    """The end's record, after checking its shape: recorded, then told, then Exit as the very last."""
    (entry,) = records(outputs, "ended")
    place = next(i for i, o in enumerate(outputs) if isinstance(o, s.Record) and o.entry is entry)
    told = sends(outputs[place:])
    assert told[-1][0] == s.ENGINE
    assert {msgspec.to_builtins(command)["status"] for _, command in told} == {entry["status"]}
    assert not any(isinstance(command, m.EndRun) for _, command in sends(outputs[:place]))
    assert outputs[-1] == s.Exit(entry["status"])
    return entry


def heartbeat(worker: int = 0, step: int = 1, epoch: int = 7, generation: int = 1, **lists: list) -> m.Heartbeat:
    return m.Heartbeat(
        worker=worker, epoch=epoch, generation=generation, step=step, timing=m.Timing(0.1, 0.2, 0.3, 4), **lists
    )


def report(step: int, fingerprint: str = "aa") -> m.StepReport:
    return m.StepReport(step=step, loss=0.5, samples=32, fingerprint=fingerprint, at=3.0)


def failure(worker: int, message: str = "boom") -> m.WorkerFailed:
    return m.WorkerFailed(
        worker=worker, host="here", kind="user", message=message, hint="h", traceback="tb", step=3, shard=1
    )


def finished(worker: int, generation: int = 1) -> m.WorkerFinished:
    if worker:
        return m.WorkerFinished(worker=worker, generation=generation, step=10)
    return m.WorkerFinished(
        worker=0,
        generation=generation,
        step=10,
        weights_sha256="abc",
        loss=0.25,
        metrics={"accuracy": 0.98},
        samples_per_s=1e4,
    )
