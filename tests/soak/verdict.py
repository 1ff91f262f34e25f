"""The end of a soak: the twin, to which nothing happens, the comparison with it, and what the logs say."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from distbelief.checkpoint.reading import list_checkpoints, open_checkpoint
from distbelief.coordinator import journal, metricsfile
from tests.soak.cluster import JOB
from tests.soak.rules.judging import Strike, Trend, differing, goodput, recoveries

Record = dict[str, Any]

SUSPECT = (
    "Traceback (most recent call last)",
    "different results",
    "refused:",
    "coordinator refused",
    "Fatal Python error",
    "AssertionError",
)
"""What no log may have: every one of the soak's faults is one that the run survives."""


def steps_of(run_dir: Path) -> int:
    return len({step for step, _ in _results(run_dir, "step")})


def train_twin(folder: Path, run_dir: Path) -> Path:
    """Train the same job on one worker, quickly, to the step at which the run was stopped. Returns `folder`."""
    steps = max(list_checkpoints(run_dir / "checkpoints"))
    command = [sys.executable, "-m", "distbelief.cli.main", "train", str(JOB), "--set", f"steps={steps}",
               "--workers", "1", "--run-dir", str(folder), "--save-every", "end", "--plain"]  # fmt: skip
    subprocess.run(command, check=True, capture_output=True)
    return folder


def compare(twin: Path, run_dir: Path) -> Iterator[str]:
    """What differs between the runs: their steps, evaluations, and the whole state at the last step."""
    last = max(list_checkpoints(run_dir / "checkpoints"))
    for kind in ("step", "evaluation"):
        # Before the last checkpoint: while it was written the members trained on, and the twin evaluates at its end.
        ours, theirs = ([one for one in _results(folder, kind) if one[0] < last] for folder in (run_dir, twin))
        again = [step for step, count in Counter(step for step, _ in ours).items() if count > 1]
        if again:
            yield f"recorded more than once: {kind} {again[:5]}"
        others = differing(dict(theirs), dict(ours))
        if others:
            yield f"not the twin's: {len(others)} of {len(theirs)} {kind}s, the first is {others[0]}"
    (_, ours_held), (_, theirs_held) = (open_checkpoint(folder / "checkpoints", last) for folder in (run_dir, twin))
    if set(ours_held) != set(theirs_held):
        yield f"the state of step {last} has other tensors than the twin's: {set(ours_held) ^ set(theirs_held)}"
    for name in sorted(set(ours_held) & set(theirs_held)):
        one, other = ours_held[name], theirs_held[name]
        if one.numpy().tobytes() != other.numpy().tobytes():
            yield f"the state of step {last} is not the twin's: {name}"


def _results(run_dir: Path, kind: str) -> list[tuple[int, str]]:
    """Step -> what was computed in it; without what depends on the cluster."""
    found = []
    for record in metricsfile.records(run_dir / metricsfile.NAME):
        if record["kind"] == kind:
            outcome = {key: record[key] for key in record if key not in ("kind", "at", "generation", "duration_s")}
            found.append((int(record["step"]), json.dumps(outcome, sort_keys=True)))
    return found


def complaints(run_dir: Path, said: Path) -> Iterator[str]:
    """Lines that the logs may not have."""
    for path in [*sorted(said.iterdir()), *sorted((run_dir / "logs").glob("*"))]:
        for line in path.read_text(errors="replace").splitlines():
            found = next((word for word in SUSPECT if word in line), None)
            if found:
                yield f"{path.name}: {line[:300]}"


# --- the table --------------------------------------------------------------------------------------------------------


def table(
    strikes: Sequence[Strike], grown: Sequence[Trend], run_dir: Path, calm_step_s: float, wall_s: float
) -> Iterator[str]:
    """The report: faults, recoveries, steps and goodput, and what the processes held."""
    yield f"{'fault':26}{'times':>6}{'next step: median':>19}{'longest':>9}{'all members: median':>21}{'longest':>9}"
    for kind, times, *seconds in recoveries(strikes):
        step, step_most, whole, whole_most = (f"{one:.1f} s" for one in seconds)
        yield f"{kind:26}{times:6}{step:>19}{step_most:>9}{whole:>21}{whole_most:>9}"
    yield from _steps(run_dir, strikes, calm_step_s, wall_s)
    yield f"{'held by each process':44}{'first third':>12}{'last third':>12}"
    for one in grown:
        yield f"{one.name:44}{one.first:12,.0f}{one.last:12,.0f}{'' if one.flat else '  NOT FLAT'}"


def _steps(run_dir: Path, strikes: Sequence[Strike], calm_step_s: float, wall_s: float) -> Iterator[str]:
    records = journal.read(run_dir / "journal.jsonl")
    kinds = Counter(str(record["kind"]) for record in records)
    metrics = list(metricsfile.records(run_dir / metricsfile.NAME))
    steps = len({int(one["step"]) for one in metrics if one["kind"] == "step"})
    again = sum(one.again for one in strikes)
    yield (
        f"{len(strikes)} faults, {steps} steps, {again} executed again; {kinds['generation']} generations, "
        f"{kinds['epoch']} coordinators, {kinds['lost']} workers lost, {kinds['checkpoint']} checkpoints"
    )
    if wall_s:
        yield (
            f"goodput {goodput(steps, calm_step_s, wall_s):.0%}: steps × time per step without faults "
            f"on the same hosts ({calm_step_s * 1000:.0f} ms) / wall time ({wall_s:.0f} s)"
        )
