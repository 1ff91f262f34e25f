"""Turns an error into a message on stderr, an object on stdout (`--json`) and an exit code."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import typer
from typer.core import TyperGroup

from distbelief.errors import DistBeliefError

MACHINE_OUTPUT = "distbelief.json"
"""A command sets this key in the context's `meta` if the user gave `--json`."""


class UsageError(DistBeliefError):
    """The command line cannot be carried out; nothing was started or written."""

    exit_code = 2


class Commands(TyperGroup):
    """A group whose commands may raise any DistBeliefError. Errors of DistBelief itself keep Python's traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except DistBeliefError as error:
            _report(ctx, error)
            raise typer.Exit(error.exit_code) from error
        except KeyboardInterrupt as error:
            _report(ctx, DistBeliefError("interrupted"))
            raise typer.Exit(130) from error


def _report(ctx: Any, error: DistBeliefError) -> None:
    typer.echo(typer.style("error:", fg="red", bold=True) + " " + error.message, err=True)
    if error.details:
        typer.echo(textwrap.indent(error.details.rstrip("\n"), "    "), err=True)
    if error.hint:
        typer.echo(typer.style("what to do:", bold=True) + " " + error.hint, err=True)
    if ctx.meta.get(MACHINE_OUTPUT):
        typer.echo(json.dumps({"error": error.message}))
