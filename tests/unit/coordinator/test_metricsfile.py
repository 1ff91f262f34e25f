"""The log of a run's steps: its parts, and everything that reads them."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path

import pytest

from distbelief.coordinator.metricsfile import (
    INDEX,
    NAME,
    MetricsFile,
    Tail,
    last_evaluation_and_checkpoint,
    pack,
    records,
)
from distbelief.coordinator.runfiles import reported
from distbelief.observe.records import Follower
from distbelief.replaying import records as steps_of_a_log
from distbelief.replaying.records import Steps

PART = 4000


def step(number: int, loss: float = 0.5) -> dict:
    return {
        "kind": "step",
        "step": number,
        "loss": loss,
        "samples": 8,
        "fingerprint": f"f{number}",
        "at": float(number),
    }


def evaluation(number: int) -> dict:
    return {"kind": "evaluation", "step": number, "metrics": {"accuracy": 0.1}, "at": float(number)}


def write(folder: Path, lines: list[dict], part_bytes: int = PART) -> None:
    """As a coordinator that is restarted now and then."""
    for start in range(0, len(lines), 70):
        log = MetricsFile(folder / NAME, part_bytes)
        for line in lines[start : start + 70]:
            log.add(line)
            assert log.flush() == ""
        log.close()
    MetricsFile(folder / NAME, part_bytes).close()


def packed(folder: Path) -> None:
    """A coordinator may have ended before it compressed the last part."""
    for path in sorted(folder.glob("metrics-0*.jsonl")):
        pack(path)


def test_no_line_is_lost_and_every_line_is_read_once_over_all_parts(tmp_path: Path) -> None:
    lines = [step(number) for number in range(400)]
    write(tmp_path, lines)
    assert len(list(tmp_path.glob("metrics-0*"))) > 5
    assert list(records(tmp_path / NAME)) == lines
    packed(tmp_path)
    assert list(records(tmp_path / NAME)) == lines
    names = sorted(path.name for path in tmp_path.iterdir())
    assert names[:2] == ["metrics-000001.jsonl.gz", "metrics-000002.jsonl.gz"]
    assert not [name for name in names if name.endswith(".draft")]
    with gzip.open(tmp_path / names[0]) as file:
        assert json.loads(file.readline()) == lines[0], "users' own tools find the same lines"


def test_the_index_says_which_steps_a_part_has(tmp_path: Path) -> None:
    write(tmp_path, [evaluation(0), *(step(number) for number in range(200)), evaluation(200), step(200)], PART)
    packed(tmp_path)
    entries = [json.loads(line) for line in (tmp_path / INDEX).read_text().splitlines()]
    assert [one["part"] for one in entries] == list(range(1, len(entries) + 1))
    assert entries[0]["first"] == 0
    assert all(before["last"] + 1 == after["first"] for before, after in itertools.pairwise(entries))
    assert entries[0]["evaluation"] == evaluation(0)
    assert entries[1]["evaluation"] == evaluation(0), "the last one so far"


@pytest.mark.parametrize("with_index", [True, False])
def test_a_single_step_is_found_in_any_part(tmp_path: Path, with_index: bool) -> None:
    again = [
        {"kind": "rollback", "step": 30, "reached": 60, "at": 1.0},
        *(step(one, loss=9.0) for one in range(30, 200)),
    ]
    write(tmp_path, [*(step(number) for number in range(60)), *again])
    packed(tmp_path)
    if not with_index:
        (tmp_path / INDEX).unlink()
    steps = Steps(tmp_path / NAME)
    assert steps.last == 199
    for number in (0, 29, 30, 59, 150, 199, 3):
        found = steps.get(number)
        assert found is not None
        assert (found["step"], found["loss"]) == (number, 0.5 if number < 30 else 9.0), "the last report counts"
    assert steps.get(200) is None


def test_a_run_directory_of_before_is_read_as_before_and_rotated_when_it_goes_on(tmp_path: Path) -> None:
    lines = [step(number) for number in range(200)]
    (tmp_path / NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(records(tmp_path / NAME)) == lines
    assert Steps(tmp_path / NAME).get(77) == lines[77]
    write(tmp_path, [step(200)])
    packed(tmp_path)
    assert (tmp_path / "metrics-000001.jsonl.gz").exists()
    assert list(records(tmp_path / NAME)) == [*lines, step(200)]


def test_one_who_follows_sees_each_line_once_through_all_rotations(tmp_path: Path) -> None:
    """Three readers, while the writer rotates every 25 lines and its thread compresses."""
    lines = [step(number) for number in range(1500)]
    done, found = threading.Event(), [[], [], []]

    def follow(number: int) -> None:
        tail = Tail(tmp_path / NAME)
        while True:
            was_done = done.is_set()
            while new := tail.read():
                found[number] += new
            if was_done:
                return

    readers = [threading.Thread(target=follow, args=[number]) for number in range(3)]
    for reader in readers:
        reader.start()
    log = MetricsFile(tmp_path / NAME, PART // 2)
    for line in lines:
        log.add(line)
        log.flush()
    log.close()
    done.set()
    for reader in readers:
        reader.join()
    assert found == [lines, lines, lines]


def test_a_view_reads_the_end_of_a_long_run_only(tmp_path: Path) -> None:
    """Six times the length costs the same memory, and shows the same."""
    peaks = {}
    for count in (20_000, 120_000):
        folder = tmp_path / str(count)
        folder.mkdir()
        rolls = random.Random(1)
        with (folder / NAME).open("w") as file:
            file.write(json.dumps(evaluation(0), separators=(",", ":")) + "\n")
            for number in range(count):
                line = step(number, rolls.random())
                file.write(json.dumps(line, separators=(",", ":")) + "\n")
        if count == 120_000:
            MetricsFile(folder / NAME, 1 << 20).close()  # the first coordinator of this release
            log = MetricsFile(folder / NAME, 1 << 20)
            log.add({"kind": "notice", "text": "begun", "at": 0.0})
            log.flush()
            log.close()
        tracemalloc.start()
        progress = Follower(folder).catch_up()
        steps = Steps(folder / NAME)
        assert steps.get(count - 5) is not None
        assert steps.get(5) is not None
        peaks[count] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert progress.step == count
        assert progress.metrics_step == 0, "the last evaluation, from long ago"
        assert progress.samples_per_s == 8.0
        assert steps.last == count - 1
    assert peaks[120_000] < 1.5 * peaks[20_000]
    assert peaks[120_000] < 32 << 20


def test_what_a_view_starts_with_after_a_rotation(tmp_path: Path) -> None:
    """The present part is nearly empty then."""
    checkpoint = {"kind": "checkpoint", "step": 12, "at": 12.0}
    write(tmp_path, [evaluation(10), *(step(number) for number in range(20)), checkpoint, *map(step, range(20, 90))])
    packed(tmp_path)
    assert last_evaluation_and_checkpoint(tmp_path / NAME) == [evaluation(10), checkpoint]
    follower = Follower(tmp_path)
    shown = follower.catch_up()
    assert (shown.step, shown.metrics_step, shown.saved_step) == (90, 10, 12)
    assert len(shown.intervals) > 10, "speed is known at once"


def test_a_part_that_cannot_be_read_costs_its_own_records_only(tmp_path: Path) -> None:
    write(tmp_path, [evaluation(0), *(step(number) for number in range(200))])
    packed(tmp_path)
    whole = [json.loads(line) for line in (tmp_path / INDEX).read_text().splitlines()]
    second = tmp_path / "metrics-000002.jsonl.gz"
    second.write_bytes(second.read_bytes()[:-40])
    (tmp_path / "metrics-000003.jsonl.gz").write_bytes(b"no gzip at all")
    found = list(records(tmp_path / NAME))
    steps = {one["step"] for one in found if one["kind"] == "step"}
    lost = {number for number in range(200) if any(one["first"] <= number <= one["last"] for one in whole[1:3])}
    assert set(range(200)) - lost <= steps
    told = [one["text"] for one in found if one["kind"] == "unreadable"]
    assert [text.partition(" of ")[0] for text in told] == ["part 2", "part 3"]
    assert "cannot be read to its end" in told[0]
    index = Steps(tmp_path / NAME)
    assert index.get(whole[2]["first"]) is None
    assert index.get(199) == step(199)
    assert [one["step"] for one in last_evaluation_and_checkpoint(tmp_path / NAME)] == [0]


def test_a_view_tells_of_the_part_that_it_could_not_read_while_it_caught_up(tmp_path: Path) -> None:
    write(tmp_path, [step(number) for number in range(100)])
    packed(tmp_path)
    newest = max(tmp_path.glob("metrics-0*.gz"))
    newest.write_bytes(newest.read_bytes()[:-40])
    follower = Follower(tmp_path)
    follower.catch_up()
    assert [record["kind"] for record, _ in follower.poll()] == ["unreadable"]
    assert list(follower.poll()) == []


def test_a_line_whose_fields_are_damaged_is_passed_over(tmp_path: Path) -> None:
    damaged = [
        {"kind": "step"},
        {"kind": "step", "step": "x", "at": 1.0},
        {"kind": "step", "step": 7, "at": []},
        {"kind": "step", "step": 7, "at": 1.0},
        {"kind": "workers", "at": 2.0},
        {"kind": "notice"},
    ]
    lines = [step(0), *damaged, step(1)]
    (tmp_path / NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / INDEX).write_text(
        '{"part":"x"}\n{"part":1,"first":null,"last":3}\n[]\n{"part":1,"first":0,"last":1,"checkpoint":5}\n'
    )
    assert [one["step"] for one in records(tmp_path / NAME) if one["kind"] == "step"] == [0, 7, 1]
    progress = Follower(tmp_path).catch_up()
    assert (progress.step, progress.loss) == (2, 0.5)
    assert Steps(tmp_path / NAME).last == 7
    assert reported(tmp_path / NAME)[0].values == {0: "f0", 1: "f1"}


def test_the_last_evaluation_and_the_last_checkpoint_may_lie_in_different_parts(tmp_path: Path) -> None:
    """Neither part has a line in the index, nor has the part before: a crash of the machine has lost it."""
    checkpoint = {"kind": "checkpoint", "step": 12, "at": 12.0}
    parts = [[checkpoint, step(1)], [evaluation(5), step(2)], [step(3)]]
    for number, lines in enumerate(parts, start=1):
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        (tmp_path / f"metrics-{number:06d}.jsonl").write_text(text)
    assert last_evaluation_and_checkpoint(tmp_path / NAME) == [evaluation(5), checkpoint]
    packed(tmp_path)
    (tmp_path / INDEX).unlink()
    assert last_evaluation_and_checkpoint(tmp_path / NAME) == [evaluation(5), checkpoint]
    (tmp_path / "metrics-000004.jsonl").write_text(json.dumps(step(4)) + "\n")
    pack(tmp_path / "metrics-000004.jsonl")
    entry = json.loads((tmp_path / INDEX).read_text())
    assert (entry["evaluation"], entry["checkpoint"]) == (evaluation(5), checkpoint)


def test_old_and_new_steps_by_turns_read_each_part_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, [step(number) for number in range(200)])
    packed(tmp_path)
    steps = Steps(tmp_path / NAME)
    read: list[int] = []
    blocks = steps_of_a_log.blocks_of_lines
    monkeypatch.setattr(steps_of_a_log, "blocks_of_lines", lambda file: read.append(1) or blocks(file))
    for old, new in zip(range(10), range(190, 200), strict=True):
        assert (steps.get(old), steps.get(new)) == (step(old), step(new))
    assert len(read) <= 3, "the first part, the last part, and the present one"


def test_a_kill_between_the_two_halves_of_a_rotation(tmp_path: Path) -> None:
    write(tmp_path, [step(number) for number in range(100)])
    (tmp_path / NAME).unlink()
    steps = Steps(tmp_path / NAME)
    assert steps.get(steps.last) == step(steps.last)
    assert steps.get(steps.last + 1) is None


def test_lines_wait_in_memory_while_the_disk_is_full(tmp_path: Path) -> None:
    script = f"""
