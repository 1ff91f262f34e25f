"""Records in, progress out; and the reading of a file that grows."""

from __future__ import annotations

import doctest
import json
import math
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distbelief.coordinator.metricsfile import Record, Tail
from distbelief.observe import text
from distbelief.observe.records import Follower, Progress, WorkerLoad, advance, describe, find_slowest


def step(number: int, at: float, loss: float | None = 1.0, samples: int = 64) -> Record:
    """The record after which `number` steps are committed."""
    return {"kind": "step", "step": number - 1, "loss": loss, "samples": samples, "fingerprint": "f", "at": at}


def timing(worker: int, data: float, compute: float, comm: float, shards: int) -> Record:
    times = {"data_s": data, "compute_s": compute, "comm_s": comm, "shards": shards}
    return {"worker": worker, "host": "h", "first": worker, "end": worker + 1, "step": 9, **times}


def workers(at: float, *rows: Record, generation: int = 1) -> Record:
    return {"kind": "workers", "at": at, "generation": generation, "step": 9, "workers": list(rows)}


def fold(*records: Record, start: Progress | None = None) -> Progress:
    return reduce(advance, records, start or Progress())


def load(worker: int, shard_s: float | None) -> WorkerLoad:
    return WorkerLoad(worker, "h", worker, worker + 1, 0, shard_s=shard_s)


# --- steps -----------------------------------------------------------------------------------------------------------


def test_speed_is_the_median_over_recent_steps_by_the_records_own_times() -> None:
    times = [0.0, 0.1, 0.2, 0.3, 5.3, 5.4]  # an evaluation took five seconds
    progress = fold(*(step(i + 1, 1000 + at) for i, at in enumerate(times)))
    assert progress.step == 6
    assert progress.samples_per_s == pytest.approx(640)
    assert progress.remaining_s is None
    assert describe(progress, {"steps": 16}).remaining_s == pytest.approx(1.0)


def test_steps_that_were_committed_together_took_the_time_together() -> None:
    times = [10.0, 10.0, 11.0, 11.0, 12.0, 12.0]  # two at a time, 64 samples each
    progress = fold(*(step(i + 1, at) for i, at in enumerate(times)))
    assert progress.samples_per_s == pytest.approx(128)
    assert describe(progress, {"steps": 16}).remaining_s == pytest.approx(5.0)


def test_no_speed_before_two_steps() -> None:
    assert Progress().samples_per_s is None
    assert fold(step(1, 5.0)).samples_per_s is None


def test_repeats_gaps_and_clocks_set_back_are_no_measurement() -> None:
    progress = fold(step(1, 10.0), step(1, 10.5), step(5, 11.0), step(6, 3.0))
    assert progress.intervals == ()
    assert progress.step == 6
    assert fold(step(7, 3.5), start=progress).samples_per_s == pytest.approx(128)


def test_loss_is_smoothed_and_nan_does_not_stick() -> None:
    progress = fold(step(1, 1.0, 2.0), step(2, 2.0, 1.0))
    assert progress.loss == 1.0
    assert progress.smoothed == pytest.approx(1.9)
    bad = fold(step(3, 3.0, None), start=progress)
    assert bad.loss is not None
    assert math.isnan(bad.loss)
    assert bad.smoothed == pytest.approx(1.9)


def test_evaluations_notices_and_unknown_kinds() -> None:
    progress = fold(
        {"kind": "evaluation", "step": 3, "metrics": {"accuracy": 0.5}, "at": 1.0},
        {"kind": "notice", "text": "worker 1 was lost"},
        {"kind": "from the future"},
        {},
    )
    assert (progress.metrics, progress.metrics_step) == ({"accuracy": 0.5}, 3)
    assert progress.notice == "worker 1 was lost"


@settings(deadline=None)  # a noisy machine is no failure
@given(st.lists(st.tuples(st.integers(0, 5), st.floats(-1e6, 1e6)), max_size=200))
def test_any_sequence_of_steps_folds_to_a_positive_speed_or_none(records: list[tuple[int, float]]) -> None:
    progress = fold(*(step(number, at) for number, at in records))
    assert progress.samples_per_s is None or progress.samples_per_s > 0


# --- workers ---------------------------------------------------------------------------------------------------------


def test_shares_are_of_the_recent_window_only() -> None:
    first = timing(0, 10.0, 0.0, 0.0, 10)
    progress = fold(workers(0.0, first))
    assert progress.workers[0].data == 1.0
    later = timing(0, 11.0, 6.0, 3.0, 40)
    recent = fold(workers(5.0, later), start=progress).workers[0]
    assert (recent.data, recent.compute, recent.comm) == pytest.approx((0.1, 0.6, 0.3))
    assert recent.shard_s == pytest.approx(0.2)


def test_the_window_moves_on() -> None:
    rows = [workers(float(at), timing(0, 0.0, float(at), max(0.0, at - 50.0), at)) for at in range(101)]
    progress = fold(*rows)
    assert progress.workers[0].compute == pytest.approx(0.5)
    assert len(progress.snapshots) < 15


def test_a_new_generation_starts_from_zero() -> None:
    old = workers(0.0, timing(0, 50.0, 50.0, 0.0, 100))
    new = workers(1.0, timing(0, 0.0, 1.0, 3.0, 2), timing(1, 0.0, 1.0, 1.0, 2), generation=2)
    progress = fold(old, new)
    assert [w.comm for w in progress.workers] == pytest.approx([0.75, 0.5])


