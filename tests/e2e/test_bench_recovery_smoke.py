"""The benchmark of recovery runs, kills real workers, and writes figures that fit together. How fast anything is, is
not a test's business. The arithmetic behind the figures is tested by plain calls."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "bench" / "recovery.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=230, cwd=ROOT)


def check_statistics(found: dict[str, Any], count: int) -> None:
    assert found["low"] <= found["median"] <= found["p99"] <= found["high"]
    assert len(found["values"]) == count
    assert all(math.isfinite(value) for value in found["values"])


def test_kills_are_measured(tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "figures.json"
    done = run("--quick", "--kills", "1", "--peers", "ours", "--json", str(file))
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(file.read_text())
    assert content["machine"]["versions"]["torch"]
    assert content["failed"] == {}
    assert content["problems"] == []
    assert set(content["workloads"]) == {"mlp"}
    found = content["workloads"]["mlp"]
    assert set(found) == {"ours"}
    for one in found.values():
        assert one["kills"] == 1
        assert one["step_s"] > 0
        for name in ("next_commit_s", "lost_steps", "lost_until_whole_steps", "redone_steps"):
            check_statistics(one[name], 1)
        assert one["next_commit_s"]["low"] > 0
    ours = found["ours"]
    assert ours["redone_steps"]["high"] == 0
    assert ours["shard_s"] > 0
    for name in ("overhead_s", "decided_s", "recomputed_shards"):
        check_statistics(ours[name], 1)
    assert 0 <= ours["recomputed_shards"]["high"] <= content["settings"]["shards"]
    for later, earlier in zip(ours["next_commit_s"]["values"], ours["decided_s"]["values"], strict=True):
        assert later > earlier > 0
    assert [goal["met"] for goal in content["goals"]] == [goal["found"] < goal["below"] for goal in content["goals"]]
    assert "Goals" in done.stdout


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    import recovery_figures

    return recovery_figures


def every_tenth(figures: ModuleType, generation: int, steps: Sequence[int], begin: float) -> list[Any]:
    return [figures.Commit(step, begin + 0.1 * i, generation) for i, step in enumerate(steps)]


def test_a_step_that_survivors_finish_without_the_victim_is_no_recovery(figures: ModuleType) -> None:
    commits = every_tenth(figures, 1, range(10), 0.0)  # the last at 0.9
    commits += every_tenth(figures, 2, [10, 11], 1.2) + every_tenth(figures, 3, range(12, 20), 1.4)
    members = {1: [7, 8, 9], 2: [8, 9], 3: [8, 9, 10]}
    observed = figures.Observed(
        3, [figures.Kill(7, 0.85)], commits, members, {1: 0.0, 2: 0.88, 3: 1.35}, {2: 3}, shard_s=0.02
    )
    (episode,) = figures.episodes(observed)
    assert episode.next_commit_s == pytest.approx(0.35)
    assert episode.decided_s == pytest.approx(0.03)
    assert episode.redone_steps == 0
    assert episode.recomputed_shards == 3
    # 0.35 less the 0.15 that steps 9 and 10 needed anyway, less two rounds of shards for two survivors
    assert episode.overhead_s == pytest.approx(0.35 - 0.15 - 0.04)
    assert episode.lost_steps == pytest.approx(2.0)
    assert episode.lost_until_whole_steps == pytest.approx(2.0)


def test_steps_done_again_from_a_checkpoint_are_not_the_next_step(figures: ModuleType) -> None:
    commits = every_tenth(figures, 1, range(10), 0.0) + every_tenth(figures, 2, range(5, 20), 3.0)
    observed = figures.Observed(2, [figures.Kill(1, 0.95)], commits, {1: [1, 2], 2: [3, 4]})
    (episode,) = figures.episodes(observed)
    assert episode.redone_steps == 5
    assert episode.next_commit_s == pytest.approx(3.5 - 0.95)
    assert episode.lost_steps == pytest.approx(25.0)
    assert episode.overhead_s is None


def test_no_new_step_is_an_error_and_not_a_figure(figures: ModuleType) -> None:
    commits = every_tenth(figures, 1, range(10), 0.0) + every_tenth(figures, 2, range(5, 8), 3.0)
    observed = figures.Observed(2, [figures.Kill(1, 0.95)], commits, {1: [1, 2], 2: [3, 4]})
    with pytest.raises(figures.NotRecovered, match="no step beyond 9"):
        figures.episodes(observed)
