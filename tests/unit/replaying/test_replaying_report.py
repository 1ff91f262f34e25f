"""What people and programs are told."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from distbelief.control.messages import WorkerFailed
from distbelief.errors import NonFiniteLoss, RunFailed
from distbelief.replaying.findings import Count, Finding
from distbelief.replaying.inspection import Inspection, LayerView, ParameterView, ShardView
from distbelief.replaying.rebuild import Start
from distbelief.replaying.replay import Asked, Replayed
from distbelief.replaying.report import MOST_LAYERS, as_json, lines
from distbelief.strategies.base import StepResult

SOUND = Inspection(
    step=12,
    shards=(
        ShardView(0, 11, (4, 7), loss=0.5, weight=2.0, gradient_norm=3.0),
        ShardView(1, 12, tuple(range(20)), loss=0.25, weight=20.0, gradient_norm=4e-5),
    ),
    layers=(
        LayerView("body.0", "Linear", (ParameterView("body.0.weight", 3.0, Count()),)),
        LayerView("(model)", "Net", (ParameterView("scale", None, Count()),)),
    ),
    findings=(),
)


def replayed(inspection: Inspection = SOUND, **changes: Any) -> Replayed:
    found = Replayed(
        asked=Asked(Path("runs/x"), 12),
        step=12,
        start=Start(None, 10, ()),
        began_at=10,
        differs_from=None,
        broke_state=False,
        inspection=inspection,
        result=StepResult(0.2727, 22, "f00d"),
        error=None,
        recorded="f00d",
        committed=True,
        verdict="matched",
        update="matched",
        exact=True,
        other_bits="",
        failure=None,
        clip_norm=1.0,
    )
    return replace(found, **changes)


def test_a_step_that_matched() -> None:
    assert lines(replayed()) == [
        "step 12 of runs/x, from the checkpoint of step 10, through 2 steps",
        "matched, bit for bit: fingerprint f00d",
        "update: matched (the next step of the run shows it)",
        "loss 0.2727, gradient norm 3.0000 (clipped to 1), 22 samples",
        "",
        "shard  samples    loss  gradient norm  seed  sample indices",
        "    0        2  0.5000         3.0000    11  4, 7",
        "    1       20  0.2500      4.000e-05    12  0, 1, 2, 3, 4, 5, 6, 7, … (20)",
        "",
        "layer    kind    gradient norm  not finite",
        "body.0   Linear         3.0000           –",
        "(model)  Net                 –           –",
    ]


def test_as_an_object() -> None:
    found = as_json(replayed())
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert {"step", "from_checkpoint", "fingerprint", "recorded", "verdict", "update", "loss"} <= found.keys()
    assert (found["step"], found["from_checkpoint"], found["executed_again"]) == (12, 10, 2)
    assert found["shards"][0]["indices"] == [4, 7]
    assert found["layers"][0]["parameters"] == [{"name": "body.0.weight", "gradient_norm": 3.0, "non_finite": 0}]
    assert found["non_finite"] == []


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"verdict": "differs", "recorded": "beef"}, "differs: fingerprint f00d here, beef in the run"),
        ({"verdict": "unknown", "exact": False}, "unknown: the run was not exact"),
        ({"verdict": "unknown", "recorded": None}, "unknown: the run has left no fingerprint of this step"),
        ({"verdict": "unknown", "recorded": None, "committed": False}, "unknown: the run has not committed this step"),
        ({"verdict": "unknown", "result": None}, "unknown: the step could not be executed here"),
        ({"differs_from": 11}, "On the way, fingerprints differ from step 11 on."),
        ({"other_bits": "the same bits cannot be expected: x"}, "note: the same bits cannot be expected: x"),
        ({"start": Start(None, None, ())}, "step 12 of runs/x, from the values that the run began with"),
        ({"start": Start(None, 8, ((10, "is torn"),))}, "skipped: the checkpoint of step 10: is torn"),
        (
            {"asked": Asked(Path("x"), 12, shard=1)},
            "loss of shard 1 0.2727, gradient norm of shard 1 3.0000, 22 samples",
        ),
        ({"error": RunFailed("no", details="trace")}, "The step cannot be executed: no"),
    ],
)
def test_other_outcomes(changes: dict[str, Any], told: str) -> None:
    assert any(line.startswith(told) for line in lines(replayed(**changes))), lines(replayed(**changes))


def test_how_it_failed_in_the_run_and_here() -> None:
    failure = WorkerFailed(0, "h", "loss", "the loss is nan", step=12)
    bad = NonFiniteLoss(math.nan, 12, 1)
    assert "The run failed at this step: the loss is nan; here too." in lines(replayed(failure=failure, error=bad))
    assert "The run failed at this step: the loss is nan; here it did not." in lines(replayed(failure=failure))
    later = replace_step(failure, 13)
    told = lines(replayed(failure=later, broke_state=True))
    assert told[1] == "The run failed at step 13: the loss is nan"
    assert told[2].endswith("the parameters were not finite by then, and this step made them so.")
    assert lines(replayed(failure=later, error=bad))[2] == "Step 12 was replayed: here that step fails already."


def replace_step(failure: WorkerFailed, step: int) -> WorkerFailed:
    return WorkerFailed(failure.worker, failure.host, failure.kind, failure.message, step=step)


def test_what_is_not_finite() -> None:
    findings = (
        Finding("parameter", "body.0", "body.0.weight", None, Count(3, 1), origin=False),
        Finding("batch", "(batch)", "[0]", 0, Count(1), origin=True, samples=(7,)),
        Finding("output", "body.0", "", 0, Count(2), origin=False),
        Finding("output", "body.0", "", 1, Count(0, 6), origin=True, samples=(4, 5)),
        Finding("loss", "(loss)", "", 2, Count(1), origin=True),
        Finding("gradient", "body.0", "SqrtBackward0", 3, Count(0, 1), origin=True),
    )
    spoilt = (replace(SOUND.shards[0], loss=math.nan, gradient_norm=math.nan),)
    told = lines(replayed(replace(SOUND, findings=findings, shards=spoilt)))
    start = told.index("Not finite:")
    assert told[start + 1 : start + 7] == [
        "  before the step: parameter body.0.weight has 3 NaN and 1 infinite",
        "  shard 0: the samples themselves: batch[0] has 1 NaN (sample 7)",
        "  shard 0: and then body.0",
        "  shard 1: first in the layer body.0: 6 infinite in its output (samples 4, 5), none in its input",
        "  shard 2: first in the loss function: 1 NaN; the model's output is finite",
        "  shard 3: first in the backward pass of the layer body.0 (SqrtBackward0): 1 infinite",
    ]
    assert "Not finite on the way, although loss and gradients are:" in lines(
        replayed(replace(SOUND, findings=findings))
    )
    found = as_json(replayed(replace(SOUND, findings=findings, shards=spoilt)))
    assert (found["shards"][0]["loss"], found["shards"][0]["finite"]) == (None, False)
    assert [one["where"] for one in found["non_finite"]] == [one.where for one in findings]
    json.dumps(found, allow_nan=False)


def test_of_very_many_layers_the_ones_that_matter_in_the_models_order() -> None:
    def layer(number: int) -> LayerView:
        name = f"l{number:02}"
        return LayerView(name, "Linear", (ParameterView(f"{name}.w", float(number), Count(int(number == 3))),))

    layers = [layer(number) for number in range(100)]
    told = lines(replayed(replace(SOUND, layers=tuple(layers))))
    table = [line.split()[0] for line in told[told.index("") :] if line.startswith("l") and line[1:3].isdigit()]
    assert table == ["l03", *(f"l{n:02}" for n in range(100 - MOST_LAYERS + 1, 100))]
    assert told[-1] == f"and {100 - MOST_LAYERS} with smaller gradients (--json has them all)"
    assert len(as_json(replayed(replace(SOUND, layers=tuple(layers))))["layers"]) == 100
