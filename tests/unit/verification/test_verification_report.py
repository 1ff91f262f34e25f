"""What people and programs are told."""

from __future__ import annotations

import json
import math
from pathlib import Path

from distbelief.verification.compare import Comparison, Difference, Verdict
from distbelief.verification.report import WORST, as_json, lines
from distbelief.verification.trial import Plan


def plan(strategy: str = "allreduce", against: str = "plain") -> Plan:
    return Plan(Path("job.py"), {}, strategy, against, 2, 50, None, None)


def comparison(verdict: Verdict, count: int = 0, largest: float = 1e-7) -> Comparison:
    differences = tuple(Difference(f"layer{i}", largest, 2 * largest) for i in range(count))
    return Comparison(verdict, 12, 20, 1e-4, 3 if count else None, differences)


def test_identical() -> None:
    assert lines(plan(), comparison("identical")) == [
        "identical: allreduce on 2 workers against plain, after 12 steps",
        "All weights (20 tensors) have the same bits.",
    ]
    assert as_json(plan(), comparison("identical"))["first_step"] is None


def test_equal_shows_the_worst_and_counts_the_rest() -> None:
    told = lines(plan("allreduce:inexact"), comparison("equal", count=12))
    assert told[1].startswith("12 of 20 tensors differ, by at most 0.0001 of")
    assert told[1].endswith("It first shows at step 3.")
    assert "layer0" in told[4]
    assert told[4].split()[1:] == ["1e-07", "2e-07"]
    assert len({len(line) for line in told[3 : 4 + WORST]}) == 1  # the columns stand under each other
    assert told[-1] == "and 2 more"


def test_two_that_promise_the_same_bits() -> None:
    fault = "Both promise the same bits"
    assert any(fault in line for line in lines(plan(), comparison("equal", 1)))
    assert any(fault in line for line in lines(plan("allreduce", "allreduce:gloo"), comparison("different", 1)))
    for strategy, against in (("allreduce:inexact", "plain"), ("allreduce", "allreduce:inexact")):
        assert not any(fault in line for line in lines(plan(strategy, against), comparison("equal", 1)))
        assert any("dropout" in line for line in lines(plan(strategy, against), comparison("different", 1)))


def test_strategies_that_learn_something_else() -> None:
    nature = "compute other weights"
    assert any(nature in line for line in lines(plan("local_sgd:4", "allreduce"), comparison("different", 1)))
    assert any(nature in line for line in lines(plan("allreduce", "sandblaster"), comparison("different", 1)))
    assert not any(nature in line for line in lines(plan("local_sgd:4"), comparison("different", 1)))


def test_json_has_no_infinity() -> None:
    found = as_json(plan(), comparison("different", count=12, largest=math.inf))
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["max_difference"] is None
    assert list(found["differences"]) == [f"layer{i}" for i in range(WORST)]
    assert set(found["differences"].values()) == {None}
