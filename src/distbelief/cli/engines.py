"""`--on ENGINE`: where a run is. A process that a launcher has started may lead the run, or only help."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated

import typer

from distbelief.cli.failures import UsageError
from distbelief.launch.engines import LOCAL, check, is_ray
from distbelief.launch.launchers.rules.place import LauncherRequest
from distbelief.launch.launchers.rules.variables import BY_LAUNCHER

if TYPE_CHECKING:
    from distbelief.launch.launchers.run import Leading

RAY = "ray"
ENGINES = (LOCAL, *BY_LAUNCHER, RAY)

On = Annotated[
    str,
    typer.Option(
        "--on",
        metavar="ENGINE",
        help="Where it runs: local; on the processes that mpirun (mpi), srun (slurm) or torchrun started, or that "
        "TF_CONFIG describes (tf_config); or on a Ray cluster (ray, ray:HOST:PORT, ray://HOST:PORT).",
    ),
]


@contextlib.contextmanager
def placed(asked: LauncherRequest) -> Iterator[Leading | None]:
    """Yields the engine of the launcher to the leading process; None: the run has no launcher. A process that only
    helps does so here, and exits with the run's status."""
    if asked.on == LOCAL or is_ray(asked.on):
        check(asked.on)
        yield None
        return
    if asked.on not in ENGINES:
        near = difflib.get_close_matches(asked.on, ENGINES, n=1)
        raise UsageError(
            f"there is no engine {asked.on!r}", hint=f"did you mean --on {near[0]}?" if near else ", ".join(ENGINES)
        )

    from distbelief.launch.launchers.run import find_place, follow, leading

    place = find_place(asked, os.environ)
    if place is None:
        typer.echo("an evaluator process has nothing to do: workers evaluate during the run")
        raise typer.Exit
    if not place.leads:
        raise typer.Exit(follow(asked, place))
    with leading(asked, place, lambda text: typer.echo(text, err=True)) as lead:
        yield lead
