"""The Python front: `train` a Job from a script or a notebook, or a job file as the command line does."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from distbelief.coordinator.rules.detector import STUCK_S
from distbelief.errors import DistBeliefError, JobError
from distbelief.launch.rules.profileplan import as_text, profile_plan
from distbelief.launch.rules.saveplan import DEFAULT_EVERY, KEEP_LAST
from distbelief.result import Result, result_of

if TYPE_CHECKING:
    from distbelief.job import Job
    from distbelief.launch.engine import Engine
    from distbelief.launch.launch import Launch
    from distbelief.launch.lead import Announce
    from distbelief.observe.view import View
    from distbelief.strategies.base import Strategy

MOST_BY_DEFAULT = 8  # workers, when the user names no number: the most shards that a job has by default


def train(
    job: Job,
    *,
    workers: int | None = None,
    strategy: str | Strategy = "allreduce",
    run_dir: str | Path | None = None,
    threads: int = 1,
    device: str = "cpu",
    shares: Sequence[float] = (),
    min_workers: int = 1,
    balance: bool = True,
    stuck_after_s: float = STUCK_S,
    save_every: str | int = DEFAULT_EVERY,
    checkpoints: str | Path = "",
    keep_last: int = KEEP_LAST,
    keep_every: int = 0,
    keep_best: str = "",
    begin_from: str | Path = "",
    on: str = "local",
    profile: bool | str | tuple[int, int] = False,
    quiet: bool = False,
) -> Result:
    """Train a job on this machine and return the result. No `if __name__ == "__main__"` is needed around it.

    A worker that dies is replaced and the run goes on; with fewer than `min_workers` it waits for them. `balance` moves
    shards to faster workers; the result does not depend on it. A worker that lives but that all others have waited for
    `stuck_after_s` is replaced; everything else is judged by the step times that are measured.

    Checkpoints are saved every so many steps (500) or so often ("10m"), and at the end; to `checkpoints`, a folder or
    URL, or else to the run directory. The newest `keep_last` are kept, those whose step is a multiple of `keep_every`,
    and the best one by a metric (`keep_best="accuracy"`). `begin_from`: weights to start with, of a run, a checkpoint
    or a safetensors file. `on`: where to run, as in `distbelief train --on` ("ray"). `profile`: record where the
    time of some steps goes, the usual ones (True) or "10:20"; the result says it, and where the trace is.

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
    from distbelief.job import Job as JobType
    from distbelief.launch import chosen

    if not isinstance(job, JobType):
        hint = "call the function and pass what it returns" if callable(job) else "a job file is for `distbelief train`"
        raise JobError(f"train() takes a Job, not a {type(job).__name__}", hint=hint)
    launch = _launch(
        job.name or "job", strategy, workers, run_dir, shares,
        threads=threads, device=device, min_workers=min_workers, balance=balance, stuck_after_s=stuck_after_s,
        save_every=str(save_every), checkpoints=os.fspath(checkpoints), keep_last=keep_last, keep_every=keep_every,
        keep_best=keep_best, begin_from=os.fspath(begin_from), on=on, profile=as_text(profile),
    )  # fmt: skip
    pickled = _pickled(job)
    chosen.check(on)
    with _view(quiet) as view:
        return _run(launch, view, job_pickle=pickled)


def resume(
    run_dir: str | Path,
    job: Job | None = None,
    *,
    workers: int | None = None,
    strategy: str | Strategy | None = None,
    on: str = "local",
    quiet: bool = False,
) -> Result:
    """Go on with a run that was stopped, or that died, from its newest sound checkpoint.

    With any number of workers the weights at the end are those of a run that was never interrupted. `job` is needed
    where the run was started by `train` with a Job: the same one again. A run that is complete is left alone.
    """
    from distbelief.launch import chosen

    chosen.check(on)
    with _view(quiet) as view:
        return resume_run(Path(run_dir), workers=workers, strategy=strategy, view=view, job=job, on=on)


def run_file(
    path: Path,
    settings: dict[str, str],
    *,
    workers: int | None,
    strategy: str,
    run_dir: Path | None,
    shares: Sequence[float],
    view: View,
    engine: Engine | None = None,
    **options: Any,
) -> Result:
    """Train the job of a job file, as `distbelief train` does. `options`: further fields of the engine's Launch.
    `engine`: what brings other hosts' agents; None: they come by themselves, or this machine is all."""
    launch = _launch(path.stem, strategy, workers, run_dir, shares, **options)
    if engine:
        launch = engine.arrange(launch)
    announce = engine.announce if engine else None
    return _run(launch, view, announce, job_file=str(path.resolve()), settings=settings)


def resume_run(
    run_dir: Path,
    *,
    workers: int | None,
    strategy: str | Strategy | None,
    view: View,
    job: Job | None = None,
    key_file: str = "",
    engine: Engine | None = None,
    on: str = "local",
    listen: str = "",
) -> Result:
    """Resume the run in that directory, as `distbelief resume` does."""
    from dataclasses import replace

    from distbelief.launch.launch import anywhere, read_launch
    from distbelief.launch.rundir import ended
    from distbelief.strategies import learn_alike, parse

    launch = read_launch(run_dir)
    record = ended(run_dir) if (run_dir / "journal.jsonl").exists() else None
    if record and record["status"] == "completed":
        return result_of(record, run_dir, time.monotonic())
    if launch.job_file and job is not None:
        raise JobError(f"the job of {run_dir} is in {launch.job_file}", hint="leave `job` out: it is read from there")
    if not launch.job_file and job is None:
        raise JobError(
            f"the job of {run_dir} came from a Python program, which did not leave it there",
            hint="resume it from that program: distbelief.resume(run_dir, job)",
        )
    how = parse(strategy or launch.strategy) if isinstance(strategy, str | None) else strategy
    if not learn_alike(how, parse(launch.strategy)):
        raise JobError(
            f"a run of {launch.strategy} cannot go on as {how}: each has state that the other one does not know",
            hint="begin another run with its weights: distbelief train JOB --from RUN",
        )
    count = launch.workers if workers is None else workers
    _check_workers(count, launch.min_workers if workers is None else 1)
    launch = replace(
        launch,
        workers=count,
        min_workers=min(launch.min_workers, count),
        shares=launch.shares if count == launch.workers else (),
        strategy=str(how),
        exact=how.exact,
        transport=how.transport,
        key_file=key_file or launch.key_file,
        profile="",
        resumed=True,
    )
    if engine or launch.on != on:
        launch = replace(anywhere(launch), on=on, key_file=key_file)
    if listen:
        launch = replace(launch, listen=listen)
    if engine:
        launch = engine.arrange(launch)
    source: dict[str, Any] = {"job_pickle": _pickled(job)} if job is not None else {}
    return _run(launch, view, engine.announce if engine else None, **source)


