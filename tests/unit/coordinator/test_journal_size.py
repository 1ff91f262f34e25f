"""The journal is not compacted: what a death costs in it, and how long a long one takes to replay. Decision 0021."""

from __future__ import annotations

from collections.abc import Iterator

from distbelief.coordinator import journal as j
from distbelief.coordinator.rules.replay import replay
from distbelief.coordinator.rules.state import RunConfig, begin
from tests.support.coordinator.play import Run, hired, report

A_DEATH_BYTES = 2000  # four records, without what names the members
A_MEMBER_BYTES = 10 * 100  # in two generations, and in each those before it since the last commit


def long_run(workers: int, deaths: int) -> Iterator[dict]:
    """The records of a run in which a worker dies again and again, and another one comes in its place."""
    run = Run(workers)
    run.started(*range(workers))
    now, step = 1.0, 0
    for _ in range(deaths):
        now, step = now + 100.0, step + 1  # seldom enough for a replacement at once
        committed = report(step - 1, generation=run.state.generation)
        run.beat(run.members[0], step=step, reports=[committed], now=now)
        run.arrive(*hired(run.kill(run.members[-1], now=now)), now=now + 1.0)
        yield from run.journal
        run.outputs.clear()


def test_a_death_takes_little_room_however_long_the_run_is() -> None:
    workers, deaths = 4, 300
    lines = [j._encode({**entry, "at": 1.0}) for entry in long_run(workers, deaths)]
    half = len(lines) // 2
    early, late = sum(map(len, lines[:half])), sum(map(len, lines[half:]))
    assert late < 1.1 * early, "a record does not grow with the run"
    assert early + late < deaths * (A_DEATH_BYTES + workers * A_MEMBER_BYTES)
    state = replay(begin(RunConfig(workers=workers), 1, 0.0), (j._decode(line[:-1]) or {} for line in lines), 0.0)
    assert state.generation >= deaths
    assert len(state.seats) == workers
