"""Records of two runs and notes of faults in, a verdict out."""

from __future__ import annotations

import doctest
import io
import json
from dataclasses import replace
from typing import Any

import pytest

from distbelief.chaos import report
from distbelief.chaos.report import as_json, print_table, sentence, totals
from distbelief.chaos.rules.verdict import Closeness, Evidence, Note, Record, Verdict, judge, together

BEGAN = 1000.0


def step(number: int, at: float, generation: int = 1, **changes: Any) -> Record:
    usual = {"kind": "step", "step": number, "loss": 1.0, "samples": 16, "fingerprint": f"f{number}"}
    return {**usual, "generation": generation, "at": BEGAN + at, **changes}


def generation(number: int, at: float, cause: str = "death", lost: tuple[int, ...] = ()) -> Record:
    return {
        "kind": "generation",
        "generation": number,
        "members": [],
        "cause": cause,
        "lost": list(lost),
        "at": BEGAN + at,
        "epoch": 1,
    }


def recovery(number: int, recomputed: int) -> Record:
    return {"kind": "recovery", "generation": number, "step": 3, "recomputed": recomputed, "at": BEGAN}


def note(kind: str, at: float, worker: int | None = None) -> Note:
    return Note(kind, kind, BEGAN + at, worker)


TWIN = Evidence("runs/twin", 6, "a" * 64, tuple(step(t, t * 0.1) for t in range(6)))


def faulty(*metrics: Record, journal: tuple[Record, ...] = (), sha: str = "a" * 64) -> Evidence:
    return Evidence("runs/faults", 6, sha, metrics, journal)


def steps(*times: float, first: int = 0, generation: int = 1) -> list[Record]:
    return [step(first + i, at, generation) for i, at in enumerate(times)]


ALL = steps(0.0, 0.1, 0.2, 0.3, 0.4, 0.5)


# --- the whole run ---------------------------------------------------------------------------------------------------


def test_a_run_like_its_twin() -> None:
    verdict = judge(TWIN, faulty(*ALL), [])
    assert verdict == Verdict(True, 0, True, pytest.approx(1.0))
    assert verdict.sound


def test_goodput_is_speed_over_the_twins_speed() -> None:
    verdict = judge(TWIN, faulty(*steps(0.0, 0.1, 0.2, 0.8, 0.9, 1.0)), [])
    assert verdict.goodput == pytest.approx(0.5)
    # What is done twice takes time but is no work.
    again = judge(TWIN, faulty(*steps(0.0, 0.1, 0.2), step(2, 0.5, 2), *steps(0.8, 0.9, 1.0, first=3)), [])
    assert again.goodput == pytest.approx(0.5)
    assert judge(replace(TWIN, metrics=(), steps=0), faulty(), []).goodput is None


def test_other_weights() -> None:
    verdict = judge(TWIN, faulty(*ALL, sha="b" * 64), [])
    assert (verdict.weights_equal, verdict.steps_lost, verdict.exactly_once) == (False, 0, True)
    assert not verdict.sound
    assert judge(TWIN, faulty(*ALL, sha="b" * 64), [], "nothing").sound
    assert not judge(replace(TWIN, weights_sha256=""), faulty(*ALL, sha=""), []).weights_equal


def test_a_missing_step_a_step_too_many_and_a_step_done_twice() -> None:
    missing = judge(TWIN, faulty(*ALL[:3], *ALL[4:]), [])
    assert (missing.steps_lost, missing.exactly_once) == (1, False)
    twice = judge(TWIN, faulty(*ALL, step(3, 0.6, 2)), [])
    assert (twice.steps_lost, twice.exactly_once) == (1, False)
    beyond = judge(TWIN, faulty(*ALL, step(6, 0.6)), [])
    assert (beyond.steps_lost, beyond.exactly_once) == (0, False)
    assert not any(verdict.sound for verdict in (missing, twice, beyond))


