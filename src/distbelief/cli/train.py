"""`distbelief train JOB`: check what can be checked at once, run the job, show the result.

The checks here need no torch and start no process; everything that needs the job's values is checked by a worker.
"""

from __future__ import annotations

import contextlib
import difflib
import json as jsonlib
import math
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from distbelief.cli.detach import Detach, check_detachable, go_on_detached
from distbelief.cli.engines import On, placed
from distbelief.cli.failures import MACHINE_OUTPUT, UsageError
from distbelief.cli.keys import KeyFile, key_file
from distbelief.cli.options import AsJson, JobFile, Listen, Plain, Settings, with_run_options
from distbelief.cli.profile import Profile, ProfileSteps, asked_steps, print_profile
from distbelief.cli.summary import print_json, print_summary
from distbelief.errors import JobError
from distbelief.launch.engines import LOCAL
from distbelief.launch.launchers.rules.place import LauncherRequest
from distbelief.observe.view import open_view
from distbelief.options import RunOptions, declared_options
from distbelief.worker.jobfile import compile_job

HERE = "127.0.0.1"
MOST_SETTINGS = 30_000  # they travel with each request for a worker


@with_run_options(
    *("strategy", "threads", "device", "min_workers", "balance", "stuck_after_s", "impure", "recheck"),
    *("save_every", "checkpoints", "keep_last", "keep_every", "keep_best", "begin_from"),
)
def train(
    ctx: typer.Context,
    job: JobFile,
    workers: Annotated[
        int | None,
        typer.Option(min=1, help="Worker processes. Default: chosen for this machine.", show_default=False),
    ] = None,
    settings: Settings = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The run directory. Default: runs/NAME-ID.", show_default=False),
    ] = None,
    *,
    options: dict[str, Any],
    shares: Annotated[
        str, typer.Option(metavar="2,1,1", help=declared_options()["shares"].option.help, show_default=False)
    ] = "",
    listen: Listen = HERE,
    on: On = LOCAL,
    key: KeyFile = None,
    profile: Profile = False,
    profile_steps: ProfileSteps = "",
    detach: Detach = False,
    json: AsJson = False,
    plain: Plain = False,
) -> None:
    """Train a job on the workers of this machine, or of the machines that a launcher has allocated (--on)."""
    ctx.meta[MACHINE_OUTPUT] = json
    from distbelief.control.addresses import endpoint

    if detach:
        check_detachable(on)
    key_path = key_file(key)
    where = endpoint(listen)
    asked = LauncherRequest(on, job.stem, workers, run_dir, "" if listen == HERE else where, key_path)
    with placed(asked) as engine:
        check_job_file(job)
        values = parse_settings(settings or [])
        if engine:
            workers, run_dir = engine.workers, engine.run_dir
        parts = parse_shares(shares, workers)

        from distbelief.api import count_of_workers, run_dir_named, run_file  # after the checks, which need none of it
        from distbelief.launch.launch import Placement

        chosen = RunOptions(
            workers=count_of_workers(workers or len(parts) or None, options["strategy"]),
            shares=tuple(parts),
            profile=asked_steps(profile, profile_steps),
            **options,
        )
        placement = Placement(on, where, key_path)
        if detach:
            run_dir = run_dir_named(run_dir, job.stem)
            go_on_detached(ctx, run_dir, resumed=False, json=json)
        stream = sys.stderr if json else sys.stdout
        view = open_view(stream, plain=plain)
        # With --json, only the object goes to stdout, even if the job prints. The view is closed inside the block: a
        # live view replaces stdout by its own proxy and restores it.
        with contextlib.redirect_stdout(stream), contextlib.closing(view):
            result = run_file(job, values, chosen, run_dir, view, engine=engine, placement=placement)
        if json:
            print_json(result)
        else:
            print_summary(result, stream, plain=plain)
        if result.profile:
            print_profile(result.profile["trace"], stream)


def check_job_file(path: Path) -> None:
    """Raises a JobError if the file is missing, not Python, or has a syntax error."""
    if path.is_dir():
        found = " or ".join(str(path / name) for name in _python_files(path)[:5])
        raise JobError(f"{path} is a folder, not a job file", hint=f"try {found}" if found else "")
    if not path.exists():
        raise JobError(f"no such job file: {path}", hint=_suggestion(path))
    if path.suffix != ".py":
        raise JobError(f"{path} is not a Python file", hint="a job file's name ends in .py")
    compile_job(path)


def parse_settings(texts: Iterable[str]) -> dict[str, str]:
    """The mapping of `name=value` texts; the last value of a name wins.

    >>> parse_settings(["lr=3e-4", "name=a=b"])
    {'lr': '3e-4', 'name': 'a=b'}
    """
    settings = {}
    for text in texts:
        name, equals, value = text.partition("=")
        name = name.strip()
        if not equals or not name.isidentifier():
            raise UsageError(f"--set {text!r} is not of the form name=value", hint="for example --set lr=3e-4")
        settings[name] = value.strip()
    if len(jsonlib.dumps(settings)) > MOST_SETTINGS:
        raise UsageError(
            f"the --set values are longer than {MOST_SETTINGS:,} characters together",
            hint="have the job read long texts from a file, and set its path",
        )
    return settings


def parse_shares(text: str, workers: int | None) -> list[float]:
    """
    >>> parse_shares("2,1,1", None), parse_shares("", 4)
    ([2.0, 1.0, 1.0], [])
    """
    if not text:
        return []
    try:
        shares = [float(part) for part in text.split(",")]
    except ValueError:
        shares = []
    if not shares or not all(math.isfinite(share) and share > 0 for share in shares):
        raise UsageError(
            f"--shares {text!r} is not a list of numbers above 0",
            hint="one number per worker, for example --shares 2,1,1",
        )
    if workers is not None and len(shares) != workers:
        raise UsageError(
            f"--shares {text} gives {len(shares)} shares for {workers} workers",
            hint="give one number per worker",
        )
    return shares


def _python_files(folder: Path) -> list[str]:
    try:
        return sorted(entry.name for entry in folder.iterdir() if entry.suffix == ".py")
    except OSError:  # without the right to list the folder there are no suggestions
        return []


def _suggestion(path: Path) -> str:
    if not path.parent.is_dir():
        return f"check the path: there is no folder {path.parent}"
    names = _python_files(path.parent)
    near = difflib.get_close_matches(path.name if path.suffix else f"{path.name}.py", names)
    if near:
        return f"try {' or '.join(str(path.parent / name) for name in near)}"
    return f"check the path, or write a starter job with `distbelief new {path}`"
