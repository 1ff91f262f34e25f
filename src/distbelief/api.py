"""The Python front: `train` a Job from a script or a notebook, or a job file as the command line does."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distbelief.coordinator.detector import STUCK_S
from distbelief.errors import DistBeliefError, JobError

if TYPE_CHECKING:
    from distbelief.engines.launch import Launch
    from distbelief.job import Job
    from distbelief.observe.view import View
    from distbelief.strategies.allreduce import AllReduce

MOST_BY_DEFAULT = 8  # workers, when the user names no number: the most shards that a job has by default


@dataclass(frozen=True)
class Result:
    """How a run ended. `weights_sha256` is the same for any number of workers (in exact strategies)."""

    run_dir: str
    steps: int
    loss: float
    metrics: dict[str, float]
    weights_sha256: str
    samples_per_s: float
    wall_s: float
    workers: int
    recoveries: int

    def state_dict(self) -> dict[str, Any]:
        """The trained weights, for `model.load_state_dict`."""
        from safetensors.torch import load_file

        return load_file(Path(self.run_dir) / "weights.safetensors")


def train(
    job: Job,
    *,
    workers: int | None = None,
    strategy: str | AllReduce = "allreduce",
    run_dir: str | Path | None = None,
    threads: int = 1,
    device: str = "cpu",
    shares: Sequence[float] = (),
    min_workers: int = 1,
    balance: bool = True,
    stuck_after_s: float = STUCK_S,
    quiet: bool = False,
) -> Result:
    """Train a job on this machine and return the result. No `if __name__ == "__main__"` is needed around it.

    A worker that dies is replaced and the run goes on; with fewer than `min_workers` it waits for them. `balance` moves
    shards to faster workers; the result does not depend on it. A worker that lives but that all others have waited for
    `stuck_after_s` is replaced; everything else is judged by the step times that are measured.

    >>> import torch, tempfile
    >>> from distbelief import Job, train
    >>> x = torch.randn(64, 4)
    >>> job = Job(
    ...     model=lambda: torch.nn.Linear(4, 1),
    ...     loss=torch.nn.functional.mse_loss,
    ...     optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    ...     data=(x, x.sum(1, keepdim=True)),
    ...     global_batch=16,
    ...     steps=20,
    ... )
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     result = train(job, workers=2, run_dir=folder, quiet=True)
    >>> result.steps, result.loss < 1.0
    (20, True)
    """
    import cloudpickle

    from distbelief.job import Job as JobType

    if not isinstance(job, JobType):
        hint = "call the function and pass what it returns" if callable(job) else "a job file is for `distbelief train`"
        raise JobError(f"train() takes a Job, not a {type(job).__name__}", hint=hint)
    launch = _launch(
        job.name or "job", strategy, workers, run_dir, shares,
        threads=threads, device=device, min_workers=min_workers, balance=balance, stuck_after_s=stuck_after_s,
    )  # fmt: skip
    try:
        pickled = cloudpickle.dumps(job)
    except Exception as error:
        raise JobError(
            f"the job cannot be sent to the workers: {error}",
            hint="make open files, locks and connections inside the model or data set, not in the job itself",
        ) from error
    with _view(quiet) as view:
        return _run(launch, view, job_pickle=pickled)


def run_file(
    path: Path,
    settings: dict[str, str],
    *,
    workers: int | None,
    strategy: str,
    run_dir: Path | None,
    shares: Sequence[float],
    view: View,
    **options: Any,
) -> Result:
    """Train the job of a job file, as `distbelief train` does. `options`: further fields of the engine's Launch."""
    launch = _launch(path.stem, strategy, workers, run_dir, shares, **options)
    return _run(launch, view, job_file=str(path.resolve()), settings=settings)


def _launch(
    name: str,
    strategy: str | AllReduce,
    workers: int | None,
    run_dir: str | Path | None,
    shares: Sequence[float],
    **options: Any,
) -> Launch:
    from distbelief.engines.launch import Launch
    from distbelief.strategies import parse

    how = parse(strategy) if isinstance(strategy, str) else strategy
    count = workers if workers is not None else min(MOST_BY_DEFAULT, os.cpu_count() or 1)
    if count < 1:
        raise DistBeliefError(f"the number of workers must be at least 1, not {count}")
    threads, least = options.get("threads", 1), options.get("min_workers", 1)
    if threads < 1:
        raise DistBeliefError(f"the number of threads must be at least 1, not {threads}")
    if not 1 <= least <= count:
        raise DistBeliefError(f"the least number of workers must be from 1 to {count}, not {least}")
    if shares and len(shares) != count:
        raise DistBeliefError(f"{len(shares)} shares for {count} workers: give one number per worker")
    if any(not share > 0 for share in shares):
        raise DistBeliefError(f"every share must be above 0, not {list(shares)}")
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    return Launch(
        run_dir=Path(run_dir) if run_dir else Path("runs") / f"{name}-{stamp}",
        workers=count,
        strategy=str(how),
        exact=how.exact,
        transport=how.transport,
        shares=tuple(float(share) for share in shares),
        sys_path=tuple(sys.path),
        **options,
    )


def _run(launch: Launch, view: View, **source: Any) -> Result:
    from dataclasses import replace

    from distbelief.engines import local
    from distbelief.engines.rundir import make_run_dir

    started = time.monotonic()
    make_run_dir(launch.run_dir)
    record = local.run(replace(launch, **source), view)
    result = record["result"]
    return Result(
        run_dir=str(launch.run_dir),
        steps=result["steps"],
        loss=result["loss"],
        metrics=result["metrics"],
        weights_sha256=result["weights_sha256"],
        samples_per_s=result["samples_per_s"],
        wall_s=time.monotonic() - started,
        workers=result["workers"],
        recoveries=result["recoveries"],
    )


@contextlib.contextmanager
def _view(quiet: bool) -> Iterator[View]:
    from distbelief.observe.view import open_view

    with open(os.devnull, "w") if quiet else contextlib.nullcontext(sys.stdout) as stream:
        view = open_view(stream)
        try:
            yield view
        finally:
            view.close()
