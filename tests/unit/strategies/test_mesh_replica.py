"""Every layout against one process, with real members over gloo."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_stage import Stage
from mesh_member import JOBS, STEPS, Generation, Script

from distbelief.strategies.degrees import Degrees
from distbelief.strategies.named import tied
from distbelief.verification.plain import make_model, train_plainly

MEMBER = str(Path(__file__).with_name("mesh_member.py"))

LAYOUTS = [
    ("pipeline:2:gpipe", Degrees(pipeline=2)),
    ("pipeline:2", Degrees(pipeline=2)),
    ("pipeline:2:interleaved", Degrees(pipeline=2)),
    ("pipeline:2:zbv", Degrees(pipeline=2)),
    ("tensor:2", Degrees(tensor=2)),
    ("sharded", Degrees(sharded=2)),
    ("sharded", Degrees(sharded=3)),
    ("dp2.pp2", Degrees(data=2, pipeline=2)),
    ("dp2.fsdp2", Degrees(data=2, sharded=2)),
    ("tp2.pp2", Degrees(tensor=2, pipeline=2)),
]


@lru_cache
def plainly(case: str, steps: int = STEPS) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses, and parameters and buffers after that, of one process."""
    job = JOBS[case]()
    model = make_model(job)
    losses = list(train_plainly(job, model, steps))
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return losses, {f"model/{name}": value.detach() for name, value in tensors}


def put_together(held: list[Any]) -> dict[str, torch.Tensor]:
    """The whole tensors. Those who hold the same must agree."""
    found: dict[str, dict[Any, torch.Tensor]] = {}
    for one in held:
        for name, (box, value) in one.pieces.items():
            before = found.setdefault(name, {}).setdefault(box, value)
            torch.testing.assert_close(before, value, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    return {name: _whole(boxes) for name, boxes in found.items()}


def _whole(boxes: dict[Any, torch.Tensor]) -> torch.Tensor:
    first = next(iter(boxes))
    shape = [max(box[dimension][1] for box in boxes) for dimension in range(len(first))]
    result = torch.full(shape, float("nan"), dtype=torch.float64)
    for box, value in boxes.items():
        result[tuple(slice(*one) for one in box)] = value.double()
    assert not bool(result.isnan().any())
    return result


def check(case: str, held: list[Any], steps: int = STEPS, tolerance: float = 1e-5) -> None:
    losses, expected = plainly(case, steps)
    for one in held:
        assert one.losses == pytest.approx(dict(enumerate(losses)), abs=tolerance)
    got = put_together(held)
    model = {name: value for name, value in got.items() if name.startswith("model/")}
    assert model.keys() == expected.keys()
    for name, value in model.items():
        scale = max(1.0, float(expected[name].abs().max()))
        difference = float((value - expected[name].double()).abs().max()) / scale
        assert difference < tolerance, f"{name}: {difference}"


def follow(stage: Stage, scripts: list[Script]) -> list[list[list[Any]]]:
    """By script and generation: what its members held in the end, in rank order."""
    workers = 1 + max(worker for script in scripts for one in script.generations for worker in one.workers)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = [{"worker": worker, "port": store.port, "scripts": scripts} for worker in range(workers)]
    by_worker = stage.play(MEMBER, "follow", given)
    return [
        [[by_worker[worker][s][g] for worker in one.workers] for g, one in enumerate(script.generations)]
        for s, script in enumerate(scripts)
    ]


def check_layouts(stage: Stage, case: str, layouts: list[tuple[str, Degrees]]) -> None:
    scripts = [Script(case, spec, (Generation(d, tuple(range(d.size)), STEPS),)) for spec, d in layouts]
    for script, (held,) in zip(scripts, follow(stage, scripts), strict=True):
        try:
            check(case, held)
        except AssertionError as error:
            raise AssertionError(f"{script}: {error}") from error


@pytest.mark.parametrize("case", ["gpt", "cnn", "awkward"])
def test_every_layout_computes_what_one_process_does(stage: Stage, case: str) -> None:
    check_layouts(stage, case, LAYOUTS)


def test_tensors_that_are_plain_attributes_have_their_values(stage: Stage) -> None:
    check_layouts(stage, "loose", [("tensor:2", Degrees(tensor=2)), ("sharded", Degrees(sharded=2))])


def test_a_layer_that_some_shards_use_and_others_do_not(stage: Stage) -> None:
    layouts = [("dp2", Degrees(data=2)), ("sharded", Degrees(sharded=2)), ("sharded", Degrees(sharded=3))]
    check_layouts(stage, "sometimes", layouts)


def test_a_sharded_model_of_the_transformers_library(stage: Stage) -> None:
    pytest.importorskip("transformers")
    check_layouts(stage, "bert", [("sharded", Degrees(sharded=2))])


def test_the_reference_has_what_is_awkward() -> None:
    """Otherwise the tests above would show less than they say."""
    losses, _ = plainly("awkward")
    assert losses[1] == 0.0
    job = JOBS["awkward"]()
    model = make_model(job)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    list(train_plainly(job, model, 2))
    moved = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert {"first.weight", "last.bias", "counter.calls"} <= moved
    assert not moved & {"frozen.weight", "unused.weight"}
    assert "counter.constant" not in model.state_dict()
    assert tied(make_model(JOBS["gpt"]())) == {"head.weight": "symbols.weight"}
