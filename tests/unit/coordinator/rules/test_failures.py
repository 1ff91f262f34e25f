"""Workers that fail, or end before the run has started, by plain calls."""

from __future__ import annotations

import msgspec
import pytest

from distbelief.control import messages as m
from distbelief.coordinator.rules import state as s
from distbelief.coordinator.rules.regroup import MOST_FAILED_HIRES
from distbelief.coordinator.rules.vocabulary import EXIT_GRACE_S, REPORTED_GRACE_S
from tests.support.coordinator.play import Run, ended, failure, finished, hired, lines, records, sends, starts, texts

# --- a failure that is reported is not a death: it ends the run ------------------------------------------------------


@pytest.mark.parametrize("training", [False, True])
def test_the_first_failure_ends_the_run_and_later_ones_are_ignored(training: bool) -> None:
    run = Run()
    run.join(0, 1)
    if training:
        run.ready(0, 1)
    outputs = run.feed(failure(1, "first"))
    entry = ended(outputs)
    assert entry["status"] == "failed"
    assert entry["reason"] == "first"
    assert entry["failure"] == msgspec.to_builtins(failure(1, "first"))
    assert [worker for worker, _ in sends(outputs)] == [0, 1, s.ENGINE]
    assert run.feed(failure(0, "second"), m.WorkerExited(worker=0, status=1), finished(0), s.Ticked()) == []


@pytest.mark.parametrize("status", [m.EXIT_REPORTED, 1])
def test_a_report_that_comes_after_the_exit_is_what_is_shown(status: int) -> None:
    run = Run().started(0, 1)
    assert run.feed(m.WorkerExited(worker=1, status=status), now=20.0) == []
    entry = ended(run.feed(failure(1, "true cause"), now=20.2))
    assert entry["reason"] == "true cause"
    assert entry["failure"]["traceback"] == "tb"
    assert entry["exits"] == []


def test_another_members_report_mentions_the_exits_that_were_seen() -> None:
    run = Run().started(0, 1)
    run.feed(m.WorkerExited(worker=1, status=1), now=20.0)
    entry = ended(run.feed(failure(0, "lost my peer"), now=20.1))
    assert entry["exits"] == ["worker 1 (host here, pid 101) exited with status 1"]


# --- workers that the run can do without -----------------------------------------------------------------------------


def test_a_failing_spare_does_not_end_the_run() -> None:
    run = Run(workers=5).started(0, 1, 2, 3, 4)
    outputs = run.feed(failure(4))
    assert "worker 4 failed" in texts(outputs)
    assert run.state.phase == "training"
    assert hired(outputs) == [5]
    ((worker, goodbye),) = [(to, c) for to, c in sends(outputs) if isinstance(c, m.EndRun)]
    assert (worker, goodbye.status) == (4, "failed")
    assert run.feed(m.WorkerExited(worker=4, status=m.EXIT_REPORTED)) == [], "it was let go"
    assert hired(run.feed(failure(4))) == [], "told again, it is not replaced twice"


def test_a_spare_that_is_gone_is_a_notice_and_is_replaced() -> None:
    run = Run(workers=5).started(0, 1, 2, 3, 4)
    outputs = run.feed(m.WorkerExited(worker=4, status=-9), m.WorkerExited(worker=4, status=-9))
    (line,) = lines(outputs)
    assert "worker 4 (host here, pid 104), which was no member, was killed by SIGKILL" in line["text"]
    assert hired(outputs) == [5]
    assert run.state.generation == 1
    assert run.feed(s.Ticked(), now=1.5) == []
    run.join(5)
    assert sends(run.ready(5)) == [(5, run.state.start)]


def test_newcomers_that_come_to_nothing_are_started_again_but_not_for_ever() -> None:
    run = Run().started(0, 1)
    assert hired(run.kill(1)) == [2]
    for attempt in range(1, MOST_FAILED_HIRES):
        outputs = run.kill(1 + attempt)
        assert hired(outputs) == [2 + attempt], "the next one, with a number of its own"
        assert "which was no member, was killed by SIGKILL" in texts(outputs)
    outputs = run.kill(1 + MOST_FAILED_HIRES)
    assert hired(outputs) == []
    assert f"after {MOST_FAILED_HIRES} such failures no more are started (distbelief scale tries again)" in texts(
        outputs
    )
    assert run.state.phase == "training"
    again = run.feed(m.ScaleRequested(workers=2))
    assert hired(again) == [2 + MOST_FAILED_HIRES]


