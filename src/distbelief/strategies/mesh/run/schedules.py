"""In which order a member runs the stages that it has on the shards of a step: torch's pipeline schedules, as data.

A member's order is all there is: whom it waits for follows from it. The interleaved and the zero-bubble order are
computed by torch.distributed.pipelining; we take the lists and not its runtime, which wants shards of equal size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

Kind = Literal["forward", "backward", "backward_input", "backward_weight"]
Schedule = Literal["gpipe", "1f1b", "interleaved", "zbv"]

SCHEDULES: tuple[Schedule, ...] = ("gpipe", "1f1b", "interleaved", "zbv")


@dataclass(frozen=True)
class Action:
    stage: int
    kind: Kind
    shard: int
    """Its place among the shards of this member's data group."""


def stages_of(schedule: Schedule, members: int, member: int) -> list[int]:
    """The stages that a member of a pipeline has.

    >>> stages_of("zbv", 2, 0), stages_of("interleaved", 2, 0), stages_of("1f1b", 2, 0)
    ([0, 3], [0, 2], [0])
    """
    if members == 1:
        return [0]
    if schedule == "interleaved":
        return [member, member + members]
    if schedule == "zbv":
        return [member, 2 * members - 1 - member]
    return [member]


def stage_count(schedule: Schedule, members: int) -> int:
    return members * len(stages_of(schedule, members, 0))


def member_of(schedule: Schedule, members: int, stage: int) -> int:
    return next(member for member in range(members) if stage in stages_of(schedule, members, member))


@lru_cache(maxsize=64)
def order(schedule: Schedule, members: int, member: int, shards: int) -> tuple[Action, ...]:
    """What a member does, one after the other.

    >>> [f"{a.kind[0]}{a.shard}" for a in order("1f1b", 2, 0, 3)]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    if members == 1 or schedule == "1f1b":
        return _one_forward_one_backward(members, member, shards)
    if schedule == "gpipe":
        forward = [Action(member, "forward", shard) for shard in range(shards)]
        return (*forward, *(Action(member, "backward", shard) for shard in range(shards)))
    return _of_torch(schedule, members, member, shards)


def _one_forward_one_backward(members: int, member: int, shards: int) -> tuple[Action, ...]:
    ahead = min(members - 1 - member, shards)
    actions = [Action(member, "forward", shard) for shard in range(ahead)]
    for shard in range(ahead, shards):
        actions += [Action(member, "forward", shard), Action(member, "backward", shard - ahead)]
    return (*actions, *(Action(member, "backward", shard) for shard in range(shards - ahead, shards)))


_KINDS: dict[str, Kind] = {"F": "forward", "B": "backward", "I": "backward_input", "W": "backward_weight"}


def _of_torch(schedule: Schedule, members: int, member: int, shards: int) -> tuple[Action, ...]:
    from torch.distributed.pipelining import schedules

    # The classes compute an order from a few numbers, but their constructors want stages that have a process group.
    kind: Any = schedules.ScheduleZBVZeroBubble if schedule == "zbv" else schedules.ScheduleInterleaved1F1B
    maker = object.__new__(kind)
    rounds = max(1, shards // members)
    each = -(-shards // rounds)
    maker.n_local_stages, maker.pp_group_size, maker.num_stages = 2, members, 2 * members
    maker._n_microbatches, maker.microbatches_per_round = rounds * each, each
    found = maker._calculate_single_rank_operations(member)
    # The interleaved order wants equal rounds: the shards that only fill the last one are left out again.
    return joined(
        Action(one.stage_index, _KINDS[one.computation_type.value], one.microbatch_index)
        for one in found
        if one is not None and one.microbatch_index is not None and one.microbatch_index < shards
        and one.computation_type.value in _KINDS
    )  # fmt: skip


def joined(actions: Iterable[Action]) -> tuple[Action, ...]:
    """Two halves of a backward pass that directly follow each other become one: whole, it takes a quarter less time.

    >>> [one.kind for one in joined([Action(0, "backward_input", 1), Action(0, "backward_weight", 1)])]
    ['backward']
    """
    found: list[Action] = []
    for action in actions:
        if action.kind == "backward_weight" and found[-1] == replace(action, kind="backward_input"):
            found[-1] = replace(action, kind="backward")
        else:
            found.append(action)
    return tuple(found)
