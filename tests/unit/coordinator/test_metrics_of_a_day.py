"""How much a run of a thousand workers writes in a day. Real lines of the real rules, in the real files."""

from __future__ import annotations

import random
from pathlib import Path

from distbelief.control.messages import Heartbeat, Member, StepReport, Timing
from distbelief.coordinator.metricsfile import NAME, MetricsFile, pack
from distbelief.coordinator.rules.progress import Progress, absorb

WORKERS, SECONDS, STEPS_PER_S = 1000, 120, 5
DAY_S = 86_400
MOST_BYTES = 1_000_000_000


def test_a_day_of_a_thousand_workers_is_less_than_a_gigabyte(tmp_path: Path) -> None:
    rolls, members = random.Random(1), [Member(w, f"node{w // 8:03d}", (w, w + 1)) for w in range(WORKERS)]
    log, progress, lines = MetricsFile(tmp_path / NAME), Progress(), []
    for second in range(SECONDS):
        now = 1.76e9 + second
        first = STEPS_PER_S * second
        reports = [
            StepReport(step, rolls.random(), 4096, f"{rolls.getrandbits(64):016x}", now + rolls.random(), 1)
            for step in range(first, first + STEPS_PER_S)
        ]
        for worker in range(WORKERS):
            timing = Timing(*(second * rolls.random() for _ in range(3)), first)
            beat = Heartbeat(worker, 1, 1, first, timing, reports if worker == 0 else [])
            progress, new = absorb(progress, members, beat, now)
            lines += new
    for line in lines:
        log.add(line)
    log.flush()
    log.close()
    plain = tmp_path / "metrics-000001.jsonl"
    (tmp_path / NAME).rename(plain)
    steps = [line["step"] for line in lines if line["kind"] == "step"]
    assert steps == list(range(SECONDS * STEPS_PER_S)), "no step's record is dropped"
    assert 3 <= len([line for line in lines if line["kind"] == "workers"]) <= 10
    plain_bytes = plain.stat().st_size
    pack(plain)
    packed_bytes = sum(path.stat().st_size for path in tmp_path.iterdir())
    print(f"a day: {plain_bytes * DAY_S / SECONDS / 1e6:.0f} MB plain, {packed_bytes * DAY_S / SECONDS / 1e6:.0f} MB")
    assert packed_bytes * DAY_S / SECONDS < MOST_BYTES / 2
