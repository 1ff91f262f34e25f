"""What the user reads of a worker's failure: what failed, and at which step and shard where that is known."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from distbelief.control.credentials import NO_CREDENTIAL
from distbelief.errors import JobError, NonFiniteLoss, StepCodeError
from distbelief.job import Job
from distbelief.options import RunOptions, SavePlan
from distbelief.worker.failure import describe_failure, refused_thread
from distbelief.worker.saving import Saver
from distbelief.worker.spec import WorkerSpec

names: dict[str, Any] = {}
refusing = 'def refuses(*arguments): raise RuntimeError("can\'t start new thread")'
exec(compile(refusing, threading.__file__, "exec"), names)  # as the interpreter refuses: without a frame of this file
REFUSES = names["refuses"]


@pytest.mark.parametrize(
    ("strategy", "other"),
    [
        ("allreduce", "use another operation, or `--strategy allreduce:inexact`"),
        ("allreduce:nccl", "use another operation, or `--strategy allreduce:inexact:nccl`"),
        ("ps:sync", "use another operation, or a strategy that is not exact"),
    ],
)
def test_a_kernel_that_is_not_deterministic_has_a_way_out(strategy: str, other: str) -> None:
    spec = WorkerSpec(0, "here", "", NO_CREDENTIAL, "", RunOptions(workers=1, strategy=strategy))
    error = RuntimeError("upsample_linear1d_backward_out_cuda does not have a deterministic implementation, but …")
    failure = describe_failure(spec, error, -1, -1)
    assert failure.kind == "user"
    assert failure.hint.endswith(other)


def test_a_thread_that_the_kernel_refuses_is_blamed_on_the_job_only_if_the_job_starts_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of_the_job() -> None:
        threading.Thread(target=print).start()

    with ThreadPoolExecutor(1) as pool:  # its thread has frames of the standard library only
        pool.submit(int).result()
        monkeypatch.setattr(threading, "_start_new_thread", REFUSES)
        ours = pool.submit(Saver, SavePlan("nowhere"), 0, print).exception()
        theirs = pool.submit(of_the_job).exception()
        monkeypatch.undo()
    assert isinstance(ours, RuntimeError)
    assert isinstance(theirs, RuntimeError)
    assert refused_thread(ours).startswith("no more processes are allowed here (")
    assert refused_thread(theirs) == ""
    assert refused_thread(RuntimeError("shapes differ")) == ""


def job_with(**options: Any) -> Job:
    return Job(
        **{"model": list, "loss": list, "optimizer": list, "data": [1], "global_batch": 1, "steps": 1, **options}
    )


def raised(job: Job, step: int) -> StepCodeError:
    with pytest.raises(StepCodeError) as caught:
        job.rate_factor(step)
    return caught.value


def test_a_schedule_gives_factors() -> None:
    assert job_with().rate_factor(3) == 1.0
    assert job_with(schedule=lambda step: 2 * step).rate_factor(3) == 6


@pytest.mark.parametrize(
    ("schedule", "text"),
    [
        (lambda step: 1 / (3 - step), "`schedule` failed at step 3: ZeroDivisionError: division by zero"),
        (lambda step: None, "`schedule` failed at step 3: TypeError: must be real number, not NoneType"),
        (lambda step: float("nan"), "`schedule` returned nan at step 3"),
        (lambda step: -1e999, "`schedule` returned -inf at step 3"),
    ],
)
def test_a_schedules_error_is_not_blamed_on_a_shard(schedule: Any, text: str) -> None:
    error = raised(job_with(schedule=schedule), 3)
    spec = WorkerSpec(4, "here", "", NO_CREDENTIAL, "", RunOptions(1, "allreduce", save_every="never"))
    told = describe_failure(spec, error, 4, 2)
    assert (told.worker, told.kind, told.message) == (4, "user", text)
    assert (told.step, told.shard) == (3, -1), "shard 2 of step 4 is what the worker fetched last"
    assert ("in <lambda>" in told.traceback) is ("ZeroDivision" in text)


def test_other_errors_name_the_shard() -> None:
    spec = WorkerSpec(4, "here", "", NO_CREDENTIAL, "", RunOptions(1, "allreduce", save_every="never"))
    assert (
        describe_failure(spec, ValueError("boom"), 4, 2).step,
        describe_failure(spec, JobError("x"), 4, 2).shard,
    ) == (4, 2)
    assert describe_failure(spec, NonFiniteLoss(float("nan"), 5, 1), 4, 2).shard == 1