import resource, sys
from pathlib import Path
from distbelief.coordinator import metricsfile
metricsfile.MOST_WAITING_BYTES = int(sys.argv[2])
log = metricsfile.MetricsFile(Path(sys.argv[1]))
before = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, ({PART}, before[1]))
said = []
for number in range(100):
    log.add({{"kind": "step", "step": number, "fingerprint": "x" * 100}})
    if log.path.stat().st_size > {PART} - 150 and not any(said):  # the line before the disk is full
        log.add({{"kind": "notice", "text": "step 30 is not saved", "pad": "x" * 300}})
    said.append(log.flush())
resource.setrlimit(resource.RLIMIT_FSIZE, before)
said += [log.flush(), log.flush(), log.flush()]
log.close()
print("|".join(text for text in said if text))
"""
    for most, lost in ((1 << 20, False), (3000, True)):
        path = tmp_path / str(most) / NAME
        path.parent.mkdir()
        done = subprocess.run(
            [sys.executable, "-c", script, str(path), str(most)],
            capture_output=True,
            text=True,
            timeout=300,
            check=True,
        )
        one, other = done.stdout.strip().split("|")
        assert "cannot write" in one
        assert one.splitlines()[0].endswith("training goes on")
        assert one.splitlines()[1:] == ["step 30 is not saved"], "a view would see it when the disk has room"
        lines = [json.loads(line) for line in path.read_text().splitlines()]  # none is torn
        assert lines[-1]["kind"] == "notice"
        steps = [line["step"] for line in lines if line["kind"] == "step"]
        if lost:
            missing = 100 - len(steps)
            assert steps == list(range(len(steps)))
            assert f"{missing} lines were dropped" in other
            assert missing > 0
        else:
            assert steps == list(range(100))
            assert "no line was lost" in other


def test_a_part_that_is_longer_than_one_read_is_read_whole(tmp_path: Path) -> None:
    lines = [{"kind": "notice", "text": "x" * 3000, "number": number} for number in range(1000)]
    (tmp_path / NAME).write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert list(records(tmp_path / NAME)) == lines


def test_a_reader_leaves_nothing_open(tmp_path: Path) -> None:
    write(tmp_path, [step(number) for number in range(200)])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        assert len(list(records(tmp_path / NAME))) == 200
        Follower(tmp_path).catch_up()
    assert len(os.listdir("/proc/self/fd")) == before