def test_a_step_with_another_result_is_not_lost_but_differs_where_results_are_promised() -> None:
    other = [*ALL[:3], {**ALL[3], "fingerprint": "x"}, *ALL[4:]]
    verdict = judge(TWIN, faulty(*other), [])
    assert (verdict.steps_lost, verdict.steps_differing, verdict.sound) == (0, 1, False)
    assert sentence(verdict, []) == "No fault was carried out; the run had other results in 1 step."
    assert ("other results", "1 step") in totals(verdict)
    both = together([verdict, judge(TWIN, faulty(*ALL), [])])
    assert (both.steps_differing, both.sound) == (1, False)
    verdict = judge(TWIN, faulty(*other), [], "nothing")
    assert (verdict.steps_lost, verdict.steps_differing, verdict.sound) == (0, 0, True)


def test_a_step_over_fewer_samples() -> None:
    verdict = judge(TWIN, faulty(*ALL[:3], {**ALL[3], "samples": 12}, *ALL[4:]), [])
    assert (verdict.steps_lost, verdict.exactly_once) == (0, False)


def test_several_runs_together() -> None:
    good, bad = Verdict(True, 0, True, 0.9), Verdict(True, 2, False, 0.5)
    assert together([good, good]) == Verdict(True, 0, True, 0.9)
    assert together([good, bad, Verdict(False, 1, True, None)]) == Verdict(False, 3, False, pytest.approx(0.7))


# --- a divided model: members may go back ---------------------------------------------------------------------------

NEAR = Closeness(True, 3e-7)


def rollback(number: int, step: int, reached: int, at: float) -> Record:
    facts = {"generation": number, "step": step, "reached": reached, "source": "snapshots"}
    return {"kind": "rollback", **facts, "at": BEGAN + at}


WENT_BACK = (
    *steps(0.0, 0.1, 0.2, 0.3),
    rollback(2, 1, 4, 0.35),
    *[{**one, "fingerprint": "other"} for one in steps(0.4, 0.5, 0.6, 0.8, 1.0, first=1, generation=2)],
)


def test_steps_executed_again_after_going_back_are_not_lost() -> None:
    verdict = judge(TWIN, faulty(*WENT_BACK, sha="b" * 64), [], "rounding", NEAR)
    assert (verdict.steps_lost, verdict.exactly_once, verdict.reexecuted) == (0, True, 3)
    assert verdict.weights_equal
    assert verdict.sound
    assert verdict.goodput == pytest.approx(0.5)  # what was done again is time, but no work


def test_going_back_to_the_first_step_and_going_back_twice() -> None:
    records = [
        *steps(0.0, 0.1),
        rollback(2, 0, 2, 0.15),
        *steps(0.2, 0.3, 0.4, generation=2),
        rollback(3, 2, 3, 0.45),
        *steps(0.5, 0.6, 0.7, 0.8, first=2, generation=3),
    ]
    verdict = judge(TWIN, faulty(*records), [], "rounding", NEAR)
    assert (verdict.steps_lost, verdict.exactly_once, verdict.reexecuted) == (0, True, 3)


def test_a_step_that_does_not_come_again_after_going_back_is_lost() -> None:
    short = [record for record in WENT_BACK if (record.get("step"), record.get("generation")) != (3, 2)]
    verdict = judge(TWIN, faulty(*short), [], "rounding", NEAR)
    assert (verdict.steps_lost, verdict.exactly_once) == (1, False)
    unsaid = [record for record in WENT_BACK if record["kind"] != "rollback"]
    verdict = judge(TWIN, faulty(*unsaid), [], "rounding", NEAR)
    assert (verdict.steps_lost, verdict.exactly_once, verdict.reexecuted) == (3, False, 0)


def test_nobody_goes_back_where_the_same_bits_are_promised() -> None:
    verdict = judge(TWIN, faulty(*WENT_BACK), [])
    assert not verdict.sound
    assert not verdict.exactly_once


