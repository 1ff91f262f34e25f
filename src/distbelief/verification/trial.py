"""Trains a job in two ways, one after the other, and compares the results."""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from safetensors.torch import load_file

from distbelief.api import run_file
from distbelief.coordinator.metricsfile import NAME, records
from distbelief.errors import RunFailed
from distbelief.observe.plain import PlainView
from distbelief.options import RunOptions
from distbelief.strategies import parse
from distbelief.verification.compare import (
    Comparison,
    Trained,
    allow_for_noise,
    compare,
    default_tolerance,
    with_tables_alike,
)
from distbelief.verification.process import run_plain

PLAIN = "plain"


@dataclass(frozen=True)
class Plan:
    job: Path
    settings: Mapping[str, str]
    strategy: str
    against: str
    """The other strategy, or `PLAIN`."""
    workers: int
    most_steps: int
    tolerance: float | None
    """None: the value of `default_tolerance`."""
    run_dir: Path | None
    """Both runs are stored in folders below it; None: in a temporary folder, which is kept only if a run fails."""


def verify(plan: Plan, stream: TextIO) -> Comparison:
    """Run both and compare them. Progress is printed to `stream`."""
    with _folder(plan.run_dir, stream) as folder:
        _train(plan, plan.strategy, folder / "strategy", stream)
        _train(plan, plan.against, folder / "against", stream)
        one, other = with_tables_alike(_read(folder / "strategy"), _read(folder / "against"))
        precision = json.loads((folder / "strategy" / "job.json").read_text())["precision"]
        tolerance = default_tolerance(one.weights, precision) if plan.tolerance is None else plan.tolerance
        found = compare(one, other, tolerance)
        if found.verdict != "different" or plan.tolerance is not None or _promises_bits(plan):
            return found
        return allow_for_noise(found, *_with_and_without_a_nudge(plan, folder, stream))


def _promises_bits(plan: Plan) -> bool:
    return all(how == PLAIN or parse(how).exact for how in (plan.strategy, plan.against))


def _with_and_without_a_nudge(plan: Plan, folder: Path, stream: TextIO) -> tuple[Trained, Trained]:
    """Measure the effect of rounding: run the plain loop, and again from weights that are one rounding away."""
    plain = folder / ("against" if plan.against == PLAIN else "plain")
    if plan.against != PLAIN:
        _train(plan, PLAIN, plain, stream)
    print("plain, from initial weights changed by one rounding:", file=stream, flush=True)
    run_plain(plan.job, plan.settings, plan.most_steps, folder / "nudged", nudged=True)
    return _read(plain), _read(folder / "nudged")


def _train(plan: Plan, how: str, run_dir: Path, stream: TextIO) -> None:
    print(f"{how}:", file=stream, flush=True)
    if how == PLAIN:
        run_plain(plan.job, plan.settings, plan.most_steps, run_dir, strategy=plan.strategy)
        return
    with contextlib.closing(PlainView(stream)) as view:
        options = RunOptions(plan.workers, how, most_steps=plan.most_steps, save_every="never")
        run_file(plan.job, dict(plan.settings), options, run_dir, view)


def _read(run_dir: Path) -> Trained:
    losses = {record["step"]: record["loss"] for record in records(run_dir / NAME) if record.get("kind") == "step"}
    return Trained(load_file(run_dir / "weights.safetensors"), losses)


@contextlib.contextmanager
def _folder(wanted: Path | None, stream: TextIO) -> Iterator[Path]:
    if wanted is not None:
        yield wanted
        return
    folder = Path(tempfile.mkdtemp(prefix="distbelief-verify-"))
    try:
        yield folder
    except RunFailed:
        print(f"both runs, complete or not, are kept in {folder}", file=stream, flush=True)
        raise
    except BaseException:
        shutil.rmtree(folder)
        raise
    shutil.rmtree(folder)
