"""What is concluded about hosts together, and about one and a run: by plain calls."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from distbelief.control.commands import RunFacts
from distbelief.doctor.rules import clock, compare, report
from distbelief.doctor.rules import compare as ofrun
from distbelief.doctor.rules.clock import ClockSample, Skew, skew
from distbelief.doctor.rules.report import Finding, Host, Link, Report, ok, problem

FACTS = {"torch": "2.13.0", "python": "3.12.1", "instruction_set": "x86_64 AVX512", "MKL-DNN": "default"}
RUN = RunFacts(
    epoch=1,
    number=0,
    now=0.0,
    phase="training",
    strategy="allreduce",
    step=7,
    members={0: "a", 1: "b"},
    software={"distbelief": "1", "python": "3.12.4"},
    facts={**{k: v for k, v in FACTS.items() if k != "python"}, "threads": "4", "device": "cpu", "optimizer": "SGD"},
)
IN_STEP = [ClockSample(0.0, 0.0, 0.0)]


def here(**facts: str) -> Host:
    return Host("here", {**FACTS, "distbelief": "1", **facts}, [])


# --- clocks ----------------------------------------------------------------------------------------------------------


@given(
    st.floats(-1e4, 1e4),
    st.lists(st.tuples(st.floats(1e-5, 1), st.floats(1e-5, 1)), min_size=1, max_size=8),
)
def test_the_difference_of_clocks_is_as_close_as_it_says(ahead_s: float, trips: list[tuple[float, float]]) -> None:
    samples, now = [], 1e6
    for there_s, back_s in trips:
        samples.append(ClockSample(now + ahead_s, now + there_s, now + there_s + back_s + ahead_s))
        now += 2
    found = skew(samples)
    assert abs(found.ahead_s - ahead_s) <= found.within_s + 1e-6
    assert found.round_trip_s <= min(sum(trip) for trip in trips) + 1e-6


@pytest.mark.parametrize(("ahead_s", "word"), [(5.0, "ahead of"), (-5.0, "behind")])
def test_a_clock_that_is_off_is_named(ahead_s: float, word: str) -> None:
    found = clock.judge({"b": Skew(0.01, 0.01, 0.02), "c": Skew(ahead_s, 0.01, 0.02)}, "a")
    assert found.status == "problem"
    assert found.found == f"c is 5.0 s {word} a"
    assert "on c" in found.advice


def test_a_clock_is_not_blamed_for_a_slow_way() -> None:
    assert clock.judge({"b": Skew(1.5, 1.0, 2.0)}, "a").status == "ok"


# --- versions --------------------------------------------------------------------------------------------------------


def test_the_host_that_differs_is_named() -> None:
    (found,) = compare.versions({"a": FACTS, "b": {**FACTS, "torch": "2.12.0"}, "c": FACTS})
    assert found.status == "problem"
    assert found.found == "torch: b has 2.12.0, the others have 2.13.0"
    (two,) = compare.versions({"a": FACTS, "b": {**FACTS, "torch": "2.12.0"}})
    assert two.found == "torch: a has 2.13.0, b has 2.12.0"


def test_what_need_not_be_the_same() -> None:
    (found,) = compare.versions({"a": FACTS, "b": {**FACTS, "python": "3.12.9", "threads": "3"}})
    assert found.status == "ok"


@pytest.mark.parametrize("name", ["distbelief", "python", "torch", "numpy", "instruction_set", "MKL-DNN", "driver"])
def test_every_difference_that_matters_is_told(name: str) -> None:
    (found,) = compare.versions({"a": {**FACTS, name: "7.1"}, "b": {**FACTS, name: "7.2"}})
    assert found.status == "problem"
    assert found.advice


# --- links -----------------------------------------------------------------------------------------------------------


def links_between(hosts: str, **odd: Link) -> list[Link]:
    ways = [(a, b) for a in hosts for b in hosts if a != b]
    return [odd.get(a + b, Link(a, b, 0.0002, 1e9)) for a, b in ways]


def problems(findings: list[Finding]) -> list[str]:
    return [finding.found for finding in findings if finding.status == "problem"]


def test_good_links() -> None:
    (found,) = compare.links(links_between("abc"))
    assert found.status == "ok"
    assert "1 GB/s or more" in found.found


def test_the_slow_way_is_named_and_no_other() -> None:
    slow = Link("a", "b", 0.0002, 1e6)
    (found,) = problems(compare.links(links_between("abc", ab=slow)))
    assert found.startswith("a → b: 1 MB/s")
    odd = Link("a", "b", 0.0002, 9e7)
    assert problems(compare.links(links_between("abc", ab=odd)))
    fast_enough = Link("a", "b", 0.0002, 2e8)
    assert not problems(compare.links([fast_enough, *(Link("c", x, 0.0002, 1e10) for x in "de")]))


def test_a_host_whose_ways_are_all_slow_is_named_once() -> None:
    slow = {a + b: Link(a, b, 0.001, 1e6) for a, b in ("ab", "ba", "bc", "cb")}
    (found,) = problems(compare.links(links_between("abc", **slow)))
    assert found == "every way from and to b is slow, 1 MB/s to 1 MB/s; the others have 1 GB/s"


def test_a_network_that_is_slow_everywhere_is_nobodys_fault() -> None:
    everywhere = [Link(link.source, link.target, 0.001, 1e6) for link in links_between("abc")]
    assert len(problems(compare.links(everywhere))) == 6


def test_a_way_that_is_long_and_one_that_is_none() -> None:
    assert problems(compare.links(links_between("ab", ab=Link("a", "b", 0.2, 1e9))))[0].startswith("a → b")
    (found,) = problems(compare.links([Link("a", "b", error="10.0.0.2 by eth0: no route"), Link("a", "c", 0.001, 1e9)]))
    assert found == "a does not reach b: 10.0.0.2 by eth0: no route"


@given(st.integers(2, 33))
def test_every_pair_measures_once_and_nobody_twice_at_a_time(hosts: int) -> None:
    rounds = compare.rounds(hosts)
    assert sorted(pair for pairs in rounds for pair in pairs) == list(combinations(range(hosts), 2))
    for pairs in rounds:
        busy = [host for pair in pairs for host in pair]
        assert len(busy) == len(set(busy))
    assert len(rounds) <= hosts


# --- a run -----------------------------------------------------------------------------------------------------------


def test_a_host_that_could_take_part() -> None:
    found = ofrun.compare_with_run(RUN, here(), IN_STEP)
    assert [one.status for one in found] == ["ok"] * 3
    assert "2 workers on a, b" in found[0].found


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("torch", "2.12.0", "has torch 2.12.0, the run torch 2.13.0"),
        ("instruction_set", "x86_64 AVX2", "computes with x86_64 AVX2"),
        ("python", "3.11.7", "runs Python 3.11"),
        ("distbelief", "2", "distbelief"),
    ],
)
def test_a_host_that_would_be_refused(name: str, value: str, words: str) -> None:
    (found,) = problems(ofrun.compare_with_run(RUN, here(**{name: value}), IN_STEP))
    assert words in found


def test_a_host_without_the_runs_device() -> None:
    run = replace(RUN, facts={**RUN.facts, "device": "cuda"})
    assert problems(ofrun.compare_with_run(run, here(), IN_STEP)) == [
        "the run computes on cuda, and there is none here that works"
    ]
    with_gpu = Host("here", here().facts, [ok("GPU 0", "fine")])
    assert problems(ofrun.compare_with_run(run, with_gpu, IN_STEP)) == []


def test_a_run_in_which_nobody_is_ready_yet() -> None:
    found = ofrun.compare_with_run(replace(RUN, facts={}), here(), IN_STEP)
    assert "skipped" in [one.status for one in found]


# --- the report ------------------------------------------------------------------------------------------------------


def test_a_report_as_text() -> None:
    bad = problem("run directory", "full", "free some space")
    whole = Report([Host("a", {}, [ok("memory", "plenty"), bad])], [ok("hosts", "all")], [Link("a", "b", error="cut")])
    said = "\n".join(report.lines(whole))
    assert "OK       memory         plenty" in said
    assert "PROBLEM  run directory  full" in said
    assert "what to do:    free some space" in said
    assert "a → b" in said
    assert said.endswith("1 problem")
    assert list(report.lines(Report([Host("a", {}, [])])))[-1] == "all is well"
