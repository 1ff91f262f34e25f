"""`distbelief slurm`: a script on stdout, or what is wrong, before anything is queued."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from distbelief.cli.main import app


@pytest.fixture
def job(tmp_path: Path) -> Path:
    file = tmp_path / "digits.py"
    file.write_text("job = None\n")
    return file


def slurm(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["slurm", *map(str, arguments)])


def test_a_script(job: Path) -> None:
    result = slurm(
        job, "--nodes", 3, "--workers-per-node", 2, "--time", "1:00:00", "--", "--threads", 2, "--set", "a=b"
    )
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    for asked in ("nodes=3", "cpus-per-task=4", "time=1:00:00", "requeue"):
        assert f"#SBATCH --{asked}" in lines
    assert f"train {job} --on slurm --workers 6 --plain --threads 2 --set a=b --run-dir" in result.stdout
    assert "gpus" not in result.stdout


def test_workers_with_gpus_get_them(job: Path) -> None:
    assert "#SBATCH --gpus-per-node=4" in slurm(job, "--workers-per-node", 4, "--", "--device", "cuda").stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--", "--sett", "a=b"], "--sett"),
        (["--", "--threads", "many"], "--threads"),
        (["--", "--workers", "3"], "use --nodes and --workers-per-node instead"),
        (["--", "--on=mpi"], "--on is set by this command"),
        (["--time", "soon"], "is no time"),
        (["--nodes", "0"], "--nodes"),
    ],
)
def test_what_is_wrong_is_said_now(job: Path, arguments: list[str], says: str) -> None:
    result = slurm(job, *arguments)
    assert result.exit_code in (1, 2)
    assert says in result.stderr
    assert "#SBATCH" not in result.stdout


def test_a_job_that_is_not_there(tmp_path: Path) -> None:
    result = slurm(tmp_path / "nowhere.py")
    assert result.exit_code == 2
    assert "no such job file" in result.stderr
