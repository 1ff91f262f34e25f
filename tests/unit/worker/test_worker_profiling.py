"""What a worker records of its steps, and that nothing of it is left behind, in the code or in a run's way."""

from __future__ import annotations

import importlib
import json
import pkgutil
from pathlib import Path

import pytest
import torch

from distbelief import transport
from distbelief.control.credentials import KeyAuthority
from distbelief.control.messages import TracePart
from distbelief.coordinator.runfiles import keep_trace
from distbelief.errors import DistBeliefError, JobError
from distbelief.instrument import Instrument, declared, places
from distbelief.observe.profiling.parts import read_parts
from distbelief.options import RunOptions, profile_plan
from distbelief.strategies import flatmodel, parse
from distbelief.worker.profiling import profiler as profiling
from distbelief.worker.profiling.instruments import INSTRUMENTS, Instruments, Spans
from distbelief.worker.profiling.profiler import Profiler, window
from distbelief.worker.spec import WorkerSpec

STRATEGIES = ("allreduce", "ps:async", "sandblaster", "local_sgd:8", "pipeline:4")
OF_STRATEGIES = tuple(dict.fromkeys(one for text in STRATEGIES for one in parse(text).instruments))
for package in (transport, flatmodel):
    for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        importlib.import_module(module.name)
TABLE = (*INSTRUMENTS, *declared(), *OF_STRATEGIES)


def test_every_exchange_and_its_waits_are_timed() -> None:
    there = {(one.owner, one.phase) for one in declared()}
    exchanges = ("SharedExchange", "TorchExchange", "DeviceExchange")
    assert there >= {(name, "reduce") for name in exchanges}
    assert there >= {(name, "wait") for name in ("FutexFlags", "TorchGroup", "TorchExchange", "DeviceExchange")}


@pytest.mark.parametrize("instrument", TABLE, ids=lambda one: f"{one.owner or one.module}")
def test_the_table_names_code_that_exists(instrument: Instrument) -> None:
    """Whoever renames a function of the step path changes the table, or a phase would vanish without a word."""
    found = {name for _, name in places(instrument, importlib.import_module(instrument.module))}
    assert found == set(instrument.names)


def test_what_is_attached_is_detached() -> None:
    for instrument in TABLE:
        importlib.import_module(instrument.module)
    before = [
        (owner, name, vars(owner)[name])
        for instrument in TABLE
        for owner, name in places(instrument, importlib.import_module(instrument.module))
    ]
    instruments = Instruments(Spans(), OF_STRATEGIES)
    instruments.attach()
    assert all(vars(owner)[name] is not function for owner, name, function in before)
    instruments.detach()
    assert all(vars(owner)[name] is function for owner, name, function in before)


def test_spans_within_spans() -> None:
    spans, looked = Spans(), []
    spans.at_end = lambda: looked.append(spans.ended[-1][0])
    inner = spans.timed("wait", lambda: 1)
    same = spans.timed("reduce", inner)

    def fails() -> None:
        raise ValueError("boom")

    assert spans.timed("reduce", same)() == 1
    with pytest.raises(ValueError, match="boom"):
        spans.timed("data", fails)()
    ended = spans.take()
    assert looked == ["reduce", "data"], "only where nothing is under way"
    assert [span[0] for span in ended] == ["wait", "reduce", "data"], "one of the same phase is not told"
    (_, start, took, _, _), (_, outer_start, outer_took, cpu, _) = ended[:2]
    assert outer_start <= start
    assert start + took <= outer_start + outer_took
    assert 0 <= cpu <= outer_took + 1_000_000
    assert spans.take() == []


def test_a_window_that_the_run_never_reaches() -> None:
    with pytest.raises(JobError, match="begin at step 40, but the run ends after 40"):
        window(40, 50, steps=40)


def spec(run_dir: Path, first: int, end: int, is_sent: bool = False) -> WorkerSpec:
    credential = KeyAuthority(b"s" * 32).run.worker(3)
    options = RunOptions(4, "allreduce", profile=f"{first}:{end}" if end else "auto")
    return WorkerSpec(3, "a", "tcp://127.0.0.1:1", credential, str(run_dir), options, is_away=is_sent)


def profiler(run_dir: Path, first: int, end: int, parts: list[TracePart] | None = None) -> Profiler:
    sent: list[TracePart] = [] if parts is None else parts
    made = Profiler(
        spec(run_dir, first, end, parts is not None), 20, parse("allreduce"), torch.device("cpu"), sent.append
    )
    made.seated("stage 1/2", 1)
    return made


def a_step() -> None:
    torch.ones(3, 3, requires_grad=True).mm(torch.ones(3, 3)).sum().backward()


def train(profile: Profiler, steps: range) -> None:
    for step in steps:
        profile.at(step)
        a_step()