def test_a_fault_after_going_back_is_at_the_step_that_counts() -> None:
    notes = [note("kill worker", 0.32, 1), note("slow worker", 0.55, 0)]
    run = faulty(*WENT_BACK, journal=(generation(2, 0.34, "death", (1,)),))
    killed, slowed = judge(TWIN, run, notes, "rounding", NEAR).faults
    assert (killed.at_step, slowed.at_step) == (4, 3)
    assert killed.next_commit_ms == pytest.approx(80, abs=0.01)


def test_weights_further_away_than_rounding_are_no_success() -> None:
    for away in (Closeness(False, 0.3), Closeness(False, 0.3, noisy=True)):
        verdict = judge(TWIN, faulty(*WENT_BACK), [], "rounding", away)
        assert not verdict.weights_equal  # whatever the hashes say
        assert not verdict.sound
    both = together([judge(TWIN, faulty(*WENT_BACK), [], "rounding", near) for near in (NEAR, away)])
    assert (both.closeness, both.reexecuted, both.sound) == (away, 6, False)


def test_what_is_said_of_a_run_that_went_back() -> None:
    verdict = judge(TWIN, faulty(*WENT_BACK), [], "rounding", NEAR)
    stream = io.StringIO()
    print_table(verdict, [], stream)
    assert stream.getvalue().splitlines() == [
        "weights: equal to the twin's within rounding (at most 3e-07 of a tensor's largest number apart)",
        "steps lost: 0",
        "executed again: 3 steps",
        "samples: visited exactly once",
        "goodput: 50 % of the twin's",
        "No fault was carried out; the run came to the weights of its twin within rounding, 3 steps executed again, "
        "no step lost, every sample visited once.",
    ]
    shown = as_json(verdict)
    assert (shown["weights_equal"], shown["reexecuted"], shown["difference"]) == (True, 3, 3e-7)
    away = replace(verdict, weights_equal=False, closeness=Closeness(False, float("inf")))
    assert json.loads(json.dumps(as_json(away), allow_nan=False))["difference"] is None
    assert "came to other weights than its twin" in sentence(away, [])
    noisy = replace(away, closeness=Closeness(False, 0.2, noisy=True))
    assert "cannot be compared with its twin" in sentence(noisy, [])


# --- faults ----------------------------------------------------------------------------------------------------------


def test_a_killed_worker() -> None:
    run = faulty(
        *steps(0.0, 0.1, 0.2),
        step(3, 0.253, 2),
        recovery(2, 3),
        *steps(0.3, 0.4, first=4, generation=2),
        journal=(generation(1, -1.0, "start"), generation(2, 0.26, "death", (2,))),
    )
    (fault,) = judge(TWIN, run, [note("kill worker", 0.25, 2)]).faults
    assert fault.at_step == 3
    assert fault.noticed_ms == pytest.approx(10, abs=0.01)
    # The commit at 0.253 was on its way when the blow fell and found by the survivors: their own first is what counts.
    assert fault.next_commit_ms == pytest.approx(50, abs=0.01)
    assert fault.shards_recomputed == 3


def test_a_death_that_needed_no_recovery_and_another_workers_death() -> None:
    journal = (generation(2, 0.22, "death", (1,)), generation(3, 0.36, "join", (2,)))
    run = faulty(*steps(0.0, 0.1, 0.2), *steps(0.3, 0.4, 0.5, first=3, generation=3), recovery(2, 5), journal=journal)
    (fault,) = judge(TWIN, run, [note("kill worker", 0.21, 2)]).faults
    assert fault.noticed_ms == pytest.approx(150, abs=0.01)  # written down with the next change, whatever caused that
    assert fault.shards_recomputed == 0


def test_a_frozen_worker_that_is_fenced_and_one_that_was_waited_for() -> None:
    fenced = {"kind": "fenced", "worker": 2, "reason": "frozen", "at": BEGAN + 0.24, "epoch": 1}
    run = faulty(
        *steps(0.0, 0.1, 0.2),
        *steps(0.3, 0.4, 0.5, first=3, generation=2),
        journal=(fenced, generation(2, 0.28, "death", (2,))),
    )
    struck, spared = judge(TWIN, run, [note("freeze worker", 0.21, 2), note("freeze worker", 0.32, 1)]).faults
    assert struck.noticed_ms == pytest.approx(30, abs=0.01)
    assert struck.next_commit_ms == pytest.approx(90, abs=0.01)
    assert (spared.noticed_ms, spared.shards_recomputed) == (None, None)
    assert spared.next_commit_ms == pytest.approx(80, abs=0.01)


