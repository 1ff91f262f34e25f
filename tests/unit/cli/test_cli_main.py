"""The command itself: version, usage errors, and how an error is told."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import typer
from typer.testing import CliRunner

import distbelief
from distbelief.cli.failures import MACHINE_OUTPUT, Commands
from distbelief.cli.main import app
from distbelief.errors import JobError, RunFailed, RunInterrupted


def test_the_version() -> None:
    result = CliRunner().invoke(app, ["--version"])
    assert (result.exit_code, result.stdout) == (0, f"distbelief {distbelief.__version__}\n")


def test_the_command_starts_without_torch() -> None:
    code = """
import sys
from distbelief.cli.main import app
app(["--version"], standalone_mode=False)
app(["train", "--help"], standalone_mode=False)
heavy = {"torch", "numpy", "zmq"} & set(sys.modules)
sys.exit(f"imported {heavy}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("arguments", [["trian"], ["train"], ["train", "x.py", "--workerz", "2"], ["new"]])
def test_usage_errors(arguments: list[str]) -> None:
    assert CliRunner().invoke(app, arguments).exit_code == 2


@pytest.mark.parametrize("option", ["--workers", "--threads"])
@pytest.mark.parametrize("value", ["0", "-1", "two"])
def test_counts_are_at_least_one(option: str, value: str) -> None:
    result = CliRunner().invoke(app, ["train", "x.py", option, value])
    assert result.exit_code == 2
    assert option.strip("-") in result.stderr  # where colours are forced on, codes stand between the dashes


def test_help_names_the_commands() -> None:
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    assert "train" in result.stdout
    assert "new" in result.stdout


def command_that_raises(error: BaseException, machine: bool = False) -> typer.Typer:
    failing = typer.Typer(cls=Commands, pretty_exceptions_enable=False)

    @failing.command()
    def fail(ctx: typer.Context) -> None:
        ctx.meta[MACHINE_OUTPUT] = machine
        raise error

    @failing.callback()
    def group() -> None: ...

    return failing


def test_message_first_then_traceback_then_what_to_do() -> None:
    error = RunFailed("worker 1 failed", hint="mend the model", details="Traceback:\n  line\nValueError: x\n")
    result = CliRunner().invoke(command_that_raises(error), ["fail"])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr == (
        "error: worker 1 failed\n    Traceback:\n      line\n    ValueError: x\nwhat to do: mend the model\n"
    )


def test_machine_output_has_the_error_too() -> None:
    result = CliRunner().invoke(command_that_raises(JobError('no "job"'), machine=True), ["fail"])
    assert result.exit_code == 2
    assert json.loads(result.stdout) == {"error": 'no "job"'}
    assert result.stderr == 'error: no "job"\n'


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RunInterrupted("stopped at step 3")])
def test_an_interrupt_is_130(error: BaseException) -> None:
    result = CliRunner().invoke(command_that_raises(error, machine=True), ["fail"])
    assert result.exit_code == 130
    assert "error" in json.loads(result.stdout)


@pytest.mark.parametrize(
    ("error", "words"),
    [("EOFError()", "has ended too early: EOFError"), ("BrokenPipeError(32, 'pipe')", "has ended: [Errno 32] pipe")],
)
def test_an_end_inside_of_the_program_is_no_abort(error: str, words: str) -> None:
    """typer says "Aborted." of the first, and nothing of the second."""
    code = f"from {__name__} import command_that_raises as made; made({error})(['fail'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith("RuntimeError: ")
    assert last.endswith(words)
    assert ".py, line " in last, "where"
    assert "Aborted" not in done.stderr


def test_a_reader_that_has_gone_away_is_told_nothing() -> None:
    """As after `| head`."""
    code = f"from {__name__} import command_that_raises as made; made(BrokenPipeError(32, 'pipe'))(['fail'])"
    command = f'exec {sys.executable} -c "{code}" | true'
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, timeout=300)
    assert done.stderr == ""


def test_a_fault_of_ours_is_not_hidden() -> None:
    result = CliRunner().invoke(command_that_raises(ZeroDivisionError("ours")), ["fail"])
    assert isinstance(result.exception, ZeroDivisionError)


def test_elsewhere_than_on_linux_it_says_one_sentence() -> None:
    """Before anything is imported that other systems lack."""
    script = (
        "import platform, sys; platform.system = lambda: 'Darwin'\n"
        "for name in ('fcntl', 'typer', 'zmq'): sys.modules[name] = None\n"
        "from distbelief.cli.main import main\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("distbelief runs on Linux only, and this is Darwin")
    assert done.stderr.count("\n") == 1