def names(run_dir: Path) -> list[str]:
    (part,) = read_parts(run_dir / "profile")
    return [span[0] for span in part.spans]


def test_the_steps_of_the_window_are_recorded(tmp_path: Path) -> None:
    original = torch.Tensor.backward
    train(profile := profiler(tmp_path, 3, 5), range(7))
    assert torch.Tensor.backward is original
    profile.finish()
    (part,) = read_parts(tmp_path / "profile")
    assert names(tmp_path) == ["backward", "step 3", "backward", "step 4"]
    assert (part.worker, part.host, part.place, part.steps, part.is_whole) == (3, "a", "stage 1/2", (3, 5), True)
    products = [one for one in part.operators if one["name"] == "aten::mm"]
    assert len(products) >= 3, "the step before the window is there too: torch's profiler is started early"
    _, start, took, _, _ = part.spans[1]
    inside = [one for one in products if start / 1000 <= one["ts"] and one["ts"] + one["dur"] <= (start + took) / 1000]
    assert inside, "operators are on the clock of the spans"
    assert part.operators[0]["ts"] < start / 1000 < part.operators[-1]["ts"]


def test_a_generation_that_was_given_up(tmp_path: Path) -> None:
    profile = profiler(tmp_path, 1, 4)
    train(profile, range(3))
    profile.left()
    profile.seated("", 1)
    train(profile, range(2, 5))
    assert names(tmp_path) == ["backward", "step 1", "backward", "regroup", "backward", "step 2", "backward", "step 3"]


def test_a_window_up_to_the_last_step(tmp_path: Path) -> None:
    train(profile := profiler(tmp_path, 1, 3), range(3))
    profile.finish()
    assert names(tmp_path) == ["backward", "step 1", "backward", "step 2"]


def test_a_killed_worker_leaves_what_it_had(tmp_path: Path) -> None:
    train(profile := profiler(tmp_path, 1, 9), range(4))
    (part,) = read_parts(tmp_path / "profile")
    assert [span[0] for span in part.spans] == ["backward", "step 1", "backward", "step 2"]
    assert not part.is_whole
    assert "up to step 2" in part.notes[0]
    profile.finish()


def test_a_profile_that_cannot_be_written_ends_no_run(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    original = torch.Tensor.backward
    (tmp_path / "profile").write_text("a file where the folder should be")
    train(profile := profiler(tmp_path, 1, 3), range(5))
    profile.finish()
    assert torch.Tensor.backward is original
    assert "training goes on" in capfd.readouterr().out


def test_no_more_operators_than_torch_can_work_on_in_a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing else of the process runs while it does, and a worker that is silent for long is taken for dead."""
    monkeypatch.setattr(profiling, "MOST_EVENTS", 2000)
    recorder = profiling.Operators(torch.device("cpu"))
    recorder.start(0.05)
    while not recorder.recorded_ns[1]:
        a_step()
        recorder.look()
    recorder.stop()
    recorder.start()
    for _ in range(2000):
        a_step()
        recorder.look()
    recorder.stop()
    assert 200 < recorder.count < 10_000, "2000 steps have 50,000"


def test_files_travel_from_a_host_that_does_not_see_the_run(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    (there / "profile").mkdir(parents=True)
    parts: list[TracePart] = []
    train(profiler(here, 1, 3, parts), range(4))
    for part in [*parts, parts[-1]]:  # a new coordinator is told the last again
        assert keep_trace(there, part) == ""
    sent = {path.name: path.read_bytes() for path in (there / "profile").iterdir()}
    assert len(sent) == 2
    assert sent == {path.name: path.read_bytes() for path in (here / "profile").iterdir()}
    assert json.loads(next(content for name, content in sent.items() if name.endswith(".spans")).split(b"\n")[0])


@pytest.mark.parametrize("name", ["../worker-3-1.spans", "worker-4-1.spans", "journal.jsonl", "worker-3-1.spans/x", ""])
def test_a_part_goes_nowhere_else(tmp_path: Path, name: str) -> None:
    (tmp_path / "profile").mkdir()
    assert "with a wrong name or size" in keep_trace(tmp_path, TracePart(3, name, 0, b"x"))
    assert "with a wrong name or size" in keep_trace(tmp_path, TracePart(3, "worker-3-1.spans", 1 << 40, b"x"))
    assert [path.name for path in tmp_path.rglob("*")] == ["profile"]


def test_a_part_that_nobody_asked_for(tmp_path: Path) -> None:
    assert "cannot be written" in keep_trace(tmp_path, TracePart(3, "worker-3-1.spans", 0, b"x"))


@pytest.mark.parametrize("text", ["10", "20:10", "5:5", "a:b", "-1:4", "1:2:3", "1.5:3", "٣:٥"])
def test_steps_that_make_no_sense(text: str) -> None:
    with pytest.raises(DistBeliefError, match="does not say which steps to profile"):
        profile_plan(text)
