"""Peers that fail now and then are tried again, and it is said; ours are not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.compare import comparing
from bench.compare.comparing import Comparison
from bench.compare.plan import Cell
from bench.compare.results import Results
from bench.compare.system import System
from bench.running import DriverFailed

CELL = Cell("speed", "mlp", 2, ("peer",), 1, 1, 1)


class FailsFirst(Comparison):
    """A comparison whose runs fail so many times."""

    def __init__(self, results: Results, folder: Path, failures: int) -> None:
        super().__init__(results, folder, {}, False, lambda text: None)
        self.failures, self.runs = failures, 0

    def _least_disturbed(self, *_: Any) -> Any:
        self.runs += 1
        if self.runs <= self.failures:
            raise DriverFailed(f"SIGABRT {self.runs}")
        return "measured"


def results(folder: Path) -> Results:
    return Results.begin(folder / "results.json", {"settings": {}, "arguments": []}, resume=False)


def system(kind: str) -> System:
    return System("one", "One", "with_one.py", lambda start: [], kind=kind)


def test_a_peer_is_tried_again_and_it_is_said(tmp_path: Path) -> None:
    found = results(tmp_path)
    comparison = FailsFirst(found, tmp_path, failures=2)
    assert comparison._in_some_tries(CELL, "speed mlp ×2", system("peer"), None) == "measured"  # type: ignore[arg-type, comparison-overlap]
    assert found.content["tried_again"] == {"speed mlp ×2": {"one": ["SIGABRT 1", "SIGABRT 2"]}}


def test_not_for_ever(tmp_path: Path) -> None:
    comparison = FailsFirst(results(tmp_path), tmp_path, failures=99)
    with pytest.raises(DriverFailed, match=f"SIGABRT {comparing.TRIES}"):
        comparison._in_some_tries(CELL, "cell", system("peer"), None)  # type: ignore[arg-type]


def test_ours_is_not(tmp_path: Path) -> None:
    comparison = FailsFirst(results(tmp_path), tmp_path, failures=1)
    with pytest.raises(DriverFailed):
        comparison._in_some_tries(CELL, "cell", system("ours"), None)  # type: ignore[arg-type]
    assert comparison.runs == 1
