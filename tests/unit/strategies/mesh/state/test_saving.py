"""What members write to a checkpoint: everything once, and as it was when the copy was asked for."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from distbelief.checkpoint.rules.boxes import sizes
from distbelief.strategies.flatmodel.copying import Copy
from distbelief.strategies.mesh.rules.agreement import CommitDecision
from distbelief.strategies.mesh.state.memberstate import Forms, MemberState
from distbelief.strategies.mesh.state.saving import MeshPortion, copy_of, portions
from distbelief.transport.shm.segment import Segment
from tests.support.mesh.divisions import SHAPES, Held, divisions
from tests.support.mesh.member import JOBS, live_state, pieces_of


def forms_of(state: MemberState) -> Forms:
    return {name: (value.dtype, tuple(value.shape)) for name, (_, value) in state.tensors().items()}


def trained(case: str, steps: int) -> MemberState:
    job = JOBS[case]()
    torch.manual_seed(0)
    assert not isinstance(job.model, torch.nn.Module)
    state = live_state(job, job.model())
    for step in range(steps):
        apply_one(state, case, step)
    return state


def apply_one(state: MemberState, case: str, step: int) -> None:
    compute(state, case, step)
    state.apply(CommitDecision(step, 0.0, 4, "", 1, 0.0, 0.1, 1))


def compute(state: MemberState, case: str, step: int) -> None:
    x, target = JOBS[case]().data
    state._buffers[0].begin()
    output = state.part.stages[0].module(x[:4] + step)
    (F.mse_loss(output, target[:4]) if target.ndim > 1 else F.cross_entropy(output, target[:4].clamp(min=0))).backward()
    state._buffers[0].collect()
    state.ready(step, state.part.gradients())


@given(st.integers(1, 5).flatmap(divisions))
def test_entries_of_all_ranks_cover_everything_once(held: list[Held]) -> None:
    forms: Forms = {name: (torch.float32, shape) for name, shape in SHAPES.items()}
    count = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    for rank, portion in enumerate(portions(held, forms)):
        for entry in portion.entries():
            assert (entry.dtype, entry.shape) == ("float32", SHAPES[entry.tensor])
            box = portion.boxes[entry.tensor]
            assert box == held[rank][entry.tensor]
            count[entry.tensor][tuple(slice(*one) for one in box)] += 1
            assert entry.count == torch.Size(sizes(box)).numel()
    assert all(bool((one == 1).all()) for one in count.values())


def begun(state: MemberState) -> tuple[MeshPortion, Segment, dict[str, torch.Tensor]]:
    portion = portions([state.boxes()], forms_of(state))[0]
    return portion, Segment.private(portion.size_bytes), pieces_of(state)


def check(portion: MeshPortion, memory: Segment, copying: Copy, kept: dict[str, torch.Tensor]) -> None:
    found = {one.tensor: one.values for one in portion.slices(memory, copying.outside)}
    assert found.keys() == kept.keys()
    for name, value in kept.items():
        assert torch.equal(found[name], value), name


def test_a_copy_is_of_one_step_although_the_next_one_changes_everything() -> None:
    for case in ("awkward", "adam", "cnn"):
        state = trained(case, 2)
        portion, memory, kept = begun(state)
        copying = copy_of(portion, state, {}, memory)
        compute(state, case, 2)  # buffers change while shards are computed, before anything is applied
        copying.finish_before_a_write()
        state.apply(CommitDecision(2, 0.0, 4, "", 1, 0.0, 0.1, 1))
        check(portion, memory, copying, kept)
        later = pieces_of(state)
        moved = [name for name, value in kept.items() if not torch.equal(value, later[name])]
        assert any(name.startswith("optimizer/") for name in moved)
        assert any(name.startswith("model/") for name in moved)


def test_only_what_is_small_or_changes_early_is_copied_at_once() -> None:
    state = trained("cnn", 1)
    portion, memory, _ = begun(state)
    outside = set(copy_of(portion, state, {}, memory).outside)
    buffers = {f"model/{name}" for name, _ in state.part.stages[0].module.named_buffers()}
    assert outside == buffers | {f"begun/{one.name}" for one in state.optimizer.held}


def test_state_that_has_not_begun_is_written_as_zeros() -> None:
    state = trained("awkward", 0)
    portion, memory, kept = begun(state)
    copying = copy_of(portion, state, {}, memory)
    copying.finish()
    check(portion, memory, copying, kept)
    assert not kept["optimizer/momentum_buffer/first.weight"].any()
    assert not kept["begun/first.weight"].any()


def test_each_of_two_that_hold_the_same_copies_its_share() -> None:
    state = trained("adam", 1)
    both = portions([state.boxes()] * 2, forms_of(state))
    assert not set(both[0].boxes) & set(both[1].boxes)
    assert {**both[0].boxes, **both[1].boxes} == state.boxes()
    for portion in both:
        memory = Segment.private(portion.size_bytes)
        copying = copy_of(portion, state, {}, memory)
        copying.run()
        expected = {name: value for name, value in pieces_of(state).items() if name in portion.boxes}
        check(portion, memory, copying, expected)
