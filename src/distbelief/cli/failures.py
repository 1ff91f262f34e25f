"""Turns an error into a message on stderr, an object on stdout (`--json`) and an exit code."""

from __future__ import annotations

import json
import select
import sys
import textwrap
from typing import Any, TextIO

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
        except EOFError as error:  # of which typer would say "Aborted." and nothing else
            raise RuntimeError("a process or a file ended where more was expected") from error
        except BrokenPipeError as error:  # of which typer would say nothing
            if any(_is_closed(stream) for stream in (sys.stdout, sys.stderr)):
                raise
            raise RuntimeError("a process ended while it was being told something") from error


def _is_closed(stream: TextIO) -> bool:
    """Whether nobody reads any more what is written there, as after `| head`."""
    try:
        look = select.poll()
        look.register(stream.fileno(), 0)
        return any(event & select.POLLERR for _, event in look.poll(0))
    except (OSError, ValueError):  # it is closed on our side, or is no file
        return True


def _report(ctx: Any, error: DistBeliefError) -> None:
    typer.echo(typer.style("error:", fg="red", bold=True) + " " + error.message, err=True)
    if error.details:
        typer.echo(textwrap.indent(error.details.rstrip("\n"), "    "), err=True)
    if error.hint:
        typer.echo(typer.style("what to do:", bold=True) + " " + error.hint, err=True)
    if ctx.meta.get(MACHINE_OUTPUT):
        typer.echo(json.dumps({"error": error.message}))
