"""`distbelief slurm JOB`: print a batch script for Slurm. Errors are reported now, not when the job starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from distbelief.cli.failures import UsageError
from distbelief.cli.train import check_job_file, train

_SET_HERE = {
    "workers": "--nodes and --workers-per-node",
    "run_dir": "--run-dir before the --",
    "on": "nothing",
    "detach": "nothing",
}


def slurm(
    job: Annotated[Path, typer.Argument(help="The job file: Python that defines `job`.", show_default=False)],
    options: Annotated[
        list[str] | None,
        typer.Argument(metavar="[-- OPTIONS]", help="Options of `train`, after --.", show_default=False),
    ] = None,
    nodes: Annotated[int, typer.Option(min=1, help="The number of hosts.")] = 1,
    workers_per_node: Annotated[int, typer.Option(min=1, metavar="K", help="Worker processes on each host.")] = 1,
    time: Annotated[
        str, typer.Option(metavar="12:00:00", help="The time limit of the batch job. Default: the partition's.")
    ] = "",
    partition: Annotated[str, typer.Option(metavar="NAME", help="The partition. Default: Slurm's choice.")] = "",
    run_dir: Annotated[
        str,
        typer.Option(metavar="DIR", help="The run directory, seen by all nodes. Default: runs/NAME-slurm-JOBID."),
    ] = "",
) -> None:
    """Print a batch script: `distbelief slurm job.py --nodes 4 > run.sbatch && sbatch run.sbatch`.

    The batch job saves a checkpoint before its time is up, requeues itself, and resumes from the checkpoint.
    """
    from distbelief.launch.launchers.rules.batchscript import Batch, script

    check_job_file(job)
    given = list(options or [])
    asked = _options_of_train(job, given)
    for name, instead in _SET_HERE.items():
        if f"--{name.replace('_', '-')}" in {option.partition("=")[0] for option in given}:
            raise UsageError(f"--{name.replace('_', '-')} is set by this command", hint=f"use {instead} instead")
    batch = Batch(
        name=job.stem,
        nodes=nodes,
        workers_per_node=workers_per_node,
        threads=asked["threads"],
        gpus=str(asked["device"]).startswith("cuda"),
        time=time,
        partition=partition,
    )
    typer.echo(script(batch, [sys.executable, "-m", "distbelief"], str(job.resolve()), run_dir, given), nl=False)


def _options_of_train(job: Path, given: list[str]) -> dict[str, Any]:
    """The options as `train` reads them; an error for unknown ones."""
    command = typer.Typer(add_completion=False)
    command.command()(train)
    context = typer.main.get_command(command).make_context("train", [str(job), *given])
    return dict(context.params)
