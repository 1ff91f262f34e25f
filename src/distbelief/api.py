"""The Python front: `train` a Job from a script or a notebook, or a job file as the command line does."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from distbelief.errors import DistBeliefError, JobError
from distbelief.options import DEFAULT_STRATEGY, STUCK_AFTER_S, RunOptions, absolute, profile_text
from distbelief.result import Result, result_of

if TYPE_CHECKING:
    from distbelief.job import Job
    from distbelief.launch.engines import Engine
    from distbelief.launch.launch import Launch, Placement
    from distbelief.launch.lead import Announce
    from distbelief.observe.view import View
    from distbelief.strategies.base import Strategy
    from distbelief.worker.spec import WorkerSpec

DEFAULT_WORKERS_LIMIT = 8  # workers, if the user gives no number; a job has at most this many shards by default


def train(
    job: Job,
    *,
    workers: int | None = None,
    strategy: str | Strategy = DEFAULT_STRATEGY,
    run_dir: str | Path | None = None,
    threads: int = 1,
    device: str = "cpu",
    shares: Sequence[float] = (),
    min_workers: int = 1,
    balance: bool = True,
    stuck_after_s: float = STUCK_AFTER_S,
    save_every: str | int = "10m",
    checkpoints: str | Path = "",
    keep_last: int = 3,
    keep_every: int = 0,
    keep_best: str = "",
    begin_from: str | Path = "",
    impure: bool = False,
    recheck: str | int = "auto",
    on: str = "local",
    profile: bool | str | tuple[int, int] = False,
    quiet: bool = False,
) -> Result:
    """Train a job on this machine and return the result. No `if __name__ == "__main__"` is needed around it.

    DistBelief replaces a worker that dies, and the run continues; with fewer than `min_workers` workers alive the run
    waits. `balance` moves shards to faster workers; the result does not depend on it. If all other workers have waited
    `stuck_after_s` seconds for a worker that sends heartbeats, it is replaced; a frozen worker is replaced sooner.

    Workers save a checkpoint every 500 steps (`save_every=500`) or every ten minutes (`"10m"`), and at the end, to
    `checkpoints`, a folder or URL; by default to the run directory. The run keeps the newest `keep_last` checkpoints,
    every checkpoint whose step is a multiple of `keep_every`, and the best one by a metric (`keep_best="accuracy"`).
    `recheck`: how often another worker computes a shard again ("all", "never", or a number of steps).
    `begin_from`: weights to start with, of a run, a checkpoint or a safetensors file. `impure`: train although the
    purity check finds that the result will depend on the cluster (docs/purity.md). `on`: where to run, as in
    `distbelief train --on` ("ray"). `profile`: record where the time of some steps goes: True for ten steps after the
    first ten, or "10:20"; the result has the summary and the path of the trace. `RunOptions` declares every option.

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
    from distbelief.launch import engines
    from distbelief.launch.launch import Launch, Placement
    from distbelief.launch.rundir import begun
    from distbelief.worker.spec import JobSource

    if not isinstance(job, JobType):
        hint = "call the function and pass what it returns" if callable(job) else "a job file is for `distbelief train`"
        raise JobError(f"train() takes a Job, not a {type(job).__name__}", hint=hint)
    options = RunOptions(
        workers=count_of_workers(workers, strategy),
        strategy=str(_parsed(strategy)),
        shares=tuple(float(share) for share in shares),
        threads=threads,
        device=device,
        min_workers=min_workers,
        balance=balance,
        stuck_after_s=stuck_after_s,
        save_every=str(save_every),
        checkpoints=os.fspath(checkpoints),
        keep_last=keep_last,
        keep_every=keep_every,
        keep_best=keep_best,
        begin_from=os.fspath(begin_from),
        impure=impure,
        profile=profile_text(profile),
        recheck=str(recheck),
    )
    source = JobSource(sys_path=tuple(sys.path), pickled=_pickled(job))
    engines.check(on)
    launch = Launch(run_dir_named(run_dir, job.name or "job"), options, source, Placement(on=on))
    with _view(quiet) as view, begun(launch.run_dir):
        return _run(launch, view)


