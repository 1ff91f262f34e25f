"""How far the weights of a run under faults are from its twin's, where a strategy promises them within rounding.

Judged as `verify` judges: by a tolerance, and beyond it by what rounding alone does to this job in as many steps.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from safetensors.torch import load_file

from distbelief.chaos.rules.verdict import Closeness, Evidence, Record
from distbelief.chaos.trial import Plan
from distbelief.verification.compare import Comparison, Trained, allow_for_noise, compare, default_tolerance
from distbelief.verification.process import run_plain


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
    """The job in one plain process, and the same from weights that are a rounding away; once for all schedules."""
    folders = plan.run_dir / "plain", plan.run_dir / "nudged"
    for folder in folders:
        if not (folder / "weights.safetensors").exists():
            print(f"what rounding alone does ({folder.name}):", file=stream, flush=True)
            run_plain(plan.job, plan.settings, steps, folder, nudged=folder.name == "nudged")
    plain, nudged = map(_trained, folders)
    return plain, nudged


def _trained(run_dir: str | Path, metrics: Sequence[Record] = ()) -> Trained:
    losses = {int(record["step"]): record["loss"] for record in metrics if record.get("kind") == "step"}
    return Trained(load_file(Path(run_dir) / "weights.safetensors"), losses)
