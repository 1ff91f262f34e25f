"""Who computes on which accelerator decides how gradients travel, and who may take part."""

from __future__ import annotations

from distbelief.control import messages as m
from tests.support.coordinator.play import CANARY, JOB, Run, records, starts


def arrive(run: Run, gpus: dict[int, str], now: float = 1.0) -> list:
    run.join(*gpus, now=now)
    return run.feed(*(m.WorkerReady(w, JOB, CANARY, gpu) for w, gpu in gpus.items()), now=now)


def transport(run: Run) -> str:
    assert run.state.start is not None
    return run.state.start.transport


def test_workers_that_share_a_gpu_meet_in_shared_memory_and_others_over_nccl() -> None:
    shared, apart = Run(on_accelerators=True), Run(on_accelerators=True)
    arrive(shared, {0: "a", 1: "a"})
    arrive(apart, {0: "a", 1: "b"})
    assert (transport(shared), transport(apart)) == ("slots", "nccl")
    alone = Run(workers=1, on_accelerators=True)
    arrive(alone, {0: "a"})
    assert transport(alone) == "slots"


def test_a_coordinator_that_was_restarted_knows_who_computes_on_what() -> None:
    run = Run(on_accelerators=True)
    arrive(run, {0: "a", 1: "b"})
    again = run.restarted()
    assert [again.state.workers[w].gpu for w in (0, 1)] == ["a", "b"]
    again.join(0, 1)
    assert transport(again) == "nccl"


def test_where_the_state_is_does_not_change_when_only_processors_are_left() -> None:
    """A member that came to a run on GPUs with a processor has a state of its own, and goes on from it."""
    run = Run(on_accelerators=True, exact=False)
    arrive(run, {0: "a", 1: ""})
    assert transport(run) == "slots"
    run.kill(0)
    run.feed(m.WorkerLeft(1, 1))
    assert run.state.generation == 2
    assert transport(run) == "slots"


def test_a_gpu_is_refused_where_members_share_a_state_on_the_host() -> None:
    run = Run(exact=False)
    arrive(run, {0: "", 1: ""})
    assert transport(run) == "shm"
    (refused,) = records(arrive(run, {5: "a"}), "refused")
    assert "computes on a GPU" in refused["reason"]
    assert run.state.phase == "training"


def test_with_nccl_a_worker_without_a_gpu_of_its_own_is_refused_and_the_run_goes_on() -> None:
    for gpu, why in (("", "has no GPU"), ("b", "shares its GPU")):
        run = Run(on_accelerators=True, transport="nccl", exact=False)
        assert set(starts(arrive(run, {0: "a", 1: "b"}))) == {0, 1}
        (refused,) = records(arrive(run, {5: gpu}), "refused")
        assert why in refused["reason"]
        assert run.state.phase == "training"
