"""Members that fail or are gone, by plain calls."""

from __future__ import annotations

import msgspec
import pytest
from coordinator_play import Run, ended, failure, finished, heartbeat, lines, sends

from distbelief.comm import messages as m
from distbelief.coordinator import state as s
from distbelief.coordinator.vocabulary import EXIT_GRACE_S, REPORTED_GRACE_S


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


def test_a_failing_spare_does_not_end_the_run() -> None:
    run = Run(workers=5).started(0, 1, 2, 3, 4)
    outputs = run.feed(failure(4))
    assert "worker 4 failed" in lines(outputs, "notice")[0]["text"]
    assert run.state.phase == "training"


@pytest.mark.parametrize(
    ("status", "words"), [(-9, "was killed by SIGKILL (out of memory?)"), (1, "exited with status 1"), (0, "status 0")]
)
def test_a_member_that_is_gone_ends_the_run_after_a_short_grace(status: int, words: str) -> None:
    run = Run().started(0, 1)
    run.feed(heartbeat(worker=1, step=6))
    assert run.feed(m.WorkerExited(worker=1, status=status), now=20.0) == []
    assert run.feed(s.Ticked(), now=20.0 + EXIT_GRACE_S / 2) == []
    outputs = run.feed(s.Ticked(), now=20.0 + EXIT_GRACE_S)
    entry = ended(outputs)
    assert entry["status"] == "failed"
    assert entry["reason"].startswith("worker 1 (host here, pid 101) ")
    assert words in entry["reason"]
    assert "after 6 steps" in entry["reason"]
    assert entry["failure"]["hint"] == "look in logs/worker-1.log"
    assert entry["failure"]["kind"] == "exit"
    assert entry["exits"] == []
    assert [worker for worker, _ in sends(outputs)] == [0, s.ENGINE], "the dead are not spoken to"


@pytest.mark.parametrize("status", [m.EXIT_REPORTED, 1, -6])
def test_a_report_that_comes_after_the_exit_is_what_is_shown(status: int) -> None:
    run = Run().started(0, 1)
    assert run.feed(m.WorkerExited(worker=1, status=status), now=20.0) == []
    entry = ended(run.feed(failure(1, "true cause"), now=20.2))
    assert entry["reason"] == "true cause"
    assert entry["failure"]["traceback"] == "tb"


def test_an_announced_report_is_waited_for_longer_but_not_for_ever() -> None:
    run = Run().started(0, 1)
    run.feed(m.WorkerExited(worker=1, status=m.EXIT_REPORTED), now=20.0)
    assert run.feed(s.Ticked(), now=20.0 + REPORTED_GRACE_S - 0.01) == []
    assert "exited with status 3" in ended(run.feed(s.Ticked(), now=20.0 + REPORTED_GRACE_S))["reason"]


def test_another_member_s_report_mentions_the_exits_that_were_seen() -> None:
    run = Run().started(0, 1)
    run.feed(m.WorkerExited(worker=1, status=-9), now=20.0)
    entry = ended(run.feed(failure(0, "lost my peer"), now=20.1))
    assert entry["exits"] == ["worker 1 (host here, pid 101) was killed by SIGKILL (out of memory?)"]


def test_an_exit_before_joining_is_told_too() -> None:
    run = Run()
    run.feed(m.WorkerExited(worker=1, status=1), now=2.0)
    entry = ended(run.feed(s.Ticked(), now=3.0))
    assert entry["reason"] == "worker 1 exited with status 1 before the run had started"


def test_an_exit_that_overtakes_the_joining_still_counts() -> None:
    run = Run()
    run.feed(m.WorkerExited(worker=1, status=1), now=2.0)
    run.join(0, 1)
    assert all(not sends(outputs) for outputs in [run.ready(0), run.ready(1)])
    assert "worker 1 (host here, pid 101)" in ended(run.feed(s.Ticked(), now=3.0))["reason"]


def test_a_generation_never_starts_with_a_worker_that_is_gone() -> None:
    run = Run(workers=2)
    run.join(0, 1, 2)
    run.ready(0)
    run.feed(m.WorkerExited(worker=0, status=-9), now=2.0)
    assert run.ready(1, 2) == []
    assert ended(run.feed(s.Ticked(), now=3.0))["failure"]["worker"] == 0


def test_the_number_of_a_lost_member_is_not_taken_over() -> None:
    run = Run().started(0, 1)
    run.feed(m.WorkerExited(worker=1, status=-9), now=2.0)
    with pytest.raises(s.ProtocolError, match="give it another"):
        run.feed(m.WorkerJoined(worker=1, host="here", pid=555), now=2.1)
    assert ended(run.feed(s.Ticked(), now=3.0))["status"] == "failed"


def test_a_member_that_has_finished_may_exit() -> None:
    run = Run().started(0, 1)
    run.feed(finished(1), m.WorkerExited(worker=1, status=0), now=2.0)
    assert run.feed(s.Ticked(), now=9.0) == []
    assert ended(run.feed(finished(0), now=10.0))["status"] == "completed"


def test_an_exit_that_overtakes_the_finish_is_no_loss() -> None:
    run = Run().started(0, 1)
    run.feed(m.WorkerExited(worker=1, status=0), now=2.0)
    run.feed(finished(1), now=2.1)
    assert run.feed(s.Ticked(), now=9.0) == []
    assert ended(run.feed(finished(0), now=10.0))["status"] == "completed"


def test_a_spare_that_is_gone_is_a_notice_and_may_come_back() -> None:
    run = Run(workers=5).started(0, 1, 2, 3, 4)
    outputs = run.feed(m.WorkerExited(worker=4, status=-9), m.WorkerExited(worker=4, status=-9))
    (line,) = lines(outputs)
    assert "worker 4 (host here, pid 104), a spare, was killed by SIGKILL" in line["text"]
    assert run.feed(s.Ticked(), now=99.0) == []
    run.feed(m.WorkerJoined(worker=4, host="here", pid=900))
    assert sends(run.ready(4)) == [(4, run.state.start)]
