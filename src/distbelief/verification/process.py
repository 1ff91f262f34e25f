"""Runs the plain loop in a separate process, which writes the files of a run: metrics.jsonl and weights.safetensors.

`run_plain` is the caller's side. The process starts like a worker: one thread, none of the caller's code, the same
module path and hash seed. So the job's code behaves as in a worker.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from distbelief.errors import DistBeliefError, JobError, RunFailed
from distbelief.launch.processes import WORKER_ENVIRONMENT
from distbelief.lifeline import die_with_parent

THREADS = 1


class Order(msgspec.Struct, frozen=True):
    """The request to the process."""

    job_file: str
    settings: dict[str, str]
    most_steps: int
    folder: str
    sys_path: list[str]
    parent: int
    nudged: bool = False
    """Start from weights that are one rounding away from the job's."""
    strategy: str = ""
    """The strategy to verify: if it does not learn step by step, the plain loop follows it."""


class Failure(msgspec.Struct, frozen=True):
    """The answer of a failing process."""

    message: str
    hint: str
    details: str
    of_job: bool


def run_plain(
    job_file: Path, settings: Mapping[str, str], most_steps: int, folder: Path, nudged: bool = False, strategy: str = ""
) -> None:
    """Train the job of a file with the plain loop, in `folder`. The process's output goes to `plain.log` there."""
    folder.mkdir(parents=True)
    order = Order(
        str(job_file.resolve()), dict(settings), most_steps, str(folder), sys.path, os.getpid(), nudged, strategy
    )
    with (folder / "plain.log").open("wb") as log:
        done = subprocess.run(
            [sys.executable, "-P", "-m", "distbelief.verification.process"],
            input=msgspec.json.encode(order),
            env={"PYTHONHASHSEED": "0", **os.environ, **WORKER_ENVIRONMENT},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # the caller handles the terminal's signals
            check=False,
        )
    if done.returncode:
        raise _failure(folder, done.returncode)


def _failure(folder: Path, status: int) -> DistBeliefError:
    try:
        failure = msgspec.json.decode((folder / "failure.json").read_bytes(), type=Failure)
    except FileNotFoundError:
        how = f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"
        return RunFailed(f"the plain process {how}", hint=f"see {folder}/plain.log")
    kind = JobError if failure.of_job else RunFailed
    return kind(f"the plain process: {failure.message}", hint=failure.hint, details=failure.details)


def main() -> int:
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    die_with_parent(order.parent)
    try:
        _train(order)
    except DistBeliefError as error:
        failure = Failure(error.message, error.hint, error.details, isinstance(error, JobError))
    except Exception as error:
        failure = Failure(f"{type(error).__name__}: {error}", "", traceback.format_exc(), False)
    else:
        return 0
    (Path(order.folder) / "failure.json").write_bytes(msgspec.json.encode(failure))
    return 1


def _train(order: Order) -> None:
    import torch

    from distbelief.checkpoint.weights import save_weights
    from distbelief.data.sources import seed_everything
    from distbelief.strategies import parse
    from distbelief.verification.plain import make_model, nudge, train_plainly
    from distbelief.verification.plainlbfgs import train_by_search
    from distbelief.verification.plainlocal import train_locally
    from distbelief.worker.jobfile import load_job

    torch.set_num_threads(THREADS)
    sys.path[:] = order.sys_path
    seed_everything(0)  # a job file that makes random data makes the same data as on workers
    job = load_job(Path(order.job_file), order.settings)
    model = make_model(job)
    if order.nudged:
        nudge(model)
    how = parse(order.strategy) if order.strategy else None
    loops: dict[str, Callable[..., Iterator[float]]] = {"rounds": train_locally, "search": train_by_search}
    if how is None or how.plain_loop == "batches":
        losses = train_plainly(job, model, order.most_steps)
    else:
        losses = loops[how.plain_loop](job, model, how, order.most_steps)
    with (Path(order.folder) / "metrics.jsonl").open("w") as metrics:
        for step, loss in enumerate(losses):
            print(json.dumps({"kind": "step", "step": step, "loss": loss}), file=metrics, flush=True)
    save_weights(model, Path(order.folder) / "weights.safetensors")


if __name__ == "__main__":
    sys.exit(main())
