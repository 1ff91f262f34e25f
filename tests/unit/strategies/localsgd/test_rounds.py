"""Which steps, shards and replicas a round has; and where the replicas' states are kept, sent and found again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from distbelief.errors import JobError
from distbelief.job import Job
from distbelief.shards import Range, Schedule
from distbelief.strategies.localsgd.innerstates import InnerStates
from distbelief.strategies.localsgd.rules.rounds import Rounds
from distbelief.strategies.localsgd.strategy import LocalSGD
from distbelief.transport.shm.segment import Segment

rounds_of_any_kind = st.builds(
    lambda samples, batch, shards, local, replicas, total: Rounds(
        Schedule(samples, batch, min(shards, batch)), local, min(replicas, shards, batch), total
    ),
    st.integers(1, 60), st.integers(1, 20), st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(1, 50),
)  # fmt: skip


@given(rounds_of_any_kind)
def test_rounds_have_every_step_once_and_replicas_every_shard_once(rounds: Rounds) -> None:
    steps = [step for number in range(rounds.count) for step in rounds.steps(number)]
    assert steps == list(range(rounds.total))
    shards = [shard for replica in range(rounds.replicas) for shard in range(*rounds.group(replica))]
    assert shards == list(range(rounds.schedule.shards))
    assert all(rounds.group(replica)[0] < rounds.group(replica)[1] for replica in range(rounds.replicas))


@given(rounds_of_any_kind)
def test_the_replicas_with_samples_are_the_first_ones(rounds: Rounds) -> None:
    for number in range(rounds.count):
        busy = [
            any(rounds.schedule.occupied(step) > rounds.group(replica)[0] for step in rounds.steps(number))
            for replica in range(rounds.replicas)
        ]
        assert busy == [replica < rounds.occupied(number) for replica in range(rounds.replicas)]
        assert busy[0]


@given(rounds_of_any_kind)
def test_only_the_ends_of_rounds_are_states(rounds: Rounds) -> None:
    ends = {rounds.after(number): number for number in range(rounds.count + 1)}
    for steps in range(rounds.total + 1):
        if steps in ends:
            assert rounds.done(steps) == ends[steps]
        else:
            with pytest.raises(JobError, match="lies within a round"):
                rounds.done(steps)


def job(shards: int) -> Job:
    return Job(
        model=lambda: nn.Linear(2, 2), loss=nn.functional.mse_loss, optimizer=lambda p: torch.optim.SGD(p, lr=0.1),
        data=(torch.zeros(64, 2), torch.zeros(64, 2)), global_batch=32, shards=shards, steps=4,
    )  # fmt: skip


def test_the_number_of_replicas_is_a_function_of_the_job() -> None:
    assert [LocalSGD(8).replicas_of(job(shards)) for shards in (1, 3, 4, 16)] == [1, 3, 4, 4]
    assert LocalSGD(8, replicas=8).replicas_of(job(8)) == 8
    with pytest.raises(JobError, match="9 replicas are more than the 8 shards") as caught:
        LocalSGD(8, replicas=9).replicas_of(job(8))
    assert "`shards` of the job to 9" in caught.value.hint


# --- states that no death loses --------------------------------------------------------------------------------------


class Crew:
    """Members in threads, each with a memory of its own, who can gather and send."""

    def __init__(self, memories: Sequence[dict[str, Segment]]) -> None:
        self.members = [Member(rank, self, memory) for rank, memory in enumerate(memories)]
        self.barrier = threading.Barrier(len(memories), timeout=20)
        self.box: dict[Any, Any] = {}

    def together(self, act: Callable[[InnerStates], Any], ranges: Sequence[Range]) -> list[Any]:
        """What every member's `act` gives."""
        found: dict[int, Any] = {}

        def run(member: Member) -> None:
            found[member.rank] = act(InnerStates(member, ranges, SIZE))  # type: ignore[arg-type]

        threads = [threading.Thread(target=run, args=[member]) for member in self.members]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return [found[rank] for rank in range(len(self.members))]


