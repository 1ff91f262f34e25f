"""The edges of the benchmark program that are cheap: options, environments, examples in docstrings."""

from __future__ import annotations

import argparse
import doctest
import importlib
import sys
from pathlib import Path

import pytest

import bench
from bench import options
from bench.compare import environments
from bench.compare.system import System

FOLDER = Path(bench.__file__).parent
EXAMPLES = [
    ".".join(("bench", *file.relative_to(FOLDER).with_suffix("").parts)).removesuffix(".__init__")
    for file in sorted(FOLDER.rglob("*.py"))
    if environments.FOLDER not in file.parents and ">>> " in file.read_text()
]


@pytest.mark.parametrize("name", EXAMPLES)
def test_docstrings(name: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(name))
    assert tried > 0
    assert failed == 0


def test_an_unknown_one_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """As all benchmarks do it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", type=options.some_of("part", ["mlp", "cnn"]))
    assert parser.parse_args(["--only", "cnn,mlp"]).only == ["mlp", "cnn"]
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--only", "mlp,banana"])
    assert "no such part: banana" in capsys.readouterr().err


def a_system(requirement: str, check: str = "") -> System:
    requirements = (requirement,) if requirement else ()
    return System("peer", "Peer", "with_peer.py", lambda start: [], requirements=requirements, check=check)


def test_what_cannot_be_made_is_told_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environments, "FOLDER", tmp_path)
    with pytest.raises(environments.Unavailable, match="no-such-folder"):
        environments.python_for(a_system(str(tmp_path / "no-such-folder")))
    assert list(tmp_path.iterdir()) == []


def test_an_environment_that_does_not_work_is_told() -> None:
    with pytest.raises(environments.Unavailable, match="ModuleNotFoundError: No module named 'banana'"):
        environments.python_for(a_system("", check="import banana"))
    assert environments.python_for(a_system("", check="import bench.task")) == sys.executable
