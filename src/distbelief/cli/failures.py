"""Turns an error into a message on stderr, an object on stdout (`--json`) and an exit code."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import select
import sys
import textwrap
import traceback
from pathlib import Path
from typing import Any, TextIO

import typer
from typer.core import TyperGroup

from distbelief.errors import DistBeliefError

MACHINE_OUTPUT = "distbelief.json"
"""A command sets this key in the context's `meta` if the user gave `--json`."""

_WHOSE = "is it yours, and may you read and write it? A run's files are for the user who has started the run"
_HINTS = {
    errno.EACCES: _WHOSE,
    errno.EPERM: _WHOSE,
    errno.EROFS: "the disk can only be read: give a folder on another one",
    errno.ENAMETOOLONG: "check the path",
    errno.ELOOP: "check the path: its symbolic links go round in a circle",
    errno.ENOTDIR: "check the path: a part of it is a file, not a folder",
    errno.EIO: "the disk fails: look at the kernel's messages (`dmesg`)",
    errno.ESTALE: "the file server has been restarted or the file replaced: repeat the command",
}
_SHOWN_CHARACTERS = 300
STARTED_BY = "distbelief: started by"
"""The key of a pipe to the process that has started this one with --detach, and reports its error."""


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
            raise RuntimeError(f"what {_place(error)} reads has ended too early: {str(error) or 'EOFError'}") from error
        except BrokenPipeError as error:  # of which typer would say nothing
            if any(_is_closed(stream) for stream in (sys.stdout, sys.stderr)):
                raise
            raise RuntimeError(f"the process that {_place(error)} writes to has ended: {error}") from error
        except OSError as error:
            if (refusal := of_the_system(error)) is None:
                raise
            _report(ctx, refusal)
            raise typer.Exit(refusal.exit_code) from error


def _place(error: BaseException) -> str:
    """The innermost function of DistBelief that the error came through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [one for one in frames[1:] if f"{os.sep}distbelief{os.sep}" in one.filename] or frames  # the first is here
    return f"{ours[-1].name} ({Path(ours[-1].filename).name}, line {ours[-1].lineno})"


def of_the_system(error: OSError) -> DistBeliefError | None:
    """The error for a path that the user has named, or a file below it, which the system does not let us use. None: it
    is another error.

    >>> of_the_system(PermissionError(errno.EACCES, "Permission denied", "runs/theirs/launch.json")).message
    'cannot use runs/theirs/launch.json: Permission denied'
    """
    if error.filename is None or error.errno not in _HINTS:
        return None
    path = os.fsdecode(error.filename) if isinstance(error.filename, str | bytes) else str(error.filename)
    shown = path if len(path) <= _SHOWN_CHARACTERS else f"{path[:_SHOWN_CHARACTERS]}…"
    return DistBeliefError(f"cannot use {shown}: {error.strerror}", hint=_HINTS[error.errno])


def _is_closed(stream: TextIO) -> bool:
    """Whether nobody reads any more what is written there, as after `| head`."""
    try:
        look = select.poll()
        look.register(stream.fileno(), 0)
        return any(event & select.POLLERR for _, event in look.poll(0))
    except (OSError, ValueError):  # it is closed on our side, or is no file
        return True


def _send(pipe: int, error: DistBeliefError) -> None:
    # A pipe takes 64 KiB at once, and a character may become 12 bytes.
    texts = {"error": error.message[:1000], "hint": error.hint[:500], "details": error.details[-3500:]}
    with contextlib.suppress(OSError):  # the reader has gone when the run has begun
        os.write(pipe, json.dumps({**texts, "exit_code": error.exit_code}).encode())


def received_error(sent: bytes) -> DistBeliefError:
    """The error of a process that was started with --detach."""
    fields = json.loads(sent)
    error = DistBeliefError(fields["error"], hint=fields["hint"], details=fields["details"])
    error.exit_code = fields["exit_code"]
    return error


def _report(ctx: Any, error: DistBeliefError) -> None:
    if STARTED_BY in ctx.meta:
        _send(ctx.meta[STARTED_BY], error)
    typer.echo(typer.style("error:", fg="red", bold=True) + " " + error.message, err=True)
    if error.details:
        typer.echo(textwrap.indent(error.details.rstrip("\n"), "    "), err=True)
    if error.hint:
        typer.echo(typer.style("what to do:", bold=True) + " " + error.hint, err=True)
    if ctx.meta.get(MACHINE_OUTPUT):
        typer.echo(json.dumps({"error": error.message}))
