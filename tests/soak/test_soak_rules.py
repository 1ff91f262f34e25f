"""What the soak decides, by plain calls: the draw of faults, flatness, recoveries, goodput, differences."""

from __future__ import annotations

import doctest
import itertools
from collections import Counter

import pytest

from tests.soak import sampling
from tests.soak.faults import ALONE, KINDS
from tests.soak.rules import draw, judging
from tests.soak.rules.judging import Strike, Trend, differing, growth, recoveries, trend, trends


@pytest.mark.parametrize("module", [draw, judging, sampling])
def test_the_examples_in_the_docstrings(module: object) -> None:
    assert doctest.testmod(module).failed == 0  # type: ignore[arg-type]


def test_each_kind_strikes_once_before_any_strikes_again_and_some_strike_together() -> None:
    found = list(itertools.islice(draw.rounds(5, list(KINDS), ALONE), 60))
    flat = [kind for one in found for kind in one]
    for begin in range(0, len(flat) - len(KINDS), len(KINDS)):
        assert Counter(flat[begin : begin + len(KINDS)]) == dict.fromkeys(KINDS, 1)
    together = [one for one in found if len(one) == 2]
    assert together
    assert not {kind for one in together for kind in one} & {*ALONE}
    assert {*ALONE} <= KINDS.keys()


def test_the_draw_follows_from_the_seed() -> None:
    first, again, other = (list(itertools.islice(draw.rounds(seed, list(KINDS), ALONE), 30)) for seed in (5, 5, 6))
    assert first == again != other


@pytest.mark.parametrize(
    ("name", "values", "flat"),
    [
        ("memory of worker", [200, 230, 210, 220, 205, 215], True),
        ("memory of worker", [200, 200, 205, 220, 240, 241], False),  # 20 % more
        ("memory of coordinator", [30, 30, 31, 33, 35, 36], True),  # what caches and allocators take at first
        ("memory of coordinator", [30, 30, 33, 36, 45, 45], False),
        ("descriptors of lead", [40, 44, 41, 90, 42, 43], True),  # one high value is no trend
        ("descriptors of lead", [40, 42, 44, 46, 48, 50], False),
        ("processes of reader", [8, 8, 8, 8, 12, 12], False),
        ("segments", [4, 4, 4, 4, 4, 4], True),
        ("temporary files", [2, 2, 4, 6, 8, 10], False),
    ],
)
def test_what_is_flat(name: str, values: list[float], flat: bool) -> None:
    assert trend(name, values).flat is flat


def test_a_role_that_was_seldom_there_is_not_judged() -> None:
    samples = [{"memory of lead": 50.0, **({"memory of store": 1.0 * k} if k < 4 else {})} for k in range(9)]
    assert [one.name for one in trends(samples)] == ["memory of lead"]


def test_what_grows_by_design_is_judged_by_what_it_grows_with() -> None:
    assert all(one.flat for one in growth(300_000, 1000, 200_000, 20))
    steps, faults = growth(900_000, 1000, 2_000_000, 20)
    assert (steps.flat, faults.flat) == (False, False)
    assert all(isinstance(one, Trend) for one in growth(0, 0, 0, 0)), "a run that broke at once"


def test_recoveries_by_kind() -> None:
    def strike(kind: str, step_s: float, whole_s: float) -> Strike:
        return Strike(kind, "", 0.0, 0, step_s, whole_s)

    found = [strike("b", 1.0, 2.0), strike("a", 5.0, 6.0), strike("b", 3.0, 4.0), strike("b", 2.0, 9.0)]
    assert recoveries(found) == [("a", 1, 5.0, 5.0, 6.0, 6.0), ("b", 3, 2.0, 3.0, 4.0, 9.0)]


def test_a_step_that_is_missing_or_other_is_found() -> None:
    twin = {0: "a", 1: "b", 2: "c"}
    assert differing(twin, {0: "a", 1: "b", 2: "c"}) == []
    assert differing(twin, {0: "a", 2: "x", 3: "d"}) == [1, 2, 3]


@pytest.mark.parametrize(
    ("words", "name", "forked", "member", "role"),
    [
        ("python -m distbelief.cli.main train job.py", "python", False, False, "lead"),
        ("python -m distbelief.cli.main worker --join run", "python", False, False, "agent"),
        ("python -m distbelief.cli.main attach run", "python", False, False, "attach"),
        ("python terminal.py gone python -m distbelief.cli.main train", "python", False, False, ""),
        ("python -P -m distbelief.coordinator", "python", False, False, "coordinator"),
        ("python -P -m distbelief.launch.zygote 7 1", "python", False, False, "zygote"),
        ("python -P -m distbelief.launch.zygote 7 1", "python", True, False, "store"),
        ("python -P -m distbelief.launch.zygote 7 1", "reader", True, False, "reader"),
        ("sh -c true", "sh", False, False, ""),
    ],
)
def test_roles(words: str, name: str, forked: bool, member: bool, role: str) -> None:
    assert sampling.role_of(words.split(), name, forked, member) == role