class Member:
    shares_state = False

    def __init__(self, rank: int, crew: Crew, memory: dict[str, Segment]) -> None:
        self.rank = rank
        self.crew = crew
        self.memory = memory

    @property
    def size(self) -> int:
        return len(self.crew.members)

    def state(self, size_bytes: int, name: str = "state") -> Segment:
        return self.memory.setdefault(name, Segment.private(size_bytes))

    def gather(self, payload: bytes) -> list[bytes]:
        self.crew.box[self.rank] = payload
        self.crew.barrier.wait()
        found = [self.crew.box[rank] for rank in range(self.size)]
        self.crew.barrier.wait()
        return found

    def transfer(self, block: torch.Tensor, source: int, receivers: Sequence[int]) -> None:
        """Everybody comes to every transfer, in the same order."""
        if self.rank == source:
            self.crew.box["block"] = block.clone()
        self.crew.barrier.wait()
        if self.rank in receivers:
            block.copy_(self.crew.box["block"])
        self.crew.barrier.wait()


SIZE = 100
RANGES = [(0, 2), (2, 3), (3, 4)]


def value(replica: int, number: int) -> torch.Tensor:
    return torch.full((SIZE,), 10 * number + replica, dtype=torch.uint8)


def trained(rounds: int) -> list[dict[str, Segment]]:
    """Three members after so many rounds, each with what it has computed and what it was sent."""
    memories: list[dict[str, Segment]] = [{}, {}, {}]
    crew = Crew(memories)

    def train(states: InnerStates) -> None:
        rank = next(m.rank for m in crew.members if m is states.exchange)
        states.agree(0)
        for number in range(rounds):
            states.begin(number)
            for replica in range(*RANGES[rank]):
                states.read(replica, number)
                states.write(replica, number + 1, value(replica, number + 1))
            states.send_on(number + 1)

    crew.together(train, RANGES)
    return memories


@pytest.mark.parametrize("dead", [0, 1, 2])
@pytest.mark.parametrize("number", [4, 5])
@pytest.mark.parametrize("ranges", [[(0, 1), (1, 4)], [(0, 1), (1, 2), (2, 4)]], ids=["fewer", "a newcomer"])
def test_one_death_loses_no_replica(dead: int, number: int, ranges: list[Range]) -> None:
    """After five rounds. The state before the last of them is there as well: it may have to be done again."""
    survivors = [memory for rank, memory in enumerate(trained(5)) if rank != dead]
    newcomers: list[dict[str, Segment]] = [{}] * (len(ranges) - len(survivors))

    def look(states: InnerStates) -> None:
        assert states.agree(number)[1] == []
        for replica in range(*ranges[states.exchange.rank]):
            assert torch.equal(states.read(replica, number), value(replica, number))

    assert Crew([*survivors, *newcomers]).together(look, ranges) == [None] * len(ranges)


def test_a_round_that_is_long_over_is_not_there_any_more() -> None:
    found = Crew(trained(5)).together(lambda states: states.agree(2), RANGES)
    assert found[0] == (False, [0, 1, 2, 3])


@pytest.mark.parametrize(("dead", "lost"), [((0, 1), [0, 1]), ((1, 2), [2]), ((2, 0), [3])])
def test_two_neighbours_that_die_together_take_a_replica_along_and_it_is_named(
    dead: tuple[int, int], lost: list[int]
) -> None:
    survivors = [memory for rank, memory in enumerate(trained(3)) if rank not in dead]
    assert Crew([*survivors, {}]).together(lambda states: states.agree(3), [(0, 2), (2, 4)])[0][1] == lost


def test_whether_a_round_had_been_begun_is_known() -> None:
    memories = trained(3)
    begun = Crew(memories[:2]).together(lambda states: states.agree(2)[0], [(0, 2), (2, 4)])
    not_begun = Crew(memories[:2]).together(lambda states: states.agree(3)[0], [(0, 2), (2, 4)])
    assert (begun, not_begun) == ([True, True], [False, False])
