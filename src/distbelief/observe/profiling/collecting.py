"""Merges a run's profiles into its trace, and reads a trace's summary. Errors of profiling never fail a run."""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any

from distbelief.atomicfile import replace_file
from distbelief.control.messages import PROFILE_FOLDER
from distbelief.coordinator.metricsfile import NAME, records
from distbelief.errors import DistBeliefError
from distbelief.observe.profiling.parts import OPERATORS, SPANS, read_parts
from distbelief.observe.profiling.rules.merging import Trace, merge
from distbelief.observe.profiling.rules.summary import Summary, summarise
from distbelief.strategies import parse

TRACE = "workers.pt.trace.json.gz"
"""The extension makes TensorBoard find the file, too."""


def trace_of(run_dir: Path) -> Path:
    return run_dir / PROFILE_FOLDER / TRACE


def collect(run_dir: Path) -> Path | None:
    """Merge the workers' files into the trace and delete them. Returns the trace; None if no worker has recorded
    anything."""
    folder, path = run_dir / PROFILE_FOLDER, trace_of(run_dir)
    parts = read_parts(folder)
    if not parts:
        return path if path.exists() else None
    missing = _seen(run_dir) - {part.worker for part in parts}
    notes = [f"worker {one} sent no profile: it was not a member then, or it died" for one in sorted(missing)]
    trace = merge(parts, together=parse(parts[0].strategy).balances, notes=notes)
    replace_file(path, gzip.compress(json.dumps(trace).encode(), compresslevel=5))
    for part in parts:
        for kind in (SPANS, OPERATORS):
            (folder / f"{part.name}{kind}").unlink(missing_ok=True)
    return path


def _seen(run_dir: Path) -> set[int]:
    """All workers that have trained in the run."""
    lines = (record for record in records(run_dir / NAME) if record.get("kind") == "workers")
    return {int(one["worker"]) for record in lines for one in record["workers"]}


def read_summary(where: Path) -> tuple[Summary, Path]:
    """The summary of a run directory or a trace file, and the trace file. Any fault of the file is raised as one
    error."""
    if not where.exists():
        raise DistBeliefError(f"there is no {where}", hint="give the run directory that `train` printed")
    path = where
    try:
        if where.is_dir():
            found = collect(where)
            if found is None:
                raise DistBeliefError(f"{where} has no profile", hint="take one with `distbelief train JOB --profile`")
            path = found
        return summarise(_read(path)), path
    except (OSError, EOFError, ValueError, KeyError, TypeError, AttributeError, zlib.error) as error:
        what = error.strerror if isinstance(error, OSError) and error.strerror else f"{type(error).__name__}: {error}"
        raise DistBeliefError(
            f"{path} cannot be read as a profile: {what}",
            hint="give a run directory, or its profile/workers.pt.trace.json.gz",
        ) from error


def _read(path: Path) -> Trace:
    with gzip.open(path, "rb") as file:
        trace: Any = json.loads(file.read())
    if not isinstance(trace, dict) or trace.get("otherData", {}).get("program") != "distbelief":
        raise ValueError("it is not a DistBelief trace")
    return trace
