"""Tables, goals, figures and the page from a file of results, which is made here: what it says is known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.compare import page, plan, summary
from bench.compare.results import Results


def measured(system: str, repetition: int, speed: float, **more: Any) -> dict[str, Any]:
    return {
        "part": "speed", "workload": "mlp", "workers": 2, "system": system, "repetition": repetition,
        "samples_per_s": speed, "first_step_s": 4.0, "losses": [2.0, 1.5, 1.0], "others": 0.02, "peak_bytes": 3e8,
        "wire_bytes_per_step": 1e6, "accuracy": [], "weights_sha256": "", "warm_up": 1, "problem": "", "retaken": 0,
        **more,
    }  # fmt: skip


def content(*measurements: dict[str, Any]) -> dict[str, Any]:
    machine = {
        "date": "2026-11-16", "cpu": "a processor", "cores": 2, "cores_usable": 2, "memory_gib": 8.0,
        "instruction_set": "AVX2", "kernel": "6", "versions": {"torch": "2.13.0"},
    }  # fmt: skip
    return {
        "arguments": [], "machine": machine, "settings": {"quick": False, "threads": 1}, "load": {"before": [0, 0, 0]},
        "measurements": list(measurements), "references": {}, "skipped": {}, "failed": {}, "others": {}, "took_s": 60,
    }  # fmt: skip


TWO = (
    measured("allreduce", 0, 200.0), measured("ddp", 0, 100.0), measured("ideal", 0, 250.0),
    measured("allreduce", 1, 120.0), measured("ddp", 1, 80.0), measured("ideal", 1, 125.0),
)  # fmt: skip


def test_ratios_are_taken_within_a_repetition() -> None:
    rows = {row.system: row for row in summary.rows(content(*TWO), "speed", "mlp", 2)}
    ours = rows["allreduce"]
    assert ours.to_ddp is not None
    assert ours.to_ideal is not None
    assert ours.to_ddp.values == [2.0, 1.5]
    assert (ours.to_ddp.low, ours.to_ddp.median, ours.to_ddp.high) == (1.5, 1.75, 2.0)
    assert ours.to_ideal.values == [0.8, 0.96]


def test_goals_are_held_against_medians() -> None:
    found = {one.what: one for one in summary.verdicts(content(*TWO))}
    assert found["mlp: samples/s over DDP's"].at_least == 1.35
    assert found["mlp: samples/s over DDP's"].met
    assert not found["mlp: samples/s over the ideal's"].met
    assert found["first step: torch DDP's time (the soonest peer's) over ours"].found == 1.0


def test_where_systems_have_taken_turns_goals_are_held_against_those() -> None:
    whole = content(*TWO)
    speeds = {"allreduce": [99.0, 110.0, None, 95.0], "ideal": [100.0, 100.0, 100.0, 100.0], "ddp": [50.0, None, 1.0]}
    whole["turns"] = {"mlp": {"at": "today", "turn_s": 2.0, "others": 0.0, "samples_per_s": speeds}}
    found = {one.what: one for one in summary.verdicts(whole)}
    assert found["mlp: samples/s over the ideal's"].found == 0.99
    assert found["mlp: samples/s over DDP's"].found == 1.98  # of the one round in which both were measured
    assert summary.turns(whole, "cnn", "ddp") is None
    speeds["allreduce-onednn"] = [200.0, 190.0, 180.0, 170.0]
    whole["measurements"] += [measured("allreduce-onednn", 0, 1.0)]
    found = {one.what: one for one in summary.verdicts(whole)}
    assert found["mlp: samples/s over the ideal's"].found == 0.99
    assert found["mlp, oneDNN: samples/s over DDP's"].found == 92.0  # of two rounds
    assert "mlp, oneDNN: samples/s over the ideal's" not in found  # another library multiplies there


def test_who_is_not_comparable_comes_last_and_ours_is_a_problem() -> None:
    wrong = content(
        *TWO, measured("ps-sync", 0, 999.0, problem="its loss is 9"), measured("fsdp", 0, 9e9, problem="no")
    )
    assert [row.system for row in summary.rows(wrong, "speed", "mlp", 2)][-2:] == ["fsdp", "ps-sync"]
    wrong["others"] = {"recovery": {"status": 1, "problems": ["a step was done twice"]}, "bandwidth": {"status": 0}}
    assert summary.problems_of_ours(wrong) == [
        "mlp ×2: DistBelief ps:sync: its loss is 9",
        "recovery: a step was done twice",
    ]


def test_two_repetitions_of_an_exact_job_have_the_same_weights() -> None:
    apart = content(
        measured("allreduce", 0, 1.0, weights_sha256="a"), measured("allreduce", 1, 1.0, weights_sha256="b")
    )
    assert "weights differ" in summary.problems_of_ours(apart)[0]
    free = content(measured("ps-async", 0, 1.0, weights_sha256="a"), measured("ps-async", 1, 1.0, weights_sha256="b"))
    assert summary.problems_of_ours(free) == []


def test_blank_lines_comments_and_docstrings_are_no_code(tmp_path: Path) -> None:
    file = tmp_path / "driver.py"
    file.write_text('"""About\n\nit."""\n\n# why\nx = """\ntext"""\n\n\ndef f():\n    """Does."""\n    return x\n')
    assert summary.lines_of_code(file) == 4


def test_the_page_and_its_figures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    more = [{**one, "part": "scaling", "workers": workers} for one in TWO for workers in (1, 2)]
    curve = [measured(name, 0, 1.0, part="accuracy", workload="fashion", accuracy=[(1.0, 0.5), (2.0, 0.9)])
             for name in ("allreduce", "ddp")]  # fmt: skip
    whole = content(*TWO, *more, *curve)
    whole["failed"] = {"speed mlp ×2": {"fsdp": "a traceback\nValueError: it cannot"}}
    whole["skipped"] = {"gloo-server": "no room"}
    whole["tried_again"] = {"speed mlp ×2": {"ddp": ["SIGABRT", "SIGABRT"]}}
    speeds = {"allreduce": [9.0] * 8, "ideal": [10.0] * 8, "allreduce-onednn": [15.0] * 8, "ddp-onednn": [12.0] * 8}
    whole["turns"] = {"mlp": {"at": "today", "turn_s": 2.0, "others": 0.0, "samples_per_s": speeds}}
    found = page.write(whole, tmp_path / "full.json", tmp_path / "docs" / "page.md", tmp_path / "docs" / "figures")
    written = {file.name for file in found}
    for name in ("speed", "scaling", "first-step", "accuracy", "costs"):
        assert {f"{name}.png", f"{name}.svg"} <= written
    assert all(file.stat().st_size > 500 for file in found)
    text = found[0].read_text()
    assert "| **DistBelief allreduce** | 160 | 1.75 (1.50 – 2.00) | 0.88 (0.80 – 0.96) |" in text
    assert "**not met**" in text
    assert "| mlp |  | 0.900 (0.90 – 0.90) |  | 8 × 2 s | today UTC |" in text
    assert "| mlp, oneDNN |  | 1.500 (1.50 – 1.50) | 1.250 (1.25 – 1.25) | 8 × 2 s | today UTC |" in text
    assert "2 timed steps after 1 of warm-up" in text
    assert "`ValueError: it cannot`" in text
    assert "- speed mlp ×2: torch DDP, 2 times: `SIGABRT`" in text
    assert "server on torch gloo: no room" in text
    assert "![Accuracy over time](figures/accuracy.png)" in text
    assert "Preliminary" not in text


def test_a_busy_machine_makes_a_preliminary_page(tmp_path: Path) -> None:
    text = page.text(content(measured("ddp", 0, 1.0, others=0.6)), tmp_path / "x.json", {})
    assert "Preliminary" in text
    text = page.text(content(measured("ray", 0, 1.0, others=0.6)), tmp_path / "x.json", {})
    assert "Preliminary" not in text  # they are its own


def test_results_are_resumed_only_with_the_same_settings(tmp_path: Path) -> None:
    file = tmp_path / "results.json"
    facts = {"settings": {"quick": True}, "arguments": []}
    first = Results.begin(file, facts, resume=False)
    key = ("speed", "mlp", 2, "ddp", 0)
    first.add(key, {"samples_per_s": 1.0})
    first.fail("speed mlp ×2", "fsdp", "no")
    again = Results.begin(file, facts, resume=True)
    assert again.has(key)
    assert not again.has((*key[:4], 1))
    assert again.content["failed"] == {}  # what failed is tried again
    assert not Results.begin(file, {**facts, "settings": {"quick": False}}, resume=True).has(key)
    assert not Results.begin(file, facts, resume=False).has(key)


def test_every_system_is_first_once_and_takes_what_it_can() -> None:
    (cell,) = plan.cells(plan.QUICK, ["speed"], ["mlp"], ["ddp", "allreduce", "pipeline"], 3)
    assert cell.systems == ("ddp", "allreduce")  # the MLP has no blocks that a pipeline could cut
    assert [name for _, name in cell.turns()] == ["ddp", "allreduce", "allreduce", "ddp", "ddp", "allreduce"]
    for size in (plan.FULL, plan.QUICK):
        for one in plan.cells(size, plan.PARTS, [], [], None):
            assert 0 < one.warm_up < one.steps


def test_what_goals_are_about_takes_turns_of_seconds() -> None:
    (cell,) = plan.cells(plan.FULL, ["turns"], ["mlp"], [], None)
    assert cell.systems == plan.DECIDING
    assert cell.repetitions == plan.FULL.rounds
