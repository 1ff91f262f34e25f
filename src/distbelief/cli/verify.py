"""`distbelief verify JOB`: train a job two ways and compare the weights.

Users run it on their own job before they trust a strategy with it. The checks here start no process.
"""

from __future__ import annotations

import contextlib
import json as json_text
import sys
from pathlib import Path
from typing import Annotated

import typer

from distbelief.cli.failures import MACHINE_OUTPUT
from distbelief.cli.train import check_job_file, parse_settings

STEPS = 50
STEPS_INEXACT = 10
_STEPS_HELP = (
    f"Stop both runs after at most K steps. Default: {STEPS}; {STEPS_INEXACT} for strategies that do not promise the "
    "same bits, because training amplifies small differences."
)
_TOLERANCE_HELP = (
    "The largest difference between equal weights, relative to the largest number of the tensor. Default: 1e-4; 2e-2 "
    "with bf16 or fp16."
)


def verify(
    ctx: typer.Context,
    job: Annotated[Path, typer.Argument(help="The job file: Python that defines `job`.", show_default=False)],
    strategy: Annotated[
        str, typer.Option(help="The strategy to be verified, as for `train`: allreduce, pipeline:2, dp2.tp2, …")
    ] = "allreduce",
    against: Annotated[
        str, typer.Option(help="Another strategy, or plain: one process with an ordinary PyTorch loop.")
    ] = "plain",
    steps: Annotated[int | None, typer.Option(min=1, metavar="K", help=_STEPS_HELP, show_default=False)] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1, help="Worker processes of a strategy. Default: 2, or as many as it needs.", show_default=False
        ),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Set a hyper-parameter of the job. May be repeated."),
    ] = None,
    tolerance: Annotated[float | None, typer.Option(min=0, help=_TOLERANCE_HELP, show_default=False)] = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Keep both runs here. Default: delete them.", show_default=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the verdict as one JSON object on stdout.")] = False,
) -> None:
    """Train a job two ways and compare the weights: identical, equal within a tolerance, or different.

    The exit status is 0 for identical and equal, 1 for different.
    """
    ctx.meta[MACHINE_OUTPUT] = json
    check_job_file(job)
    values = parse_settings(settings or [])

    from distbelief.strategies import parse  # after the checks, which need none of it

    exact = [parse(name).exact for name in (strategy, *([against] if against != "plain" else []))]
    steps = steps or (STEPS if all(exact) else STEPS_INEXACT)
    workers = workers or parse(strategy).usual_workers(2)

    from distbelief.verification.report import as_json, print_report
    from distbelief.verification.trial import Plan
    from distbelief.verification.trial import verify as run_both

    plan = Plan(job, values, strategy, against, workers, steps, tolerance, run_dir)
    stream = sys.stderr if json else sys.stdout
    # With --json, only the object goes to stdout, even if the job prints.
    with contextlib.redirect_stdout(stream):
        found = run_both(plan, stream)
        print_report(plan, found, stream)
    if json:
        typer.echo(json_text.dumps(as_json(plan, found), allow_nan=False))
    if found.verdict == "different":
        raise typer.Exit(1)
