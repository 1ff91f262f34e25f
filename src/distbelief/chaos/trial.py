"""Runs a job twice, without and with faults, and collects the records that `rules/verdict.py` judges.

Some strategies promise the weights of an undisturbed run within rounding, not bit for bit. For these the trial also
compares the weights of both runs as `distbelief verify` does: by a tolerance, and beyond it by the difference that
rounding alone makes for this job in the same number of steps.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import msgspec
from safetensors.torch import load_file

from distbelief.api import run_file
from distbelief.chaos.falseclock import FalseClock
from distbelief.chaos.inject import Injector
from distbelief.chaos.relay import Relay
from distbelief.chaos.rules.schedule import Fault
from distbelief.chaos.rules.verdict import Closeness, Evidence, Note, Record
from distbelief.chaos.terminal import Terminals
from distbelief.control.messages import ScaleRequested
from distbelief.coordinator import client, journal, metricsfile
from distbelief.errors import DistBeliefError, RunInterrupted
from distbelief.launch import rundir
from distbelief.observe.plain import PlainView
from distbelief.options import RunOptions
from distbelief.result import Result, result_of
from distbelief.verification.compare import Comparison, Trained, allow_for_noise, compare, default_tolerance
from distbelief.verification.process import run_plain
from distbelief.worker.spec import WorkerSpec

ASK_S = 1.0
_LOST_TERMINAL = 128 + signal.SIGHUP
"""The exit status of a run that has saved and stopped because its terminal is gone."""


@dataclass(frozen=True)
class Plan:
    """The settings that both runs share."""

    job: Path
    settings: Mapping[str, str]
    workers: int
    strategy: str
    run_dir: Path
    """Both runs are stored in folders below it."""


@dataclass(frozen=True)
class FaultyRun:
    """A run with faults: its results, the injected faults, and the sentences that were not carried out."""

    evidence: Evidence
    notes: tuple[Note, ...]
    missed: tuple[str, ...]


def run_twin(plan: Plan, stream: TextIO) -> Evidence:
    """Run the job without faults."""
    result = _run(plan, plan.run_dir / "twin", stream, None)
    return _evidence(result, journal.read(Path(result.run_dir) / "journal.jsonl"))


def readers_of(twin: Evidence) -> int:
    """The reader processes of a worker that train; 0: the data is in memory."""
    return int(json.loads((Path(twin.run_dir) / "job.json").read_text())["readers"])


def run_under_faults(plan: Plan, name: str, faults: Sequence[Fault], seed: int, stream: TextIO) -> FaultyRun:
    """Run the job in the folder `name`, and inject the faults during the run."""
    run_dir = plan.run_dir / name
    with contextlib.ExitStack() as stack:
        # The relay is used only if a schedule cuts a connection: otherwise messages need no detour.
        cuts = any(fault.kind == "cut worker" for fault in faults)
        relay = stack.enter_context(Relay()) if cuts else None
        clock = stack.enter_context(FalseClock()) if any(fault.kind == "set clock" for fault in faults) else None
        if clock:
            stack.enter_context(clock.in_children())
        terminals = stack.enter_context(Terminals(stream)) if _drops(faults) else None
        injector = Injector(
            run_dir,
            faults,
            workers=plan.workers,
            seed=seed,
            relay=relay,
            clock=clock,
            terminals=terminals,
            ask=lambda workers: _ask(run_dir, workers),
            say=_sayer(stream),
        )
        try:
            with injector:
                if terminals is None:
                    result = _run(plan, run_dir, stream, relay)
                else:
                    result = _run_in_terminals(plan, run_dir, terminals)
        except RunInterrupted:
            raise
        except DistBeliefError as error:
            raise _under_faults(error, injector.notes) from error
    return FaultyRun(_evidence(result, injector.journal), tuple(injector.notes), tuple(injector.missed))


def _run(plan: Plan, run_dir: Path, stream: TextIO, relay: Relay | None) -> Result:
    def through_relay(spec: WorkerSpec) -> WorkerSpec:
        assert relay is not None
        return msgspec.structs.replace(spec, address=relay.dial(spec.worker, spec.address))

    options = RunOptions(plan.workers, plan.strategy)
    with contextlib.closing(PlainView(stream)) as view:
        adjust = through_relay if relay else None
        return run_file(plan.job, dict(plan.settings), options, run_dir, view, adjust=adjust)


def _drops(faults: Sequence[Fault]) -> bool:
    return any(fault.kind == "drop terminal" for fault in faults)


def _run_in_terminals(plan: Plan, run_dir: Path, terminals: Terminals) -> Result:
    """Run the job as a user does, by commands in terminals: when a terminal is gone, the run is resumed in another."""
    settings = [word for name, value in plan.settings.items() for word in ("--set", f"{name}={value}")]
    how = ["--workers", str(plan.workers), "--strategy", plan.strategy, "--run-dir", str(run_dir)]
    words = ["train", str(plan.job), *settings, *how]
    while True:
        status, dropped = terminals.run([sys.executable, "-m", "distbelief.cli.main", *words, "--plain"])
        ended = rundir.ended(run_dir)
        if ended and ended["status"] == "completed":
            return result_of(ended, run_dir, time.monotonic())
        if not dropped or status != _LOST_TERMINAL or not ended or ended["status"] != "stopped":
            how_it_ended = f"exit status {status}; {ended['reason'] if ended else 'its journal has no end'}"
            when = "after it had lost its terminal" if dropped else "by itself"
            raise DistBeliefError(f"the run ended {when}, not as it should: {how_it_ended}")
        words = ["resume", str(run_dir)]


def _ask(run_dir: Path, workers: int) -> str:
    # A short time-out: the request may have gone to a dead coordinator, and is then repeated to the next one.
    answer = client.ask(run_dir, ScaleRequested(workers=workers), timeout_s=ASK_S)
    return "" if answer.ok else answer.text


def _evidence(result: Result, records: Sequence[Record]) -> Evidence:
    metrics = metricsfile.records(Path(result.run_dir) / metricsfile.NAME)
    return Evidence(result.run_dir, result.steps, result.weights_sha256, tuple(metrics), tuple(records))


def _under_faults(error: DistBeliefError, notes: Sequence[Note]) -> DistBeliefError:
    """The same failure, extended by the list of injected faults."""
    done = [f"{note.text}{'' if note.worker is None else f' → worker {note.worker}'}" for note in notes]
    error.message = f"the run under faults did not complete: {error.message}"
    error.details = "\n".join(["faults carried out before:", *(done or ["none"]), "", error.details]).rstrip()
    return error


def _sayer(stream: TextIO) -> Callable[[str], None]:
    def say(line: str) -> None:
        stream.write(line + "\n")  # one write: the view prints from another thread
        stream.flush()

    return say


# --- comparing weights, for strategies that promise them within rounding ------------------------------------------


def how_close(plan: Plan, twin: Evidence, faulty: Evidence, stream: TextIO) -> Closeness:
    one, other = _trained(twin.run_dir, twin.metrics), _trained(faulty.run_dir, faulty.metrics)
    precision = json.loads((Path(twin.run_dir) / "job.json").read_text())["precision"]
    found = compare(one, other, default_tolerance(one.weights, precision))
    if found.verdict == "different":
        found = allow_for_noise(found, *_with_and_without_a_nudge(plan, twin.steps, stream))
    return closeness(found)


def closeness(found: Comparison) -> Closeness:
    worst = max((one.relative for one in found.differences), default=0.0)
    return Closeness(found.verdict != "different", worst, found.noisy)


def _with_and_without_a_nudge(plan: Plan, steps: int, stream: TextIO) -> tuple[Trained, Trained]:
    """Train the job in one plain process, once from its weights and once from weights changed by one rounding; shared
    by all schedules."""
    folders = plan.run_dir / "plain", plan.run_dir / "nudged"
    for folder in folders:
        if not (folder / "weights.safetensors").exists():
            print(f"the effect of rounding alone ({folder.name}):", file=stream, flush=True)
            run_plain(plan.job, plan.settings, steps, folder, nudged=folder.name == "nudged")
    plain, nudged = map(_trained, folders)
    return plain, nudged


def _trained(run_dir: str | Path, metrics: Sequence[Record] = ()) -> Trained:
    losses = {int(record["step"]): record["loss"] for record in metrics if record.get("kind") == "step"}
    return Trained(load_file(Path(run_dir) / "weights.safetensors"), losses)
