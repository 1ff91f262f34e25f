"""From parts to a trace to a table: pure, so with made-up workers."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from distbelief.errors import DistBeliefError
from distbelief.observe.profiling.collecting import collect, read_summary
from distbelief.observe.profiling.parts import Span, WorkerProfile, parse
from distbelief.observe.profiling.rules.merging import ahead, merge
from distbelief.observe.profiling.rules.shown import as_data, lines
from distbelief.observe.profiling.rules.summary import summarise

MS = 1_000_000
DAY = 86_400 * 1000 * MS


def spans(forward: int, wait: int, steps: int = 2, thread: int = 7) -> list[Span]:
    """Steps of 100 ms, from 1000 ms of the worker's clock on: data, forward with a wait in it, a wait at the end."""
    found: list[Span] = []
    for step in range(steps):
        at = (1000 + 100 * step) * MS
        found += [
            ("data", at, 10 * MS, 5 * MS, thread),
            ("wait", at + 20 * MS, 5 * MS, 0, thread),
            ("forward", at + 10 * MS, forward * MS, (forward - 5) * MS, thread),
            ("wait", at + (90 - wait) * MS, wait * MS, 0, thread),
            (f"step {step + 10}", at, 100 * MS, 60 * MS, thread),
        ]
    return found


def part(worker: int, host: str = "a", since_ns: int = DAY, of: list[Span] | None = None, **more: Any) -> WorkerProfile:
    found = spans(30, 20) if of is None else of
    return WorkerProfile(f"worker-{worker}-1", worker, host, "", "allreduce", (10, 12), 7, since_ns, found, **more)


def phases(trace: dict[str, Any], pid: int) -> list[tuple[str, float, float]]:
    found = [e for e in trace["traceEvents"] if e.get("cat") == "phase" and e["pid"] == pid]
    return [(e["name"], e["ts"], e["dur"]) for e in found]


def test_workers_are_processes_of_one_trace() -> None:
    operator = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "pid": 99, "tid": 7, "ts": 1_012_000.0, "dur": 3000.0}
    early = {**operator, "ts": 900_000.0}
    kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 20, "ts": 1_013_000.0, "dur": 500.0}
    flow = {"ph": "s", "cat": "ac2g", "name": "ac2g", "pid": 99, "tid": 7, "ts": 1_012_000.0, "id": 4}
    trace = merge([part(0, operators=[early, operator, kernel, flow]), part(2, operators=[operator])], together=True)
    meta = [e for e in trace["traceEvents"] if e["ph"] == "M"]
    assert {e["args"]["name"] for e in meta if e["name"] == "process_name"} == {
        "worker 0 on a", "worker 2 on a", "GPU 0 of worker 0",
    }  # fmt: skip
    first, second = phases(trace, 1), phases(trace, 2)
    assert first[0] == ("data", 0.0, 10_000.0)
    assert first == second, "one host has one clock"
    ours = [e for e in trace["traceEvents"] if e.get("cat") == "cpu_op"]
    assert [(e["pid"], e["ts"]) for e in ours] == [(1, 12_000.0), (2, 12_000.0)], (
        "what came before the steps is left out"
    )
    lines_of = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["ph"] == "X"}
    assert len({tid for _, tid in lines_of}) == len(lines_of), "no two processes have a thread number in common"
    assert next(e for e in trace["traceEvents"] if e["ph"] == "s")["id"] == (1 << 32) + 4
    summary = summarise(trace)
    assert [one.device_s for one in summary.workers] == [0.0005, 0.0]
    assert lines(summary)[1].endswith("GPU")
    assert json.loads(json.dumps(trace)) == trace


def test_clocks_of_two_hosts() -> None:
    """Host b is 5 s ahead. Its worker comes later to each meeting, so it waits less; they part at the same moment."""
    late = part(1, host="b", since_ns=DAY + 5000 * MS, of=spans(60, 5))
    parts = [part(0), late]
    assert ahead(parts) == {"a": 0, "b": 5000 * MS}
    trace = merge(parts, together=True)
    ends = [{round(ts + dur) for name, ts, dur in phases(trace, pid) if name == "wait"} for pid in (1, 2)]
    assert ends[0] == ends[1]
    assert any("b +5000.000 ms" in note for note in trace["otherData"]["notes"])


def test_clocks_of_members_that_never_meet() -> None:
    parts = [part(0), part(1, host="b", since_ns=DAY + 3 * MS)]
    trace = merge(parts, together=False)
    assert phases(trace, 2)[0][1] == 3000.0
    assert any("may be apart" in note for note in trace["otherData"]["notes"])
    assert ahead([part(0), part(1, host="b", of=[])]) == {"a": 0, "b": None}


def test_where_the_time_went() -> None:
    summary = summarise(merge([part(0), part(1, of=spans(60, 5))], together=True))
    first, second = summary.workers
    assert first.wall_s == pytest.approx(0.2)
    assert first.step_s == pytest.approx(0.1)
    shares = {name: round(spent.seconds / first.wall_s, 3) for name, spent in first.phases.items() if spent.seconds}
    assert shares == {"data": 0.1, "forward": 0.25, "wait": 0.25, "other": 0.4}, (
        "a phase is without what is inside of it"
    )
    assert first.phases["forward"].cpu_s == pytest.approx(0.05)
    assert second.phases["forward"].seconds == pytest.approx(0.11)
    assert summary.slowest
    assert summary.slowest.worker == 1
    assert summary.slowest.excess == pytest.approx(90 / 75 - 1)
    fewer = part(1, of=spans(60, 5, steps=1), is_whole=False)
    assert summarise(merge([part(0), fewer], together=True)).slowest is None, "they are not of the same steps"


