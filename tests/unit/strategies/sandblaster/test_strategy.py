"""sandblaster before it runs: its portions, what it refuses, and what a checkpoint of it holds."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from distbelief.checkpoint.faults import CheckpointMismatch
from distbelief.checkpoint.rules.boxes import Stretch, coverage_fault
from distbelief.errors import JobError
from distbelief.job import Job
from distbelief.strategies import learn_alike, parse
from distbelief.strategies.base import Saved
from distbelief.strategies.ps.rules.slicing import parameter_stretch
from distbelief.strategies.sandblaster.prepared import PreparedSandblaster
from distbelief.strategies.sandblaster.rules.lbfgs import Past, State
from distbelief.strategies.sandblaster.saved import (
    STATE,
    VectorPortion,
    saved_state,
    saved_vectors,
    state_bytes,
    vectors_of,
)
from distbelief.strategies.sandblaster.strategy import Sandblaster
from distbelief.transport.shm.segment import Segment

MODEL = lambda: nn.Sequential(nn.Linear(60, 180), nn.ReLU(), nn.Linear(180, 4))  # noqa: E731


def job(model: Any = MODEL, samples: int = 40, **changes: Any) -> Job:
    fields: dict[str, Any] = {
        "loss": nn.functional.mse_loss,
        "optimizer": torch.optim.LBFGS,  # which no other strategy can run
        "data": (torch.zeros(samples, 60), torch.zeros(samples, 4)),
        "global_batch": 10,
        "steps": 1,
    }
    return Job(model=model, **{**fields, **changes})


def prepared(one: Job, how: Sandblaster | None = None) -> PreparedSandblaster:
    how = how or Sandblaster()
    return how.prepare(one, how.schedule_of(one, len(one.data[0])), torch.device("cpu"))


def test_portions_are_small_and_a_function_of_the_job_alone() -> None:
    assert Sandblaster().schedule_of(job(), 60_000).shards == 6000  # at most a batch of the job
    assert Sandblaster().schedule_of(job(), 64).shards == 64
    assert Sandblaster().schedule_of(job(global_batch=10_000, samples=10_000), 60_000).shards == 64
    assert Sandblaster(portion=7).schedule_of(job(), 40).shards == 6
    assert Sandblaster(portion=100).schedule_of(job(), 40).shards == 1
    assert Sandblaster(servers=5, over="tcp").schedule_of(job(), 999) == Sandblaster().schedule_of(job(), 999)


def test_every_sample_is_in_one_portion_of_every_step() -> None:
    schedule = Sandblaster(portion=7).schedule_of(job(drop_last=True), 40)
    for step in (0, 3):
        ranges = [schedule.shard(step, portion) for portion in range(schedule.shards)]
        assert [epoch for epoch, _, _ in ranges] == [0] * 6
        assert [sample for _, first, end in ranges for sample in range(first, end)] == list(range(40))


def test_what_others_ask_of_it() -> None:
    assert (parse("sandblaster:servers=3").servers, parse("sandblaster").balances) == (3, False)
    alike = [learn_alike(parse("sandblaster"), parse(other)) for other in ("sandblaster:servers=3:tcp", "allreduce")]
    assert alike == [True, False]
    assert not learn_alike(parse("sandblaster:portion=5"), parse("sandblaster"))


def test_a_model_whose_buffers_change_is_refused() -> None:
    def fetch(step: int, first: int, end: int) -> tuple[Any, int]:
        return (torch.randn(5, 60), torch.zeros(5, 4)), 5

    steady = prepared(job(lambda: nn.Sequential(nn.Linear(60, 4), nn.BatchNorm1d(4, track_running_stats=False))))
    assert steady.canary(fetch)
    with pytest.raises(JobError, match="buffers of the model, as BatchNorm does"):
        prepared(job(lambda: nn.Sequential(nn.Linear(60, 4), nn.BatchNorm1d(4)))).canary(fetch)


def test_parameters_of_several_types_are_refused() -> None:
    with pytest.raises(
        JobError, match=r"needs parameters of one type, and the model has torch\.float32, torch\.float64"
    ):
        prepared(job(lambda: nn.Sequential(nn.Linear(60, 4), nn.Linear(4, 4).double())))


# --- checkpoints -----------------------------------------------------------------------------------------------------


class Scaled(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(60, 180), nn.ReLU(), nn.Linear(180, 4))
        self.register_buffer("scale", torch.tensor([3.0, 4.0]))


THERE = State("point.1", "gradient.2", 0.5, 0.1, 2.0, (Past("direction.0", "change.0", 0.7),), (1.0,), (2.0,))


def filled(one: PreparedSandblaster, members: int) -> dict[str, torch.Tensor]:
    """What the members would save, of numbers that are all different."""
    shapes, vectors, found = one.slices(), vectors_of(THERE), {}
    stretches: dict[str, list[Stretch]] = {}
    shapes_of: dict[str, tuple[int, ...]] = {}
    for rank in range(members):
        portion = VectorPortion(one.layout, shapes[rank::members], vectors, [])
        copy = Segment.private(portion.size_bytes)
        for shape in shapes[rank::members]:
            start = portion.starts[shape.number] // 4
            flat = copy.tensor(torch.float32, 0, portion.size_bytes // 4)
            places = torch.arange(shape.first_byte // 4, shape.end_byte // 4, dtype=torch.float32)
            flat[start : start + len(places)] = places
            _, (first, end) = parameter_stretch(one.layout, shape)
            for number in range(len(vectors)):
                at = start + shape.value_bytes // 4 + number * (end - first)
                flat[at : at + end - first] = torch.arange(first, end) + 100_000.0 * (number + 1)
        assert [e.tensor for e in portion.entries()] == [s.tensor for s in portion.slices(copy, {})]
        for piece in portion.slices(copy, {}):
            whole = found.setdefault(piece.tensor, torch.full(piece.shape, -1.0))
            whole.view(-1)[piece.first : piece.first + piece.values.numel()] = piece.values
            stretches.setdefault(piece.tensor, []).append(Stretch(rank + 1, piece.first, piece.values.numel()))
            shapes_of[piece.tensor] = tuple(piece.shape)
    for name, held in stretches.items():
        assert coverage_fault(name, shapes_of[name], held) == ""
    return found


def test_a_checkpoint_holds_the_model_and_every_vector_that_the_search_needs() -> None:
    one = prepared(job(Scaled))
    found = filled(one, members=1)
    names = {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert set(found) == {f"model/{name}" for name in (*names, "scale")} | {
        f"lbfgs/{vector}/{name}" for vector in ("gradient.2", "direction.0", "change.0") for name in names
    }
    other = filled(one, members=3)
    assert all(torch.equal(found[name], other[name]) for name in found)  # members are nowhere in it


def test_what_was_saved_is_what_slices_begin_with() -> None:
    one = prepared(job(Scaled))
    tensors = {**filled(one, members=2), STATE: torch.frombuffer(bytearray(state_bytes(THERE)), dtype=torch.uint8)}
    saved = Saved(3, tensors)
    assert saved_state(saved) == THERE
    assert saved_state(Saved(3, {"model/x": torch.zeros(1)})) is None
    for shape in one.slices():
        _, (first, end) = parameter_stretch(one.layout, shape)
        values = torch.arange(shape.first_byte // 4, shape.end_byte // 4, dtype=torch.float32).view(torch.uint8)
        vectors = saved_vectors(saved, THERE, one.layout, shape, values)
        assert list(vectors) == ["point.1", "gradient.2", "direction.0", "change.0"]
        for number, name in enumerate(vectors):
            expected = torch.arange(first, end) + 100_000.0 * number
            used = vectors[name] != 0  # between two parameters nothing is saved, and all is 0
            assert torch.equal(vectors[name][used], expected[used])
    del tensors["lbfgs/change.0/2.bias"]
    last = next(shape for shape in reversed(one.slices()) if parameter_stretch(one.layout, shape)[1][1])
    nothing = torch.zeros(last.value_bytes, dtype=torch.uint8)
    with pytest.raises(CheckpointMismatch, match=r"lacks 'lbfgs/change.0/2.bias'"):
        saved_vectors(saved, THERE, one.layout, last, nothing)
