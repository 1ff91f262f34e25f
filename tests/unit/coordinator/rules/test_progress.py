from __future__ import annotations

from distbelief.control.messages import Evaluation, Heartbeat, Member, StepReport, Timing
from distbelief.coordinator.rules.progress import REMEMBERED, Progress, absorb, forget, workers_line

MEMBERS = [Member(0, "here", (0, 2)), Member(1, "here", (2, 4))]


def beat(worker: int = 0, step: int = 0, timing: Timing | None = None, **lists: list) -> Heartbeat:
    return Heartbeat(worker=worker, epoch=1, generation=1, step=step, timing=timing or Timing(), **lists)


def report(step: int, fingerprint: str = "aa") -> StepReport:
    return StepReport(step=step, loss=0.5, samples=8, fingerprint=fingerprint, at=99.0, generation=3)


def kinds(lines: list[dict]) -> list[str]:
    return [line["kind"] for line in lines if line["kind"] != "workers"]


def test_each_step_is_reported_once() -> None:
    progress, lines = absorb(Progress(), MEMBERS, beat(reports=[report(0), report(1)]), 10.0)
    line = {"step": 0, "loss": 0.5, "samples": 8, "fingerprint": "aa", "generation": 3, "at": 99.0}
    assert lines[0] == {"kind": "step", **line}
    assert kinds(lines) == ["step", "step"]
    progress, lines = absorb(progress, MEMBERS, beat(reports=[report(1), report(2)]), 10.1)
    assert [line["step"] for line in lines] == [2]


def test_the_same_step_with_another_fingerprint_is_told() -> None:
    progress, _ = absorb(Progress(), MEMBERS, beat(reports=[report(3, "aa")]), 10.0)
    _, lines = absorb(progress, MEMBERS, beat(reports=[report(3, "bb")]), 10.1)
    assert kinds(lines) == ["notice"]
    assert "step 3" in lines[0]["text"]
    assert "aa" in lines[0]["text"]
    assert "bb" in lines[0]["text"]


def test_complete_is_the_first_step_that_nobody_has_reported() -> None:
    progress = Progress()
    for steps, complete in [([1], 0), ([0], 2), ([4, 3], 2), ([2], 5)]:
        progress, _ = absorb(progress, MEMBERS, beat(reports=[report(step) for step in steps]), 10.0)
        assert progress.reported.complete == complete


def test_each_evaluation_is_reported_once() -> None:
    evaluation = Evaluation(step=5, metrics={"accuracy": 0.9})
    progress, lines = absorb(Progress(), MEMBERS, beat(evaluations=[evaluation, evaluation]), 10.0)
    assert lines[0] == {"kind": "evaluation", "step": 5, "metrics": {"accuracy": 0.9}, "at": 10.0}
    assert kinds(lines) == ["evaluation"]
    _, lines = absorb(progress, MEMBERS, beat(evaluations=[evaluation]), 10.1)
    assert kinds(lines) == []


def test_a_workers_line_at_most_once_a_second() -> None:
    progress, first = absorb(Progress(), MEMBERS, beat(0, 3), 10.0)
    progress, second = absorb(progress, MEMBERS, beat(1, 2), 10.9)
    progress, third = absorb(progress, MEMBERS, beat(0, 4, Timing(1.0, 2.0, 3.0, 8)), 11.0)
    assert [line["kind"] for line in first] == ["workers"]
    assert second == []
    (line,) = third
    assert line == {
        "kind": "workers",
        "at": 11.0,
        "generation": 1,
        "step": 4,
        "workers": [
            {
                "worker": 0,
                "host": "here",
                "first": 0,
                "end": 2,
                "step": 4,
                "data_s": 1.0,
                "compute_s": 2.0,
                "comm_s": 3.0,
                "shards": 8,
            },
            {
                "worker": 1,
                "host": "here",
                "first": 2,
                "end": 4,
                "step": 2,
                "data_s": 0.0,
                "compute_s": 0.0,
                "comm_s": 0.0,
                "shards": 0,
            },
        ],
    }


def test_memory_is_bounded_and_what_is_forgotten_counts_as_reported() -> None:
    progress = Progress()
    told = 0
    for start in range(0, 3 * REMEMBERED, 256):
        beats = beat(reports=[report(step) for step in range(start, start + 256)])
        progress, lines = absorb(progress, MEMBERS, beats, 0.0)
        told += kinds(lines).count("step")
    assert told == 3 * REMEMBERED
    assert len(progress.reported.values) == REMEMBERED
    _, lines = absorb(progress, MEMBERS, beat(reports=[report(1), report(3 * REMEMBERED)]), 0.0)
    assert [line["step"] for line in lines] == [3 * REMEMBERED]


def test_absorbing_changes_nothing_in_place() -> None:
    before, _ = absorb(Progress(), MEMBERS, beat(reports=[report(0)]), 0.0)
    absorb(before, MEMBERS, beat(1, 7, reports=[report(1)]), 0.5)
    assert dict(before.reported.values) == {0: "aa"}
    assert workers_line(before, MEMBERS, 1, 0.0)["step"] == 0


def test_where_results_are_not_exact_a_step_with_another_one_was_executed_again_and_the_last_report_counts() -> None:
    progress, _ = absorb(Progress(), MEMBERS, beat(reports=[report(3, "aa")]), 10.0, exact=False)
    progress, lines = absorb(progress, MEMBERS, beat(reports=[report(3, "bb")]), 10.1, exact=False)
    assert [(line["kind"], line["fingerprint"]) for line in lines] == [("step", "bb")]
    _, lines = absorb(progress, MEMBERS, beat(reports=[report(3, "bb")]), 10.2, exact=False)
    assert lines == [], "a repeat is still a repeat"


def test_what_comes_after_a_state_to_which_the_run_goes_back_is_reported_again() -> None:
    evaluations = [Evaluation(step, {"accuracy": 0.5}) for step in (2, 4)]
    reports = [report(step) for step in range(5)]
    progress, _ = absorb(Progress(), MEMBERS, beat(reports=reports, evaluations=evaluations), 10.0)
    progress = forget(progress, step=2, reached=5)
    assert (progress.reported.complete, progress.redone) == (2, 5)
    progress, lines = absorb(progress, MEMBERS, beat(reports=reports, evaluations=evaluations), 10.1)
    assert [(line["kind"], line["step"]) for line in lines] == [
        ("step", 2), ("step", 3), ("step", 4), ("evaluation", 4)
    ]  # fmt: skip
    assert progress.reported.complete == 5


def test_a_run_may_go_back_further_than_is_remembered() -> None:
    progress = Progress()
    for first in range(0, REMEMBERED + 200, 100):
        progress, _ = absorb(progress, MEMBERS, beat(reports=[report(first + n) for n in range(100)]), 10.0)
    progress, lines = absorb(forget(progress, 7, 1300), MEMBERS, beat(reports=[report(6), report(7)]), 10.1)
    assert [line["step"] for line in lines if line["kind"] == "step"] == [7]


def test_a_workers_line_names_places_and_whom_a_member_waits_for_by_the_number_of_the_worker() -> None:
    members = [Member(4, "here", (0, 4), 1, "stage 1/2"), Member(9, "here", (0, 4), 2, "stage 2/2")]
    progress, _ = absorb(Progress(), members, beat(9, 3, Timing(1.0, 2.0, 3.0, 8, {0: 2.5, 7: 1.0})), 10.0)
    first, second = workers_line(progress, members, 1, 10.0)["workers"]
    assert (first["place"], "waits" in first) == ("stage 1/2", False)
    assert (second["place"], second["waits"]) == ("stage 2/2", {4: 2.5})