def test_operators_by_their_own_time() -> None:
    def operator(name: str, at_ms: float, took_ms: float) -> dict[str, Any]:
        return {"ph": "X", "cat": "cpu_op", "name": name, "pid": 9, "tid": 7, "ts": at_ms * 1000, "dur": took_ms * 1000}

    some = [operator("aten::linear", 1010, 12), operator("aten::addmm", 1011, 10), operator("aten::addmm", 1110, 10)]
    top = summarise(merge([part(0, operators=some)], together=True)).operators
    assert [(one.name, one.calls_per_step) for one in top] == [("aten::addmm", 1.0), ("aten::linear", 0.5)]
    assert top[0].share == pytest.approx(0.1)
    assert top[1].seconds_per_step == pytest.approx(0.001)
    half = summarise(merge([part(0, operators=some[:2], operators_until=1100 * MS)], together=True))
    assert half.operators[0].share == pytest.approx(0.1), "of the time in which they were recorded"
    assert half.operators[0].calls_per_step == 1.0
    assert "(recorded in the first 50 % of these steps)" in "\n".join(lines(half))


def test_a_worker_that_was_killed_and_its_successor() -> None:
    head = {"worker": 1, "host": "a", "place": "", "strategy": "allreduce", "steps": [10, 12], "thread": 7}
    content = json.dumps(head | {"clock": [DAY, 0]}) + "\n" + json.dumps(spans(30, 20, steps=1)) + "\n" + '[["forw'
    torn = parse("worker-1-5", content.encode(), problem="it had not written them")
    assert torn
    assert not torn.is_whole
    assert len(torn.spans) == 5
    trace = merge([part(0), torn, part(1)], together=True)
    names = [e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"]
    assert names == ["worker 0 on a", "worker 1 on a", "worker 1 on a (process 2)"]
    shown = "\n".join(lines(summarise(trace)))
    assert "worker 1 on a ended while it was recorded: this is what it had up to step 10" in shown
    assert "has no operators: it had not written them" in shown
    assert parse("worker-1-5", b"") is None
    assert parse("worker-1-5", b'{"wor') is None


def test_as_people_and_programs_see_it() -> None:
    summary = summarise(merge([part(0), part(1)], together=True, notes=["something was odd"]))
    shown = lines(summary, "trace.json.gz")
    assert shown[0] == "where the time went: steps 10 to 11 of 2 workers, allreduce, 100.0 ms a step"
    assert shown[1].split() == ["data", "forward", "wait", "other", "CPU"]
    assert shown[2].split() == ["worker", "0", "10", "%", "25", "%", "25", "%", "40", "%", "60", "%"]
    assert "note: something was odd" in shown
    by_cpu = lines(summary, cpu=True)
    assert by_cpu[0].startswith("where the CPU time went")
    assert by_cpu[2].split() == ["worker", "0", "8.3", "%", "42", "%", "0", "%", "50", "%", "60", "%"]
    data = json.loads(json.dumps(as_data(summary, "x"), allow_nan=False))
    assert data["workers"][0]["phases"]["data"] == pytest.approx({"share": 0.1, "s": 0.01, "cpu_s": 0.005})
    assert data["slowest"] is None
    assert lines(summarise(merge([], together=True)))[0] == "the profile is empty"


def test_collecting_a_run(tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    folder.mkdir()
    head = {"worker": 0, "host": "a", "place": "", "strategy": "allreduce", "steps": [10, 12], "thread": 7}
    content = [head | {"clock": [DAY, 0]}, spans(30, 20), {"over": True}]
    (folder / "worker-0-5.spans").write_text("\n".join(json.dumps(one) for one in content) + "\n")
    (folder / "worker-0-5.operators.gz").write_bytes(gzip.compress(b"{}")[:-5])
    record = {"kind": "workers", "at": 1.0, "workers": [{"worker": 0}, {"worker": 1}]}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    summary, trace = read_summary(tmp_path)
    assert [path.name for path in folder.iterdir()] == ["workers.pt.trace.json.gz"]
    assert summary.workers[0].steps == 2
    assert any("worker 1 sent no profile" in note for note in summary.notes)
    assert any("no operators: the file is damaged" in note for note in summary.notes)
    assert read_summary(trace)[0] == summary == read_summary(tmp_path)[0], "again and again"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "has no profile"),
        (b"no gzip", "cannot be read as a profile"),
        (gzip.compress(b"{", mtime=0), "cannot be read as a profile"),
        (gzip.compress(b"[1]", mtime=0), "not a DistBelief trace"),
        (gzip.compress(b'{"traceEvents": []}', mtime=0), "not a DistBelief trace"),
        (gzip.compress(b'{"otherData": {"program": "distbelief"}}', mtime=0), "cannot be read as a profile"),
        (gzip.compress(b"{}" * 1000, mtime=0)[:-9], "cannot be read as a profile"),
    ],
)
def test_what_is_no_profile_is_one_error(tmp_path: Path, content: bytes | None, why: str) -> None:
    (tmp_path / "profile").mkdir()
    if content is not None:
        (tmp_path / "profile" / "workers.pt.trace.json.gz").write_bytes(content)
    with pytest.raises(DistBeliefError, match=why):
        read_summary(tmp_path)
    if content is None:
        assert collect(tmp_path) is None


def test_a_place_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DistBeliefError, match="there is no"):
        read_summary(tmp_path / "nowhere")
