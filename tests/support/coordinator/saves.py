"""Words about checkpoints for the tests of this folder: what members say of them, and what they are told."""

from __future__ import annotations

from dataclasses import replace

from distbelief.control import messages as m
from distbelief.coordinator.rules import state as s
from tests.support.coordinator.play import JOB, Run, finished, report, sends

LAST = JOB.steps


def saving_run(*workers: int, save_every: str = "end", **config: object) -> Run:
    """These train, and checkpoints are wanted."""
    return Run(workers=len(workers), save_every=save_every, **config).started(*workers)


def part(worker: int, step: int, generation: int = 1, write_s: float = 0.5) -> m.PartSaved:
    written = m.WrittenPart(size_bytes=100 + worker, sha256=f"{step}/{generation}/{worker}")
    return m.PartSaved(worker, generation, step, written, pause_s=0.01 * (1 + worker), write_s=write_s)


def sealed(worker: int, step: int) -> m.CheckpointSealed:
    return m.CheckpointSealed(worker, step)


def failed(worker: int, step: int, message: str = "the disk is full", gave_up: bool = False) -> m.SaveFailed:
    return m.SaveFailed(worker, step, message, "free some space", gave_up)


def seals(outputs: list[s.Output]) -> list[tuple[int, int, int]]:
    """(who was asked, step, number of parts)"""
    return [
        (to, command.step, len(command.parts))
        for to, command in sends(outputs)
        if isinstance(command, m.SealCheckpoint)
    ]


def asked(outputs: list[s.Output]) -> dict[int, int]:
    """Who was told to save at which step."""
    return {to: command.step for to, command in sends(outputs) if isinstance(command, m.SaveAt)}


def tick(run: Run, now: float) -> list[s.Output]:
    return run.feed(s.Ticked(), now=now)


def at_step(run: Run, step: int, now: float = 1.0, step_s: float = 0.1) -> Run:
    """All members have so many steps behind them, each of which took so long."""
    began = now - step_s * step
    run.state = replace(run.state, pulse=run.state.pulse.restart(run.members, began))
    reports = [report(number, at=now - step_s * (step - number)) for number in range(step)]
    for rank, worker in enumerate(run.members):
        run.beat(worker, step=step, now=now, reports=[] if rank else reports)
    return run


def all_finish(run: Run, *workers: int, now: float = 1.0) -> list[s.Output]:
    generation = run.state.generation
    ends = [m.WorkerFinished(w, generation, LAST, "abc") if w else finished(0, generation) for w in workers]
    return run.feed(*ends, now=now)
