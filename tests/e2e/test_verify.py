"""`distbelief verify`: real runs against one plain process, and a planted fault that it must see."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.runs.command import JOBS, REPOSITORY, Outcome

Cli = Callable[..., Outcome]


def test_allreduce_has_the_bits_of_a_plain_process(distbelief: Cli) -> None:
    """Of an example; for a job with everything that makes exactness hard see test_exactness.py."""
    digits = [REPOSITORY / "examples" / "digits.py", "--set", "width=8"]
    found = distbelief("verify", *digits, "--steps", 15, "--json").json
    assert (found["verdict"], found["max_difference"], found["first_step"]) == ("identical", 0.0, None)
    assert (found["strategy"], found["against"], found["steps"]) == ("allreduce", "plain", 15)
    assert found["differences"] == {}


def test_inexact_is_equal(distbelief: Cli, tmp_path: Path) -> None:
    arguments = ["--strategy", "allreduce:inexact", "--run-dir", tmp_path / "kept"]
    outcome = distbelief("verify", JOBS / "small.py", *arguments)
    assert outcome.status == 0, outcome.stderr
    assert "equal: allreduce:inexact on 2 workers against plain, after 10 steps" in outcome.stdout
    assert "0.weight" in outcome.stdout
    assert "same bits" not in outcome.stdout
    for run in ("strategy", "against"):
        assert (tmp_path / "kept" / run / "weights.safetensors").exists()


def test_a_planted_wrong_order_is_not_identical(
    distbelief: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "t"))
    found = distbelief("verify", JOBS / "wrong_order.py", "--workers", 3, "--json").json
    assert found["verdict"] == "equal"  # wrong in the last bits only
    assert 0 < found["max_difference"] < 1e-5
    assert 0 < found["first_step"] < found["steps"]  # the loss of step 0 comes before the first sum
    assert found["differences"]
    assert list((tmp_path / "t").glob("distbelief-verify-*")) == []  # neither run is kept


def test_different_is_a_failure(distbelief: Cli) -> None:
    arguments = ["--strategy", "allreduce:inexact", "--against", "allreduce:gloo", "--tolerance", 0, "--steps", 3]
    outcome = distbelief("verify", JOBS / "small.py", *arguments, "--json")
    assert outcome.status == 1
    found = json.loads(outcome.stdout)
    assert (found["verdict"], found["against"], found["steps"]) == ("different", "allreduce:gloo", 3)
    assert "different: allreduce:inexact on 2 workers against allreduce:gloo, after 3 steps" in outcome.stderr
