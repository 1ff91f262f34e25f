"""A profiled run: the weights are those of one that is not profiled, also when a worker is killed while it records."""

from __future__ import annotations

import gzip
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distbelief.observe.profiling.collecting import read_summary
from tests.support.runs.command import JOBS, Run
from tests.support.runs.watched import Watched

Start = Callable[..., Run]
Wait = Callable[[Callable[[], object]], None]

SMALL = [JOBS / "small.py", "--set", "hold_step=20", "--set", "steps=60", "--save-every", "never"]


def test_a_profile_through_a_kill(start: Start, tmp_path: Path, wait_until: Wait) -> None:
    run = Watched(start, tmp_path, wait_until, *SMALL, "--workers", 2, "--profile-steps", "6:40")
    run.after(20)  # the members stay there: both are recorded
    run.signal(1, signal.SIGKILL)
    result = run.result()
    plain = start("train", *SMALL, "--workers", 1, "--run-dir", "plain", "--json").wait().json
    assert plain["weights_sha256"] == result["weights_sha256"]
    assert plain["profile"] is None
    found: dict[str, Any] = result["profile"]
    trace = json.loads(gzip.decompress(Path(tmp_path / found["trace"]).read_bytes()))
    spans = [event for event in trace["traceEvents"] if event.get("cat") == "phase"]
    assert {event["name"] for event in spans} >= {
        "data",
        "forward",
        "backward",
        "reduce",
        "optimizer",
        "wait",
        "regroup",
    }
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert {name.split(" on ")[0] for name in names} >= {"worker 0", "worker 1"}
    assert any(note.startswith("worker 1 on") and "ended while it was recorded" in note for note in found["notes"])
    first = next(one for one in found["workers"] if one["worker"] == 0)
    assert first["whole"]
    assert first["steps"] in (33, 34), "the one that was under way when the other died may have been applied"
    assert abs(sum(one["share"] for one in first["phases"].values()) - 1) < 1e-6
    assert any(one["name"] == "aten::addmm" for one in found["operators"])
    assert sorted(path.name for path in (run.folder / "profile").iterdir()) == ["workers.pt.trace.json.gz"]
    again, _ = read_summary(run.folder)
    assert [one.steps for one in again.workers] == [one["steps"] for one in found["workers"]]
