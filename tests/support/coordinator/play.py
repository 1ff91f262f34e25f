"""A coordinator's state machine to play events to, for the tests next to this file."""

from __future__ import annotations

import msgspec

from distbelief.control import messages as m
from distbelief.coordinator.rules import state as s

JOB = m.JobFacts(name="digits", shards=4, steps=10, global_batch=32, samples=1000, parameters=100, strategy="allreduce")
CANARY = m.Canary(fingerprint="c3d4", facts={"threads": "1"})


class Run:
    """A state and everything it ever put out."""

    def __init__(self, workers: int = 2, **config: object) -> None:
        self.state = s.begin(s.RunConfig(workers=workers, **{"save_every": "never", **config}), epoch=7, now=0.0)
        self.outputs: list[s.Output] = []

    def feed(self, *events: s.Input, now: float = 1.0) -> list[s.Output]:
        new: list[s.Output] = []
        for event in events:
            self.state, outputs = s.step(self.state, event, now)
            new += outputs
        self.outputs += new
        return new

    def join(self, *workers: int, host: str = "here", now: float = 1.0) -> list[s.Output]:
        return self.feed(*(m.WorkerJoined(worker=w, host=host, pid=100 + w) for w in workers), now=now)

    def ready(
        self, *workers: int, job: m.JobFacts = JOB, canary: m.Canary = CANARY, now: float = 1.0
    ) -> list[s.Output]:
        return self.feed(*(m.WorkerReady(worker=w, job=job, canary=canary) for w in workers), now=now)

    def arrive(self, *workers: int, now: float = 1.0) -> list[s.Output]:
        """Join and be ready."""
        return self.join(*workers, now=now) + self.ready(*workers, now=now)

    def kill(self, *workers: int, now: float = 1.0) -> list[s.Output]:
        """The engine sees them die of SIGKILL."""
        return self.feed(*(m.WorkerExited(worker=w, status=-9) for w in workers), now=now)

    def beat(self, *workers: int, step: int = 1, now: float = 1.0, **more: object) -> list[s.Output]:
        """Heartbeats of the present generation and epoch."""
        state = self.state
        beats = (heartbeat(w, step, state.epoch, state.generation, **more) for w in workers)
        return self.feed(*beats, now=now)

    @property
    def members(self) -> list[int]:
        return [member.worker for member in self.state.members]

    @property
    def journal(self) -> list[dict]:
        return records(self.outputs)

    def restarted(self, entries: list[dict] | None = None, now: float = 1.0) -> Run:
        """The run as another coordinator finds it, whose journal has these entries (by default: all)."""
        other = Run.__new__(Run)
        kept = self.journal if entries is None else entries
        other.state = s.resume(self.state.config, self.state.epoch + 1, now, kept, self.state.progress.reported)
        other.outputs = [s.Record(entry) for entry in kept]
        return other

    def started(self, *workers: int) -> Run:
        self.join(*workers)
        self.ready(*workers)
        assert self.state.phase == "training"
        return self


def sends(outputs: list[s.Output]) -> list[tuple[int, m.Command]]:
    return [(o.worker, o.command) for o in outputs if isinstance(o, s.Send)]


def replies(outputs: list[s.Output]) -> list[m.Command]:
    return [o.command for o in outputs if isinstance(o, s.Reply)]


def starts(outputs: list[s.Output]) -> dict[int, m.StartGeneration]:
    """Who was told to start which generation."""
    return {worker: command for worker, command in sends(outputs) if isinstance(command, m.StartGeneration)}


def hired(outputs: list[s.Output]) -> list[int]:
    """The workers that an engine was asked to start."""
    return [command.worker for to, command in sends(outputs) if isinstance(command, m.StartWorker) and to == s.ENGINE]


def texts(outputs: list[s.Output]) -> str:
    """All notices."""
    return "\n".join(line["text"] for line in lines(outputs, "notice"))


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


def heartbeat(worker: int = 0, step: int = 1, epoch: int = 7, generation: int = 1, **more: object) -> m.Heartbeat:
    timing = m.Timing(0.1, 0.2, 0.3, 4)
    return m.Heartbeat(worker=worker, epoch=epoch, generation=generation, step=step, timing=timing, **more)


def report(step: int, fingerprint: str = "aa", at: float = 3.0, generation: int = 1) -> m.StepReport:
    return m.StepReport(step=step, loss=0.5, samples=32, fingerprint=fingerprint, at=at, generation=generation)


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