def test_a_fault_is_not_given_the_answer_to_a_later_one() -> None:
    run = faulty(*ALL, journal=(generation(2, 0.35, "death", (2,)),))
    froze, killed = judge(TWIN, run, [note("freeze worker", 0.11, 2), note("kill worker", 0.34, 2)]).faults
    assert froze.noticed_ms is None
    assert killed.noticed_ms == pytest.approx(10, abs=0.01)


def test_a_killed_coordinator() -> None:
    epochs = tuple(
        {"kind": "epoch", "epoch": number, "pid": number, "at": BEGAN + at, "reason": ""}
        for number, at in ((1, -2.0), (2, 0.31), (3, 0.45))
    )
    last_words = generation(2, 0.251, "join")  # written by the one that is about to die
    journal = (epochs[0], last_words, *epochs[1:])
    (fault,) = judge(TWIN, faulty(*ALL, journal=journal), [note("kill coordinator", 0.25)]).faults
    assert fault.noticed_ms == pytest.approx(60, abs=0.01)
    assert fault.next_commit_ms == pytest.approx(50, abs=0.01)
    assert fault.shards_recomputed is None


def test_a_lost_terminal_is_noticed_when_the_run_has_stopped() -> None:
    """A generation that a death brought before the end is no answer."""
    ended, resumed = {"kind": "ended", "at": BEGAN + 0.5}, {"kind": "resumed", "at": BEGAN + 2.0}
    journal = (generation(1, 0.0, "start"), generation(2, 0.3), ended, resumed, generation(3, 3.0, "start"))
    metrics = [*steps(0.0, 0.1), *steps(0.35, first=2, generation=2), *steps(3.2, 3.3, 3.4, first=3, generation=3)]
    (outcome,) = judge(TWIN, faulty(*metrics, journal=journal), [note("drop terminal", 0.2)]).faults
    assert (outcome.noticed_ms, outcome.next_commit_ms) == (pytest.approx(300), pytest.approx(3000))
    (none,) = judge(TWIN, faulty(*metrics, journal=journal[:2]), [note("drop terminal", 0.2)]).faults
    assert none.noticed_ms is None


def test_a_killed_parameter_server() -> None:
    """It is noticed when a map without it is written down; no generation follows."""
    maps = [{"kind": "servers", "gone": gone, "at": BEGAN + at} for gone, at in [([], 0.0), ([0], 0.2), ([0, 2], 0.35)]]
    blow = replace(note("kill server", 0.25), server=2)
    (outcome,) = judge(TWIN, faulty(*ALL, journal=tuple(maps)), [blow]).faults
    assert outcome.noticed_ms == pytest.approx(100)
    assert outcome.next_commit_ms == pytest.approx(50)
    assert outcome.shards_recomputed is None


def test_planned_changes_and_a_slow_worker() -> None:
    journal = (generation(2, 0.32, "join"), generation(3, 0.42, "leave"), generation(4, 0.48, "balance"))
    run = faulty(*steps(0.0, 0.1, 0.2, 0.3), step(4, 0.4, 2), step(5, 0.5, 3), journal=journal)
    faults = [note("slow worker", 0.05, 1), note("join", 0.15), note("leave worker", 0.35, 0), note("scale", 0.41)]
    slow, join, leave, scale = judge(TWIN, run, faults).faults
    assert (slow.noticed_ms, slow.next_commit_ms) == (None, pytest.approx(50, abs=0.01))
    assert (join.noticed_ms, join.next_commit_ms) == (pytest.approx(170, abs=0.01), pytest.approx(50, abs=0.01))
    assert (leave.noticed_ms, leave.next_commit_ms) == (pytest.approx(70, abs=0.01), pytest.approx(150, abs=0.01))
    assert scale.noticed_ms == pytest.approx(10, abs=0.01)