def resume(
    run: str | Path,
    job: Job | None = None,
    *,
    run_dir: str | Path | None = None,
    workers: int | None = None,
    strategy: str | Strategy | None = None,
    on: str = "local",
    quiet: bool = False,
) -> Result:
    """Continue a run that was stopped, or that died, from its newest sound checkpoint.

    With any number of workers the weights at the end are those of a run that was never interrupted. `job` is needed
    where the run was started by `train` with a Job: the same one again. A run that is complete is left alone.

    `run` is the run directory; or, where that is lost, the folder or URL of the run's checkpoints. The run then gets a
    new run directory, `run_dir`.
    """
    from distbelief.launch import engines

    engines.check(on)
    with _view(quiet) as view:
        there = run_to_resume(run, run_dir)
        return resume_run(there, workers=workers, strategy=strategy, view=view, job=job, on=on)


def run_file(
    path: Path,
    settings: dict[str, str],
    options: RunOptions,
    run_dir: Path | None,
    view: View,
    *,
    engine: Engine | None = None,
    placement: Placement | None = None,
    adjust: Callable[[WorkerSpec], WorkerSpec] | None = None,
) -> Result:
    """Train the job of a job file, as `distbelief train` does. `engine`: brings other hosts' agents; None: no launcher
    has started this process. `placement`: this machine by default. `adjust`: see `Launch`."""
    from dataclasses import replace

    from distbelief.launch.launch import Launch, Placement
    from distbelief.launch.rundir import begun
    from distbelief.worker.spec import JobSource

    options = msgspec.structs.replace(options, strategy=str(_parsed(options.strategy)))
    source = JobSource(str(path.resolve()), settings, tuple(sys.path))
    launch = Launch(run_dir_named(run_dir, path.stem), options, source, placement or Placement())
    if adjust:
        launch = replace(launch, adjust=adjust)
    if engine:
        launch = engine.arrange(launch)
    with begun(launch.run_dir):
        return _run(launch, view, engine.announce if engine else None)


def run_to_resume(run: str | Path, run_dir: str | Path | None) -> Path:
    """The run directory of the run to resume. `run`: a run directory, or the checkpoints of a run without one, which
    gets the directory `run_dir`."""
    from distbelief.launch.adoption import adopt, names_checkpoints, require_run_dir

    where = os.fspath(run)
    if not names_checkpoints(where):
        require_run_dir(Path(run), wants_new=run_dir is not None)
        return Path(run)
    made = run_dir_named(run_dir, where.rstrip("/").rpartition("/")[2] or "run")
    adopt(absolute(where), made)
    return made


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

    from distbelief.launch.launch import Placement, read_launch
    from distbelief.launch.rundir import ended, is_complete, led, mend_journal
    from distbelief.strategies import learn_alike, parse

    read_launch(run_dir)  # before a file is written there: is it a run directory?
    with contextlib.nullcontext() if is_complete(run_dir) else led(run_dir):
        launch = read_launch(run_dir)
        if notice := mend_journal(run_dir, launch.checkpoint_folder if launch.options.saves else ""):
            view.log("journal", notice)
        record = ended(run_dir) if (run_dir / "journal.jsonl").exists() else None
        if record and record["status"] == "completed":
            return result_of(record, run_dir, time.monotonic())
        if launch.job.file and job is not None:
            raise JobError(
                f"the job of {run_dir} is in {launch.job.file}", hint="leave `job` out: the job is read from that file"
            )
        if not launch.job.file and job is None:
            raise JobError(
                f"the job of {run_dir} came from a Python program, and is not in the run directory",
                hint="resume it from that program: distbelief.resume(run_dir, job)",
            )
        before = launch.options
        how = parse(strategy or before.strategy) if isinstance(strategy, str | None) else strategy
        if not learn_alike(how, launch.strategy):
            raise JobError(
                f"a run of {before.strategy} cannot go on as {how}: each strategy has state that the other lacks",
                hint="begin another run with its weights: distbelief train JOB --from RUN",
            )
        count = before.workers if workers is None else workers
        launch = replace(launch.placed(key_file=key_file or launch.placement.key_file), resumed=True).with_options(
            workers=count,
            min_workers=min(before.min_workers, max(count, 1)),
            shares=before.shares if count == before.workers else (),
            strategy=str(how),
            profile="",
        )
        if engine or launch.placement.on != on:  # the launcher of the first start decided the placement
            launch = replace(launch, placement=Placement(on=on, key_file=key_file))
        if listen:
            launch = launch.placed(listen=listen)
        if engine:
            launch = engine.arrange(launch)
        if job is not None:
            launch = replace(launch, job=msgspec.structs.replace(launch.job, pickled=_pickled(job)))
        return _run(launch, view, engine.announce if engine else None)


