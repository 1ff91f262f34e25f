"""A run directory as an onlooker sees it grow."""

from __future__ import annotations

import os
from functools import reduce
from pathlib import Path

from distbelief.chaos.follow import Record, RunFollower, Seen, advance
from distbelief.coordinator.journal import Journal, JournalTail


def generation(number: int, members: dict[int, int], at: float) -> Record:
    listed = [{"worker": worker, "host": "h", "pid": pid, "shards": [0, 1]} for worker, pid in members.items()]
    return {"kind": "generation", "generation": number, "members": listed, "at": at, "cause": "start", "lost": []}


def test_the_newest_generation_and_the_furthest_step_count() -> None:
    seen = reduce(
        advance,
        [
            {"kind": "epoch", "epoch": 1, "pid": 7},
            generation(1, {0: 10, 1: 11}, 100.0),
            {"kind": "step", "step": 4, "at": 101.0},
            generation(2, {1: 11, 2: 12}, 102.0),
            generation(1, {0: 10, 1: 11}, 100.0),
            {"kind": "workers", "step": 9},
            {"kind": "step", "step": 5, "at": 103.0},
        ],
        Seen(),
    )
    assert seen == Seen(step=9, members={1: 11, 2: 12}, generation=2, started_at=100.0)
    assert advance(seen, {"kind": "ended"}).ended
    assert not reduce(advance, [{"kind": "ended"}, {"kind": "resumed"}], seen).ended


def test_records_come_once_through_torn_ends(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    tail = JournalTail(path)
    assert tail.read() == []
    with Journal.open(path) as journal:
        journal.append({"kind": "a"})
        assert [r["kind"] for r in tail.read()] == ["epoch", "a"]
        assert tail.read() == []
        assert not tail.is_void
    with path.open("ab") as file:
        file.write(b'{"kind":"torn and very much longer than what follows')
    assert tail.read() == []
    with Journal.open(path) as journal:  # cuts it off
        journal.append({"kind": "b"})
        assert [(r["kind"], r.get("epoch")) for r in tail.read()] == [("epoch", 2), ("b", None)]
        whole = path.stat().st_size
        journal.append({"kind": "refused by the disk"})
        assert len(tail.read()) == 1
        os.truncate(path, whole)
        assert [r["kind"] for r in tail.read()] == ["epoch", "a", "epoch", "b"]
        assert tail.is_void, "what it has read is cut off"
        journal.append({"kind": "c"})
        assert [r["kind"] for r in tail.read()] == ["c"]
        os.truncate(path, whole)
        journal.append({"kind": "longer than the one before"})
        assert [r["kind"] for r in tail.read()][-1] == "longer than the one before"
        assert tail.is_void
        assert tail.read() == []
        assert not tail.is_void


def test_a_run_directory(tmp_path: Path) -> None:
    follower = RunFollower(tmp_path)
    assert follower.poll() == Seen()
    assert follower.coordinator() is None
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 2, "at": 1.0}\n{"kind": "st')
    with Journal.open(tmp_path / "journal.jsonl") as journal:
        journal.append(generation(1, {0: 10}, 5.0))
    (tmp_path / "coordinator.json").write_text('{"pid": 9, "address": "tcp://127.0.0.1:1"}')
    assert follower.poll() == Seen(step=3, members={0: 10}, generation=1, started_at=5.0)
    assert [record["kind"] for record in follower.records] == ["epoch", "generation"]
    assert follower.coordinator() == {"pid": 9, "address": "tcp://127.0.0.1:1"}
    (tmp_path / "coordinator.json").write_text('{"pid": 9')
    assert follower.coordinator() is None
