"""The benchmark runs and writes figures of the promised shape. What the figures are is not a test's business."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "bench" / "dataparallel.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)


def check_spread(found: dict[str, Any]) -> None:
    assert 0 < found["low"] <= found["median"] <= found["high"]
    assert min(found["values"]) == found["low"]
    assert max(found["values"]) == found["high"]


def test_the_reduce_part_writes_its_figures(tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "figures.json"
    done = run("--quick", "--only", "reduce", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(file.read_text())
    assert content["machine"]["cores"] >= 1
    assert content["machine"]["versions"]["torch"]
    assert len(content["load"]["before"]) == len(content["load"]["after"]) == 3
    assert "workloads" not in content
    assert "launch" not in content
    assert set(content["reduce"]["gb_per_s"]) == {"1", "25", "100"}
    for methods in content["reduce"]["gb_per_s"].values():
        assert set(methods) == {"shared", "shared, whole", "gloo", "memcpy"}
        for found in methods.values():
            check_spread(found)
    held_to_goals = [found for found in content["reduce"]["ratios"] if "goal" in found]
    assert len(held_to_goals) == 3
    for found in held_to_goals:
        check_spread(found)
        assert found["met"] == (found["median"] >= found["goal"])
    assert "100 MB" in done.stdout


def test_an_unknown_one_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """As all benchmarks do it."""
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import options

    parser = argparse.ArgumentParser()
    parser.add_argument("--only", type=options.some_of("part", ["mlp", "cnn"]))
    assert parser.parse_args(["--only", "cnn,mlp"]).only == ["mlp", "cnn"]
    with pytest.raises(SystemExit, match="2"):
        parser.parse_args(["--only", "mlp,banana"])
    assert "no such part: banana" in capsys.readouterr().err
