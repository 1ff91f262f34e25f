"""Texts for people: why a worker is refused, how a process ended, which workers did not become ready."""

from __future__ import annotations

import signal
from collections.abc import Iterable

from distbelief.control.messages import STATUS_NOT_STARTED, STATUS_UNKNOWN, Canary, JobFacts

# Fact -> (the new worker, the run, what to do). Facts without an entry get a plain sentence.
_FACTS: dict[str, tuple[str, str, str]] = {
    "threads": ("computes with {} threads", "the run with {}", "start it with --threads {}"),
    "torch": ("has torch {}", "the run torch {}", "install torch {} there"),
    "python": ("runs Python {}", "the run Python {}", "use Python {} there"),
    "instruction_set": ("computes with {} instructions", "the run with {}", "use a machine that has {} too"),
    "device": ("computes on {}", "the run on {}", "start it on {}"),
    "optimizer": ("uses the {} optimizer", "the run the {} one", "start it with the {} optimizer"),
    "plug-in": ("has the plug-in {}", "the run {}", "pip install {} there"),
    "tables": ("has its tables {}", "the run has them {}", "go on with a strategy that has tables {}"),
}
_JOB_FACTS: dict[str, tuple[str, str]] = {
    "name": ("trains the job {!r}", "the run {!r}"),
    "shards": ("cuts a step into {} shards", "the run into {}"),
    "steps": ("would train {} steps", "the run {}"),
    "global_batch": ("takes {} samples per step", "the run {}"),
    "samples": ("sees {} samples of data", "the run {}"),
    "parameters": ("has a model of {} parameters", "the run's has {}"),
    "strategy": ("uses the strategy {}", "the run {}"),
}

_SIGNAL_NOTES = {
    signal.SIGKILL: " (out of memory?)",
    signal.SIGSEGV: " (a crash in native code)",
    signal.SIGBUS: " (shared memory or disk full?)",
    signal.SIGILL: " (an instruction that this processor does not have)",
}


def refusal(worker: int, job: JobFacts, canary: Canary, run_job: JobFacts, run_canary: Canary, exact: bool) -> str:
    """Why this worker may not take part in the run; "" if it may."""
    return _job_refusal(worker, job, run_job) or (_canary_refusal(worker, canary, run_canary) if exact else "")


def _job_refusal(worker: int, job: JobFacts, run: JobFacts) -> str:
    differences = [
        f"{theirs.format(getattr(job, name))}, {ours.format(getattr(run, name))}"
        for name, (theirs, ours) in _JOB_FACTS.items()
        if getattr(job, name) != getattr(run, name)
    ]
    if not differences:
        return ""
    return (
        f"worker {worker} {'; it '.join(differences)}: it does not train the same job; "
        "start it with the same job file, data and --set values as the others"
    )


def _canary_refusal(worker: int, canary: Canary, run: Canary) -> str:
    names = [
        name for name in sorted(canary.facts.keys() | run.facts.keys()) if canary.facts.get(name) != run.facts.get(name)
    ]
    data, run_data = canary.facts.get("data"), run.facts.get("data")
    names = [name for name in names if name != "data"]
    if names:
        told = [fact(name, canary.facts.get(name, "unknown"), run.facts.get(name, "unknown")) for name in names]
        return (
            f"worker {worker} {'; it '.join(difference for difference, _ in told)}: "
            f"its results would differ in the last bits; {' and '.join(fix for _, fix in told)}, or use exact=False"
        )
    if None not in (data, run_data) and data != run_data:  # runs of earlier versions have no checksum
        return (
            f"worker {worker} has other data than the run (checksum {data}, the run's is {run_data}): the job's data "
            "is not the same each time it is made (random numbers without a seed, the clock, files that differ between "
            "hosts); make it the same on every worker, or set exact=False"
        )
    if canary.fingerprint != run.fingerprint:
        return (
            f"worker {worker} computed other bits for the same shard (fingerprint {_short(canary.fingerprint)}, "
            f"the run's is {_short(run.fingerprint)}): either the job's data or model is not the same each time it is "
            "made (random numbers without a seed, the clock, files that differ), or its machine computes otherwise; "
            "make the job deterministic, use machines of one kind, or set exact=False"
        )
    return ""


def fact(name: str, theirs: str, ours: str) -> tuple[str, str]:
    """(how a new worker differs in this fact, what to do about it)."""
    known = _FACTS.get(name)
    if known is None:
        words = name.replace("_", " ")
        return f"has {words} {theirs}, the run {ours}", f"make {words} the same there"
    does, run, fix = known
    difference = f"{does.format(theirs)}, {run.format(ours)}"
    return difference.replace(" 1 threads", " 1 thread"), fix.format(ours)


def _short(fingerprint: str) -> str:
    return fingerprint if len(fingerprint) <= 12 else f"{fingerprint[:12]}…"


def ending(status: int, reason: str = "") -> str:
    """How a process ended, from its status as in subprocess. `reason`: why it was not started.

    >>> ending(-9), ending(3)
    ('was killed by SIGKILL (out of memory?)', 'exited with status 3')
    """
    if status == STATUS_UNKNOWN:
        return "has died"
    if status == STATUS_NOT_STARTED:
        return f"could not be started{': ' if reason else ''}{reason}"
    if status >= 0:
        return f"exited with status {status}"
    try:
        number = signal.Signals(-status)
    except ValueError:
        return f"was killed by signal {-status}"
    return f"was killed by {number.name}{_SIGNAL_NOTES.get(number, '')}"


def who(worker: int, host: str, pid: int) -> str:
    """A worker's number, host and pid, as far as they are known."""
    return f"worker {worker} (host {host}, pid {pid})" if pid else f"worker {worker}"


def not_ready(waited_s: float, expected: int, loading: Iterable[str], absent: Iterable[int]) -> str:
    """Why the start took too long, with the workers that were missing."""
    parts = [f"{name} has joined but not finished loading the job" for name in loading]
    parts += [f"worker {number} never joined" for number in absent]
    return f"waited {waited_s:.0f} s for {expected} workers to be ready: {'; '.join(parts)}"


def spares(workers: int, what_for: str, numbers: list[int]) -> str:
    """
    >>> spares(5, "4 shards", [4])
    '5 workers for 4 shards: worker 4 is a spare'
    """
    if len(numbers) == 1:
        who_are = f"worker {numbers[0]} is a spare"
    else:
        who_are = f"workers {', '.join(map(str, numbers))} are spares"
    return f"{workers} workers for {what_for}: {who_are}"
