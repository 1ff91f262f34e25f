"""`distbelief new NAME`: write a starter job that can be trained at once."""

from __future__ import annotations

import importlib.util
import re
import shlex
import sys
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from distbelief.cli.failures import UsageError

TEMPLATE = "starter.py.template"
FILE_MARK = "@FILE@"


def new(
    name: Annotated[str, typer.Argument(help="Name or path of the job file to write.", show_default=False)],
) -> None:
    """Write a commented starter job, ready to train."""
    path = job_path(name)
    shown = shlex.quote(str(path))
    source = files("distbelief.cli").joinpath(TEMPLATE).read_text(encoding="utf-8").replace(FILE_MARK, shown)
    try:
        with path.open("x", encoding="utf-8") as file:  # "x": never replaces a file, not even in a race
            file.write(source)
    except FileExistsError as error:
        raise UsageError(
            f"{path} exists already; it was not touched", hint="choose another name, or remove it first"
        ) from error
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    typer.echo(f"wrote {path}")
    typer.echo(f"now run: distbelief train {shown} --workers 2")


def job_path(name: str) -> Path:
    """The path of the job file for NAME, with `.py` added if missing. Raises a UsageError if it could not be a job.

    >>> str(job_path("spirals"))
    'spirals.py'
    """
    path = Path(name)
    if path.suffix != ".py":
        path = path.with_name(path.name + ".py") if path.name else path
    stem = path.stem
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_-]*", stem) or name.endswith("/"):
        raise UsageError(
            f"{name!r} cannot name a job file",
            hint="a name begins with a letter and goes on with letters, digits, _ or -, for example my_job",
        )
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent}", hint=f"make it: mkdir -p {shlex.quote(str(path.parent))}")
    if not path.exists() and _hides_a_module(stem):
        # The job's folder comes first where Python looks for modules.
        raise UsageError(f"a job file {stem}.py would hide the Python module {stem}", hint=f"try {stem}_job")
    return path


def _hides_a_module(name: str) -> bool:
    if name in sys.stdlib_module_names:
        return True
    spec = importlib.util.find_spec(name) if name.isidentifier() else None
    return spec is not None and spec.origin is not None