def test_one_that_gets_ready_forgives_those_that_failed_before_it() -> None:
    run = Run().started(0, 1)
    run.kill(1)
    run.kill(2)
    run.arrive(3)
    assert run.members == [0, 3]
    run.kill(3)
    for worker in range(4, 4 + MOST_FAILED_HIRES - 1):
        assert hired(run.kill(worker)) == [worker + 1]


def test_a_newcomer_that_fails_while_it_loads_counts_once() -> None:
    run = Run().started(0, 1)
    run.kill(1)
    run.join(2)
    outputs = run.feed(failure(2), m.WorkerExited(worker=2, status=m.EXIT_REPORTED))
    assert hired(outputs) == [3]
    assert run.state.troubles.failed_hires == 1


# --- before the run has started --------------------------------------------------------------------------------------


@pytest.mark.parametrize("joined", [False, True])
def test_a_worker_that_dies_before_the_start_is_replaced(joined: bool) -> None:
    run = Run()
    run.join(0, *([1] if joined else []))
    outputs = run.kill(1)
    assert hired(outputs) == [2], "one for one: the others are on their way"
    assert records(outputs, "lost")[0]["worker"] == 1
    assert "before the run had started" in texts(outputs)
    run.ready(0)
    assert starts(run.arrive(2)).keys() == {0, 2}


def test_a_cause_is_waited_for_before_a_replacement_is_started() -> None:
    run = Run()
    run.join(0, 1)
    assert run.feed(m.WorkerExited(worker=1, status=1), now=2.0) == []
    assert run.feed(s.Ticked(), now=2.0 + EXIT_GRACE_S / 2) == []
    assert hired(run.feed(s.Ticked(), now=2.0 + EXIT_GRACE_S)) == [2]


def test_an_announced_report_is_waited_for_longer_but_not_for_ever() -> None:
    run = Run().started(0, 1)
    run.feed(m.WorkerExited(worker=1, status=m.EXIT_REPORTED), now=20.0)
    assert run.feed(s.Ticked(), now=20.0 + REPORTED_GRACE_S - 0.01) == []
    (lost,) = records(run.feed(s.Ticked(), now=20.0 + REPORTED_GRACE_S), "lost")
    assert "exited with status 3" in lost["reason"]


def test_three_deaths_before_the_start_end_it() -> None:
    run = Run()
    run.kill(0)
    run.kill(1)
    entry = ended(run.kill(2))
    assert entry["status"] == "failed"
    assert "3 workers have died one after the other" in entry["reason"]
    assert "the last: worker 2 was killed by SIGKILL (out of memory?) before the run had started" in entry["reason"]
    assert entry["failure"]["hint"] == "look in logs/worker-2.log"


def test_an_exit_that_overtakes_the_joining_still_counts() -> None:
    run = Run()
    run.feed(m.WorkerExited(worker=1, status=1), now=2.0)
    run.join(0, 1, now=2.0)
    assert not starts(run.ready(0, now=2.0) + run.ready(1, now=2.0))
    (lost,) = records(run.feed(s.Ticked(), now=3.0), "lost")
    assert "worker 1 (host here, pid 101)" in lost["reason"]


def test_a_generation_never_starts_with_a_worker_that_is_gone() -> None:
    run = Run(workers=2)
    run.join(0, 1, 2)
    run.ready(0)
    run.feed(m.WorkerExited(worker=0, status=1), now=1.0)
    assert not starts(run.ready(1, 2)), "a pending exit decides first"
    run.feed(s.Ticked(), now=3.0)
    assert starts(run.arrive(3, now=3.0)).keys() <= {1, 2, 3}
    assert 0 not in run.members


def test_no_number_is_used_by_two_processes() -> None:
    run = Run().started(0, 1)
    run.kill(1)
    with pytest.raises(s.ProtocolError, match="give it another"):
        run.feed(m.WorkerJoined(worker=1, host="here", pid=555))
    with pytest.raises(s.ProtocolError, match="alive"):
        run.feed(m.WorkerJoined(worker=0, host="here", pid=555))
    assert 1 not in run.members


# --- at the end ------------------------------------------------------------------------------------------------------


def test_a_member_that_has_finished_may_exit() -> None:
    run = Run().started(0, 1)
    run.feed(finished(1), m.WorkerExited(worker=1, status=0), now=2.0)
    assert run.feed(s.Ticked(), now=2.5) == []
    assert ended(run.feed(finished(0), now=3.0))["status"] == "completed"


def test_an_exit_that_overtakes_the_finish_is_no_loss() -> None:
    run = Run().started(0, 1)
    run.feed(m.WorkerExited(worker=1, status=0), now=2.0)
    run.feed(finished(1), now=2.1)
    assert run.feed(s.Ticked(), now=2.5) == []
    assert ended(run.feed(finished(0), now=3.0))["status"] == "completed"
