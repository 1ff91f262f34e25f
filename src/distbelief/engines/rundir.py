"""The run directory as an engine needs it: made empty before the run, read for the verdict after it."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

from distbelief.coordinator.journal import read as read_journal
from distbelief.engines.signals import Signals
from distbelief.errors import DistBeliefError, JobError, RunFailed, RunInterrupted


def make_run_dir(run_dir: Path) -> None:
    """Make an empty run directory, or say why that cannot be."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if any(run_dir.iterdir()):
            raise DistBeliefError(f"the run directory '{run_dir}' is not empty", hint="give another --run-dir")
        (run_dir / "logs").mkdir()
    except OSError as error:
        raise DistBeliefError(
            f"cannot write to the run directory '{run_dir}': {error.strerror or error}",
            hint="give a --run-dir on a disk that you can write to",
        ) from error


def verdict(run_dir: Path, signals: Signals) -> dict[str, Any]:
    record = next((r for r in reversed(read_journal(run_dir / "journal.jsonl")) if r.get("kind") == "ended"), None)
    if signals.received and (record is None or record["status"] == "stopped"):
        name = signal.Signals(signals.received).name
        error = RunInterrupted(f"stopped by {name}; nothing is left running", hint=f"the run directory is {run_dir}")
        error.exit_code = 128 + signals.received
        raise error
    if record is None:
        raise RunFailed("the coordinator ended without a word", hint=f"see {run_dir}/logs/coordinator.log")
    if record["status"] == "completed":
        return record
    raise _explain(record.get("failure", {}), record.get("reason", "the run failed"), run_dir)


def _explain(failure: dict[str, Any], reason: str, run_dir: Path) -> DistBeliefError:
    """The failure as the user reads it: which worker, where, and when, unless that says nothing."""
    message = failure.get("message", reason)
    hint = failure.get("hint", "").replace("logs/", f"{run_dir}/logs/")
    details = failure.get("traceback", "")
    if failure.get("kind") == "job" and failure["step"] < 0:  # while loading: the same on every worker
        return JobError(message, hint=hint, details=details)
    if failure.get("kind") in ("job", "user", "data", "internal", "memory") and failure["worker"] >= 0:
        message = f"worker {failure['worker']} on {failure['host']}: {message}"
        if failure["step"] >= 0:
            message += f" (step {failure['step']}, shard {failure['shard']})"
    return RunFailed(message, hint=hint, details=details)
