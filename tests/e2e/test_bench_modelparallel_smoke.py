"""The benchmarks of divided models run, compare like with like, and write figures of the promised shape. What the
figures are is not a test's business. The arithmetic behind them is tested by plain calls."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "bench" / program), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=230, cwd=ROOT)


def check_spread(found: dict[str, Any], count: int) -> None:
    assert 0 < found["low"] <= found["median"] <= found["high"]
    assert len(found["values"]) == count


def test_a_pipeline_and_its_peer_do_the_same_work(tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "figures.json"
    done = run("modelparallel.py", "--quick", "--only", "zbv", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(file.read_text())
    assert content["failed"] == {}
    assert content["problems"] == []
    assert len(content["load"]["before"]) == len(content["load"]["after"]) == 3
    assert set(content["systems"]) == {"zbv"}
    found = content["systems"]["zbv"]
    assert found["strategy"] == "pipeline:2:zbv"
    assert sum(line.startswith("stage ") for line in found["plan"]) == 4
    for kind in ("mean_step_s", "median_step_s"):
        for driver in ("ours", "bare torch"):
            check_spread(found[kind][driver], count=1)
    whole, median = found["ratios"]
    assert whole["median"] == pytest.approx(
        found["mean_step_s"]["ours"]["median"] / found["mean_step_s"]["bare torch"]["median"]
    )
    assert whole["verdict"] == ("met" if whole["median"] <= whole["at_most"] else "not met")
    assert median["verdict"] == ""
    for when in ("first_loss", "last_loss"):
        assert found[when]["ours"] == pytest.approx(found[when]["bare torch"], rel=1e-4)
    assert "pipeline:2:zbv" in done.stdout


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import modelparallel_figures

    return modelparallel_figures


def test_what_happens_in_some_steps_only_counts_in_the_mean_and_not_in_the_median(figures: ModuleType) -> None:
    quick = figures.measured([0.0, 9.0, 10.0, 11.0, 12.0], 2, [3.0, 2.0], 0.0)
    with_a_pause = figures.measured([0.0, 9.0, 10.0, 13.0, 14.0], 2, [3.0, 2.0], 0.0)
    of_all, of_median = figures.ratios([with_a_pause], [quick])
    assert of_all.ratio.spread.median == pytest.approx(5 / 3)
    assert of_all.verdict == "not met"
    assert of_median.ratio.spread.median == pytest.approx(1.0)


def test_another_loss_is_a_problem(figures: ModuleType) -> None:
    def run_of(*losses: float) -> Any:
        return figures.measured([0.0, 1.0, 2.0], 1, losses, 0.0)

    assert figures.loss_problems([run_of(2.0, 1.5, 1.0)], [run_of(2.0, 1.4, 1.01)]) == []
    (problem,) = figures.loss_problems([run_of(2.0, 1.5, 1.0)], [run_of(2.01, 1.5, 1.0)])
    assert "first step" in problem
    (problem,) = figures.loss_problems([run_of(2.0, 1.5, 1.0)], [run_of(2.0, 1.0)])
    assert "3 steps, they 2" in problem
    assert figures.loss_problems([run_of(2.0, 2.0)], [run_of(2.0, 2.0)]) == [
        "our loss went from 2.0000 to 2.0000",
        "their loss went from 2.0000 to 2.0000",
    ]
