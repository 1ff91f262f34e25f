"""Pipeline schedules as data: which stages a member of a pipeline has, and in which order it runs them on the shards
of a step.

A member's list of actions is the whole schedule: from it follows which other member it waits for. The lists of the
schedules `interleaved` and `zbv` come from torch (`run/runner.py`); `joined` improves them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

PipelineSchedule = Literal["gpipe", "1f1b", "interleaved", "zbv"]
SCHEDULES: tuple[PipelineSchedule, ...] = get_args(PipelineSchedule)
DEFAULT_SCHEDULE: PipelineSchedule = "1f1b"

ActionKind = Literal["forward", "backward", "backward_input", "backward_weight"]


@dataclass(frozen=True)
class Action:
    """One pass of one shard through one stage."""

    stage: int
    kind: ActionKind
    shard: int
    """The shard's place among the shards of this member's data group."""


@dataclass(frozen=True)
class PipelineSeat:
    """A member's place in its pipeline: `members` are the ranks of the pipeline, `me` is this member's index there."""

    members: Sequence[int]
    me: int
    schedule: PipelineSchedule = DEFAULT_SCHEDULE

    @property
    def stages(self) -> int:
        return stage_count(self.schedule, len(self.members))

    @property
    def mine(self) -> list[int]:
        return stages_of(self.schedule, len(self.members), self.me)

    def shown_stages(self, member: int) -> str:
        """The stages of a member as text for people, counted from 1."""
        return " and ".join(str(stage + 1) for stage in stages_of(self.schedule, len(self.members), member))

    def rank_of(self, stage: int) -> int:
        return self.members[member_of(self.schedule, len(self.members), stage)]


def stages_of(schedule: PipelineSchedule, members: int, member: int) -> list[int]:
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


def stage_count(schedule: PipelineSchedule, members: int) -> int:
    return members * len(stages_of(schedule, members, 0))


def member_of(schedule: PipelineSchedule, members: int, stage: int) -> int:
    return next(member for member in range(members) if stage in stages_of(schedule, members, member))


def one_forward_one_backward(members: int, member: int, shards: int) -> tuple[Action, ...]:
    """The schedule `1f1b`, for one stage per member.

    >>> [f"{a.kind[0]}{a.shard}" for a in one_forward_one_backward(2, 0, 3)]
    ['f0', 'f1', 'b0', 'f2', 'b1', 'b2']
    """
    ahead = min(members - 1 - member, shards)
    actions = [Action(member, "forward", shard) for shard in range(ahead)]
    for shard in range(ahead, shards):
        actions += [Action(member, "forward", shard), Action(member, "backward", shard - ahead)]
    return (*actions, *(Action(member, "backward", shard) for shard in range(shards - ahead, shards)))


def all_forward_all_backward(member: int, shards: int) -> tuple[Action, ...]:
    """The schedule `gpipe`, for one stage per member."""
    forward = [Action(member, "forward", shard) for shard in range(shards)]
    return (*forward, *(Action(member, "backward", shard) for shard in range(shards)))


def joined(actions: Iterable[Action]) -> tuple[Action, ...]:
    """Merge the two halves of a backward pass where they follow each other directly: the whole pass takes a quarter
    less time than its halves.

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