def _pickled(job: Job) -> bytes:
    import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(job)
    except Exception as error:
        raise JobError(
            f"the job cannot be sent to the workers: {error}",
            hint="make open files, locks and connections inside the model or data set, not in the job itself",
        ) from error
    return pickled


def _check_workers(count: int, least: int) -> None:
    if count < 1:
        raise DistBeliefError(f"the number of workers must be at least 1, not {count}")
    if not 1 <= least <= count:
        raise DistBeliefError(f"the least number of workers must be from 1 to {count}, not {least}")


def _launch(
    name: str,
    strategy: str | Strategy,
    workers: int | None,
    run_dir: str | Path | None,
    shares: Sequence[float],
    **options: Any,
) -> Launch:
    from distbelief.launch.launch import Launch
    from distbelief.strategies import parse

    how = parse(strategy) if isinstance(strategy, str) else strategy
    count = workers
    if count is None:
        count = how.usual_workers(min(MOST_BY_DEFAULT, os.cpu_count() or 1))
    _check_workers(count, options.get("min_workers", 1))
    threads = options.get("threads", 1)
    if threads < 1:
        raise DistBeliefError(f"the number of threads must be at least 1, not {threads}")
    if options.get("keep_last", 1) < 1:
        raise DistBeliefError(f"keep_last must be at least 1, not {options['keep_last']}")
    if options.get("keep_every", 0) < 0:
        raise DistBeliefError(f"keep_every must be at least 0, not {options['keep_every']}")
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


def _run(launch: Launch, view: View, announce: Announce | None = None, **source: Any) -> Result:
    from dataclasses import replace

    from distbelief.control.messages import PROFILE_FOLDER
    from distbelief.launch import chosen
    from distbelief.launch.launch import keep_launch
    from distbelief.launch.rundir import make_run_dir

    started = time.monotonic()
    launch = replace(launch, **source)
    plan = launch.save_plan  # what is wrong with it is said before a directory is made
    profiled = profile_plan(launch.profile) is not None
    if not launch.resumed:
        make_run_dir(launch.run_dir)
    if plan:
        _check_folder(plan.folder, launch.resumed)
    if launch.begin_from and not launch.resumed:
        launch = replace(launch, begin_from=_pinned(launch, view))
    keep_launch(launch)
    if not profiled:
        return result_of(chosen.run(launch, view, announce), launch.run_dir, started)
    (launch.run_dir / PROFILE_FOLDER).mkdir(exist_ok=True)
    found: dict[str, Any] = {}
    try:
        record = chosen.run(launch, view, announce)
    finally:  # also of a run that failed, or was stopped
        found = _profile(launch.run_dir, view)
    return replace(result_of(record, launch.run_dir, started), profile=found)


def _profile(run_dir: Path, view: View) -> dict[str, Any]:
    """Where the time went. Whatever is wrong with it is said, and is nobody's failure."""
    from distbelief.observe.profiling.collecting import read_summary
    from distbelief.observe.profiling.rules.shown import as_data

    try:
        summary, trace = read_summary(run_dir)
    except Exception as error:
        why = error.message if isinstance(error, DistBeliefError) else f"{type(error).__name__}: {error}"
        view.log("profile", f"there is none: {why}")
        return {"trace": "", "notes": [why]}
    return as_data(summary, str(trace))


def _pinned(launch: Launch, view: View) -> str:
    """A copy of the weights to begin with: workers start at different times, and the original may change."""
    from distbelief.checkpoint.sources import read_source
    from distbelief.checkpoint.weights import save_tensors

    source = read_source(launch.begin_from)
    for fault in source.skipped:
        view.log("--from", f"skipped: {fault}")
    path = launch.run_dir.resolve() / "begin.safetensors"
    save_tensors(source.tensors, path)
    return str(path)


def _check_folder(folder: str, resumed: bool) -> None:
    """Whether checkpoints can go there: better now than after hours of training."""
    from distbelief.checkpoint.manifest import step_of
    from distbelief.checkpoint.storage import check_writable, entries, folder_at

    held = [name for name in entries(folder_at(folder)) if step_of(name) is not None]
    if held and not resumed:
        raise DistBeliefError(
            f"{folder} holds checkpoints of another run already, such as {max(held)}",
            hint="give each run a folder of its own, resume that run, or begin with its weights (--from)",
        )
    check_writable(folder)


@contextlib.contextmanager
def _view(quiet: bool) -> Iterator[View]:
    from distbelief.observe.view import open_view

    with open(os.devnull, "w") if quiet else contextlib.nullcontext(sys.stdout) as stream:
        view = open_view(stream)
        try:
            yield view
        finally:
            view.close()
