"""The coordinator's actor: what it continues when Ray starts it again."""

from __future__ import annotations

from pathlib import Path

import pytest

from distbelief.coordinator.journal import Journal
from distbelief.launch.ray.coordinator import continue_clock
from distbelief.steadyclock import CLOCK, SteadyClock


@pytest.mark.parametrize(("set_by_s", "is_later_by_s"), [(-7200.0, 0.0), (7200.0, 7300.0), (0.0, 100.0)])
def test_records_keep_their_order_when_the_machines_clock_was_set(
    set_by_s: float, is_later_by_s: float, tmp_path: Path
) -> None:
    last = CLOCK.now() + 10_000
    with Journal.open(tmp_path / "journal.jsonl") as journal:
        journal.append({"kind": "generation", "at": last})
    clock = SteadyClock(lambda: last + 100.0 + set_by_s, lambda: 50.0)
    continue_clock(tmp_path, clock)
    assert clock.now() - last == pytest.approx(is_later_by_s, abs=0.001)


def test_the_first_actor_has_no_journal(tmp_path: Path) -> None:
    clock = SteadyClock(lambda: 1100.0, lambda: 50.0)
    continue_clock(tmp_path, clock)
    assert clock.now() == 1100.0
