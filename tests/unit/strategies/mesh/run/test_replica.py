"""Every layout against one process, with real members over gloo."""

from __future__ import annotations

import pytest
import torch

from distbelief.strategies.flatmodel.namedtensors import tied
from distbelief.strategies.rules.degrees import Degrees
from distbelief.verification.plain import make_model, train_plainly
from tests.support.mesh.following import check, follow, plainly
from tests.support.mesh.member import JOBS, STEPS, Generation, Script
from tests.support.stage import Stage

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