def count_of_workers(workers: int | None, strategy: str | Strategy) -> int:
    """The user's number of workers, or a default for this machine and the strategy."""
    if workers is not None:
        return workers
    return _parsed(strategy).usual_workers(min(DEFAULT_WORKERS_LIMIT, os.cpu_count() or 1))


def _parsed(strategy: str | Strategy) -> Strategy:
    from distbelief.strategies import parse

    return parse(strategy) if isinstance(strategy, str) else strategy


def run_dir_named(wanted: str | Path | None, name: str) -> Path:
    """The user's run directory, or a new name."""
    stamp = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    return Path(wanted) if wanted else Path("runs") / f"{name}-{stamp}"


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


def _run(launch: Launch, view: View, announce: Announce | None = None) -> Result:
    """The caller leads the run (`begun`, `led`)."""
    from dataclasses import replace

    from distbelief.launch.adoption import give_up_folder, keep_beside_checkpoints
    from distbelief.launch.launch import keep_launch

    started = time.monotonic()
    options = launch.options
    if options.saves:
        _check_folder(launch.checkpoint_folder, launch.resumed)
    if options.begin_from and not launch.resumed:
        launch = launch.with_options(begin_from=_pinned(launch, view))
    launch = replace(launch, run_id=launch.run_id or _run_id(launch.run_dir))
    keep_launch(launch)
    keep_beside_checkpoints(launch)
    try:
        return _to_the_end(launch, view, announce, started)
    finally:
        give_up_folder(launch)


def _run_id(run_dir: Path) -> str:
    """A new one; or that of a launch in the same directory that was ended before the run began."""
    from distbelief.launch.launch import read_launch

    with contextlib.suppress(DistBeliefError):
        if known := read_launch(run_dir).run_id:
            return known
    return secrets.token_hex(8)


def _to_the_end(launch: Launch, view: View, announce: Announce | None, started: float) -> Result:
    from dataclasses import replace

    from distbelief.control.messages import PROFILE_FOLDER
    from distbelief.launch import engines

    if not launch.options.profile:
        return result_of(engines.run(launch, view, announce), launch.run_dir, started)
    (launch.run_dir / PROFILE_FOLDER).mkdir(exist_ok=True)
    found: dict[str, Any] = {}
    try:
        record = engines.run(launch, view, announce)
    finally:  # also after a failure or a stop
        found = _profile(launch.run_dir, view)
    return replace(result_of(record, launch.run_dir, started), profile=found)


def _profile(run_dir: Path, view: View) -> dict[str, Any]:
    """The profile's summary. If the profile cannot be read, the view shows the error; the run has succeeded anyway."""
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
    """Copy the start weights into the run directory: workers start at different times, and the original may change."""
    from distbelief.checkpoint.sources import read_source
    from distbelief.checkpoint.weights import save_tensors

    source = read_source(launch.options.begin_from)
    for fault in source.skipped:
        view.log("--from", f"skipped: {fault}")
    path = launch.run_dir.resolve() / "begin.safetensors"
    save_tensors(source.tensors, path)
    return str(path)


def _check_folder(folder: str, resumed: bool) -> None:
    """Raise if checkpoints cannot be saved there, before hours of training."""
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
