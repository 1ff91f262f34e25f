"""The plain view: what it prints for a run directory that grows."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from distbelief.observe.plain import PlainView


def append(run_dir: Path, *records: dict[str, Any]) -> None:
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def step(number: int, at: float) -> dict[str, Any]:
    """The record after which `number` steps are committed."""
    return {"kind": "step", "step": number - 1, "loss": 0.25, "samples": 100, "fingerprint": "f", "at": at}


def started(run_dir: Path, steps: int = 400) -> tuple[PlainView, io.StringIO]:
    (run_dir / "job.json").write_text(json.dumps({"name": "digits", "steps": steps, "strategy": "allreduce"}))
    stream = io.StringIO()
    view = PlainView(stream)
    view.started(run_dir, 2)
    return view, stream


def test_the_first_line_says_where(tmp_path: Path) -> None:
    _, stream = started(tmp_path)
    assert stream.getvalue() == f"2 workers, run directory {tmp_path}\n"


def test_step_lines_are_two_seconds_apart_by_the_records_time(tmp_path: Path) -> None:
    view, stream = started(tmp_path)
    append(tmp_path, *(step(n, 1000 + n / 10) for n in range(1, 51)))
    view.refresh()
    lines = stream.getvalue().splitlines()[1:]
    assert [line.split()[1] for line in lines] == ["1/400", "21/400", "41/400"]
    assert lines[1] == "step 21/400  loss 0.2500  1,000 samples/s"
    view.close()
    view.close()
    assert [line.split()[1] for line in stream.getvalue().splitlines()[4:]] == ["50/400"]


def test_the_last_step_is_always_shown_and_only_once(tmp_path: Path) -> None:
    view, stream = started(tmp_path, steps=3)
    append(tmp_path, *(step(n, 1000 + n / 10) for n in range(1, 4)))
    view.refresh()
    view.close()
    assert [line.split()[1] for line in stream.getvalue().splitlines()[1:]] == ["1/3", "3/3"]


def test_an_evaluation_shows_its_step_and_its_metrics(tmp_path: Path) -> None:
    view, stream = started(tmp_path)
    evaluation = {"kind": "evaluation", "step": 2, "metrics": {"loss": 0.1034, "accuracy": 0.97123}, "at": 1000.3}
    append(tmp_path, step(1, 1000.1), step(2, 1000.2), evaluation)
    view.refresh()
    assert stream.getvalue().splitlines()[2:] == [
        "step 2/400  loss 0.2500  1,000 samples/s",
        "evaluation at step 2: accuracy 0.9712, loss 0.1034",
    ]


def test_the_slowest_worker_is_named(tmp_path: Path) -> None:
    view, stream = started(tmp_path)
    times = {"host": "h", "first": 0, "end": 4, "step": 1, "data_s": 0.0, "comm_s": 0.0, "shards": 100}
    rows = [{"worker": 0, "compute_s": 10.0, **times}, {"worker": 1, "compute_s": 12.3, **times}]
    append(tmp_path, {"kind": "workers", "at": 1.0, "generation": 1, "step": 1, "workers": rows}, step(1, 1000.0))
    view.refresh()
    assert stream.getvalue().splitlines()[-1] == "step 1/400  loss 0.2500  worker 1 slowest (+23 %)"


def test_notices_and_logs_are_whole_lines(tmp_path: Path) -> None:
    view, stream = started(tmp_path)
    append(tmp_path, {"kind": "notice", "text": "worker 1 was lost"})
    view.refresh()
    view.log("worker 0", "10 %\r20 %\r")
    view.log("coordinator", "hello")
    assert stream.getvalue().splitlines()[1:] == ["worker 1 was lost", "[worker 0] 20 %", "[coordinator] hello"]


def test_a_notice_that_the_coordinator_has_printed_is_not_shown_again(tmp_path: Path) -> None:
    """Its disk had no room: the line is written to the log of steps when there is some."""
    view, stream = started(tmp_path)
    view.log("coordinator", "coordinator: the journal can be written again after 3 s")
    view.log("coordinator", "step 3 is not saved")
    view.log("worker 1", "worker 1 was lost")
    texts = ["step 3 is not saved", "the coordinator: the journal can be written again after 3 s", "worker 1 was lost"]
    append(tmp_path, *({"kind": "notice", "text": text} for text in texts))
    view.refresh()
    assert stream.getvalue().splitlines()[4:] == ["worker 1 was lost"], "a worker's own line is no notice"
    append(tmp_path, {"kind": "notice", "text": "step 3 is not saved"})
    view.refresh()
    assert stream.getvalue().splitlines()[5:] == ["step 3 is not saved"], "it has happened again"


def test_logs_come_before_the_start_and_closing_without_one_is_fine() -> None:
    stream = io.StringIO()
    view = PlainView(stream)
    view.log("worker 0", "importing")
    view.refresh()
    view.close()
    assert stream.getvalue() == "[worker 0] importing\n"


def test_at_the_end_every_member_of_a_divided_model_says_where_its_time_went(tmp_path: Path) -> None:
    view, stream = started(tmp_path)
    times = {"data_s": 0.1, "compute_s": 6.0, "comm_s": 3.9, "shards": 8}
    rows = [
        {
            "worker": w,
            "host": "h",
            "first": 0,
            "end": 8,
            "step": 9,
            "place": f"stage {w + 1}/2",
            "waits": waits,
            **times,
        }
        for w, waits in enumerate([{}, {"0": 3.1}])
    ]
    append(tmp_path, step(1, 1000.1), {"kind": "workers", "at": 1000.2, "generation": 1, "step": 9, "workers": rows})
    view.refresh()
    assert "stage" not in stream.getvalue()
    view.close()
    view.close()
    assert stream.getvalue().splitlines()[-2:] == [
        "worker 0  stage 1/2  compute 60 %  data 1 %  waits 0 %",
        "worker 1  stage 2/2  compute 60 %  data 1 %  waits 31 %, mostly for worker 0",
    ]