def test_a_request_is_noticed_when_it_is_written_down() -> None:
    journal = (
        {"kind": "leaves", "worker": 1, "at": BEGAN + 0.12, "epoch": 1},
        {"kind": "scaled", "target": 4, "at": BEGAN + 0.16, "epoch": 1},
        {"kind": "leaves", "worker": 0, "at": BEGAN + 0.18, "epoch": 1},
        generation(2, 0.3, "join"),
    )
    join, leave = judge(TWIN, faulty(*ALL, journal=journal), [note("join", 0.15), note("leave worker", 0.11, 0)]).faults
    assert join.noticed_ms == pytest.approx(10, abs=0.01)
    assert join.shards_recomputed == 0
    assert leave.noticed_ms == pytest.approx(70, abs=0.01)
    assert leave.shards_recomputed is None


def test_a_death_is_noticed_when_it_is_written_down() -> None:
    lost = {"kind": "lost", "worker": 2, "status": -9, "at": BEGAN + 0.255, "epoch": 1}
    run = faulty(*ALL, journal=({**lost, "worker": 1}, lost, generation(2, 0.26, "death", (2,))))
    (fault,) = judge(TWIN, run, [note("kill worker", 0.25, 2)]).faults
    assert fault.noticed_ms == pytest.approx(5, abs=0.01)


def test_a_fault_after_the_last_commit() -> None:
    (fault,) = judge(TWIN, faulty(*ALL), [note("kill worker", 0.6, 1)]).faults
    assert (fault.at_step, fault.noticed_ms, fault.next_commit_ms, fault.shards_recomputed) == (6, None, None, None)


# --- what is shown ---------------------------------------------------------------------------------------------------


def verdict_of_a_kill() -> Verdict:
    journal = (generation(2, 0.26, "death", (2,)),)
    run = faulty(*steps(0.0, 0.1, 0.2), *steps(0.3, 0.4, 0.5, first=3, generation=2), recovery(2, 3), journal=journal)
    return judge(TWIN, run, [note("kill worker", 0.25, 2)])


def test_the_object_has_the_promised_keys() -> None:
    shown = json.loads(json.dumps(as_json(verdict_of_a_kill()), allow_nan=False))
    assert list(shown) == [
        "weights_equal",
        "steps_lost",
        "steps_differing",
        "exactly_once",
        "goodput",
        "reexecuted",
        "difference",
        "faults",
    ]
    assert (shown["reexecuted"], shown["difference"]) == (0, None)
    (fault,) = shown["faults"]
    assert list(fault) == ["kind", "at_step", "noticed_ms", "next_commit_ms", "shards_recomputed"]
    assert (fault["kind"], fault["at_step"], fault["shards_recomputed"]) == ("kill worker", 3, 3)


def test_the_table_in_a_pipe() -> None:
    stream = io.StringIO()
    print_table(verdict_of_a_kill(), ["join at step 90 (the run ended before)"], stream)
    assert stream.getvalue().splitlines() == [
        "fault        at step  noticed  next commit  shards recomputed",
        "kill worker        3  10.0 ms      50.0 ms                  3",
        "weights: equal to the twin's",
        "steps lost: 0",
        "samples: visited exactly once",
        "goodput: 100 % of the twin's",
        "not carried out: join at step 90 (the run ended before)",
        "After 1 fault the run came to the weights of its twin, no step lost, every sample visited once; "
        "1 fault not carried out.",
    ]


def test_the_sentence_says_what_went_wrong() -> None:
    assert sentence(Verdict(False, 2, False, None), []) == (
        "No fault was carried out; the run came to other weights than its twin, lost 2 steps, "
        "did not visit every sample exactly once."
    )
    assert "came to its end" in sentence(Verdict(False, 0, True, None, promise="nothing"), [])


def test_the_examples_in_the_docstrings() -> None:
    assert doctest.testmod(report).failed == 0
