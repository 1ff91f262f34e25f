"""`distbelief profile RUN`: shows how a run spent its time; and the options --profile and --profile-steps."""

from __future__ import annotations

import json as json_text
import sys
from pathlib import Path
from typing import Annotated, TextIO

import typer

from distbelief.cli.failures import MACHINE_OUTPUT
from distbelief.cli.options import AsJson
from distbelief.options import USUAL_STEPS, profile_plan

Profile = Annotated[
    bool,
    typer.Option("--profile", help="Record where the time of some steps goes: a trace for Perfetto, and a table."),
]
ProfileSteps = Annotated[
    str,
    typer.Option(
        metavar="FIRST:END",
        help="Profile these steps, counted from 0. Default with --profile: ten steps after the first ten.",
        show_default=False,
    ),
]


def profile(
    ctx: typer.Context,
    run: Annotated[Path, typer.Argument(help="The run directory, or a trace of a run.", show_default=False)],
    cpu: Annotated[
        bool,
        typer.Option("--cpu", help="Show CPU time instead of elapsed time, for machines whose cores are shared."),
    ] = False,
    json: AsJson = False,
) -> None:
    """Show where the time of a run with --profile went: by phase and worker, and the top operators."""
    ctx.meta[MACHINE_OUTPUT] = json
    from distbelief.observe.profiling.collecting import read_summary
    from distbelief.observe.profiling.rules.shown import as_data, lines

    summary, trace = read_summary(run)
    if json:
        typer.echo(json_text.dumps(as_data(summary, str(trace)), allow_nan=False))
    else:
        print("\n".join(lines(summary, str(trace), cpu=cpu)))


def asked_steps(usual: bool, steps: str) -> str:
    """The value of the option `profile` from both flags; raises an error if it is no window of steps.

    >>> asked_steps(False, ""), asked_steps(True, ""), asked_steps(False, "3:5")
    ('', 'auto', '3:5')
    """
    asked = steps or (USUAL_STEPS if usual else "")
    profile_plan(asked)
    return asked


def print_profile(trace: str, stream: TextIO = sys.stdout) -> None:
    """Print the table of a profile after a run."""
    from distbelief.observe.profiling.collecting import read_summary
    from distbelief.observe.profiling.rules.shown import lines

    if trace:
        summary, _ = read_summary(Path(trace))
        print("", *lines(summary, trace), sep="\n", file=stream)