def test_a_stalled_worker_shows_the_whole_generation_instead_of_zeros() -> None:
    row = timing(0, 1.0, 3.0, 0.0, 4)
    assert fold(workers(0.0, row), workers(1.0, row)).workers[0].compute == pytest.approx(0.75)


def test_a_worker_that_did_nothing_yet() -> None:
    idle = fold(workers(0.0, timing(0, 0.0, 0.0, 0.0, 0))).workers[0]
    assert (idle.data, idle.compute, idle.comm, idle.shard_s) == (0.0, 0.0, 0.0, None)


def test_waiting_is_of_the_recent_window_and_names_the_one_it_is_owed_to() -> None:
    early = {**timing(1, 0.0, 5.0, 5.0, 8), "place": "stage 2/3", "waits": {"0": 4.0, "2": 1.0}}
    late = {**timing(1, 0.0, 10.0, 10.0, 16), "place": "stage 2/3", "waits": {"0": 4.5, "2": 3.0}}
    (found,) = fold(workers(1000.0, early), workers(1010.0, late)).workers
    assert (found.place, found.waiting, found.waits_for) == ("stage 2/3", 0.25, 2)
    (found,) = fold(workers(1000.0, early)).workers
    assert (found.waiting, found.waits_for) == (0.5, 0)


def test_members_of_a_divided_model_are_in_the_order_of_their_places() -> None:
    rows = [
        {**timing(worker, 0.0, 5.0, 5.0, 8), "place": f"stage {n}/3"} for n, worker in enumerate((0, 7, 2), start=1)
    ]
    assert [one.worker for one in fold(workers(1000.0, *rows)).workers] == [0, 7, 2]
    plain = [timing(worker, 0.0, 5.0, 5.0, 8) for worker in (0, 7, 2)]
    assert [one.worker for one in fold(workers(1000.0, *plain)).workers] == [0, 2, 7]


def test_who_waits_for_nobody() -> None:
    (found,) = fold(workers(1000.0, timing(1, 0.0, 5.0, 5.0, 8))).workers
    assert (found.place, found.waiting, found.waits_for) == ("", 0.0, None)


def test_a_run_that_goes_back_shows_the_step_that_it_is_at() -> None:
    state = fold(*(step(n, 1000.0 + n) for n in range(1, 8)), {"kind": "rollback", "step": 5, "at": 1008.0})
    state = fold(step(6, 1010.0, loss=0.5), start=state)
    assert (state.step, state.loss) == (6, 0.5)
    assert len(state.intervals) == 6, "the way back is no measurement"


def test_the_slowest_is_named_only_when_it_is_clear() -> None:
    assert find_slowest((load(0, 1.0), load(1, 1.05), load(2, 1.0))) is None
    found = find_slowest((load(0, 1.0), load(1, 1.3), load(2, 1.1)))
    assert found is not None
    assert found.worker == 1
    assert found.excess == pytest.approx(1.3 / 1.05 - 1)


def test_one_worker_or_spares_have_no_slowest() -> None:
    assert find_slowest(()) is None
    assert find_slowest((load(0, 9.0),)) is None
    assert find_slowest((load(0, 9.0), load(1, None))) is None
    assert find_slowest((load(0, 0.0), load(1, 1.0))) is None


# --- files -----------------------------------------------------------------------------------------------------------


def test_tail_gives_each_record_once_and_waits_for_whole_lines(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = Tail(path)
    assert tail.read() == []
    whole = json.dumps({"text": "é"}, ensure_ascii=False).encode() + b"\n"
    cut = whole.index("é".encode()) + 1  # inside a character
    with path.open("ab", buffering=0) as file:
        file.write(whole + whole[:cut])
        assert tail.read() == [{"text": "é"}]
        assert tail.read() == []
        file.write(whole[cut:])
        assert tail.read() == [{"text": "é"}]


def test_tail_skips_what_a_killed_writer_left(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"a": 1}\n{"b": {"c"\n[1]\n\n{"d": 2}\n')
    assert Tail(path).read() == [{"a": 1}, {"d": 2}]


@settings(deadline=None)  # a noisy machine is no failure
@given(st.lists(st.dictionaries(st.text(max_size=3), st.integers(), max_size=3), max_size=8), st.data())
def test_tail_is_the_same_however_the_writes_are_cut(records: list[dict[str, Any]], data: st.DataObject) -> None:
    import tempfile

    whole = b"".join(json.dumps(record).encode() + b"\n" for record in records)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(whole)), max_size=6)))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.jsonl"
        tail, read = Tail(path), []
        for low, high in zip([0, *cuts], [*cuts, len(whole)], strict=True):
            with path.open("ab") as file:
                file.write(whole[low:high])
            read += tail.read()
    assert read == records


def test_follower_reads_the_job_as_soon_as_it_is_whole(tmp_path: Path) -> None:
    follower = Follower(tmp_path)
    assert list(follower.poll()) == []
    (tmp_path / "job.json").write_text('{"name": "dig')
    (tmp_path / "metrics.jsonl").write_text(json.dumps(step(1, 1.0)) + "\n")
    assert [progress.step for _, progress in follower.poll()] == [1]
    (tmp_path / "job.json").write_text('{"name": "digits", "steps": 40, "strategy": "allreduce"}')
    assert list(follower.poll()) == []
    assert (follower.progress.name, follower.progress.total, follower.progress.step) == ("digits", 40, 1)


def test_the_examples_in_the_docstrings() -> None:
    assert doctest.testmod(text).failed == 0
