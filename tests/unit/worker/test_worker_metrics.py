"""Metrics: any split of the data over shards and members gives the value over the whole data in one go."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import safetensors.torch
import torch
import torchmetrics
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from distbelief.errors import JobError
from distbelief.worker.metrics import ShardMetrics, accuracy, check_metrics

patient = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # a noisy machine is no failure

SAMPLES = 40
_make = torch.Generator().manual_seed(0)
LOGITS = torch.randn(SAMPLES, 3, generator=_make)
CLASSES = torch.randint(0, 3, (SAMPLES,), generator=_make)
SCORES = torch.rand(SAMPLES, generator=_make)
BINARY = torch.randint(0, 2, (SAMPLES,), generator=_make)
VALUES = torch.randn(SAMPLES, generator=_make)
WEIGHTS = torch.rand(SAMPLES, generator=_make)


def over_shards(
    metrics: dict[str, Any], output: torch.Tensor, target: torch.Tensor, cuts: list[int], members: int = 3
) -> dict[str, float]:
    """Cut the data, let members measure a part each, and combine on yet another one, after a journey in bytes."""
    edges = [0, *sorted(cuts), len(output)]
    spans = [(a, b) for a, b in itertools.pairwise(edges) if a < b]
    everything: dict[str, torch.Tensor] = {}
    for member in reversed(range(members)):
        measuring, measured = ShardMetrics(metrics), {}
        for shard in range(member, len(spans), members):
            span = slice(*spans[shard])
            loss = (float(output[span].sum()), float(span.stop - span.start))
            measured.update(measuring.measure(shard, output[span], target[span], loss))
        everything.update(safetensors.torch.load(safetensors.torch.save(measured)))
    return ShardMetrics(metrics).combine(len(spans), everything)


cuts = st.lists(st.integers(1, SAMPLES - 1), max_size=6, unique=True)


@settings(patient, max_examples=30)
@given(cuts)
def test_function_metrics_and_the_loss_are_exact_over_any_split(cuts: list[int]) -> None:
    def positive(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, int]:
        return (output.max(1).values > 1.0).sum(), len(output)

    found = over_shards({"accuracy": accuracy, "positive": positive}, LOGITS, CLASSES, cuts)
    assert found["accuracy"] == float((LOGITS.argmax(1) == CLASSES).double().mean())
    assert found["positive"] == float((LOGITS.max(1).values > 1.0).double().mean())
    assert found["loss"] == pytest.approx(float(LOGITS.double().sum() / SAMPLES), rel=1e-4)
    assert list(found) == ["loss", "accuracy", "positive"]


def test_a_weighted_mean_is_not_a_mean_of_means() -> None:
    def error(output: torch.Tensor, target: torch.Tensor) -> tuple[float, float]:
        return float(F.cross_entropy(output, target, reduction="sum")), float(len(target))

    found = over_shards({"error": error}, LOGITS, CLASSES, [1, 2, 39])
    assert found["error"] == pytest.approx(float(F.cross_entropy(LOGITS, CLASSES)), rel=1e-6)


OBJECTS: dict[str, tuple[Callable[[], Any], torch.Tensor, torch.Tensor]] = {
    "accuracy": (lambda: torchmetrics.Accuracy(task="multiclass", num_classes=3), LOGITS, CLASSES),
    "per class": (lambda: torchmetrics.Accuracy(task="multiclass", num_classes=3, average=None), LOGITS, CLASSES),
    "confusion": (lambda: torchmetrics.ConfusionMatrix(task="multiclass", num_classes=3), LOGITS, CLASSES),
    "squared error": (torchmetrics.MeanSquaredError, VALUES, SCORES),
    "area, list states": (lambda: torchmetrics.AUROC(task="binary"), SCORES, BINARY),
    "area, binned": (lambda: torchmetrics.AUROC(task="binary", thresholds=20), SCORES, BINARY),
    "weighted mean": (torchmetrics.MeanMetric, VALUES, WEIGHTS),
    "r2": (torchmetrics.R2Score, VALUES, SCORES),
}


@pytest.mark.parametrize("name", OBJECTS)
@settings(patient, max_examples=8)
@given(cuts=cuts)
def test_torchmetrics_give_the_value_over_the_whole_data(name: str, cuts: list[int]) -> None:
    make, output, target = OBJECTS[name]
    whole = make()
    whole.update(output, target)
    expected = torch.as_tensor(whole.compute()).flatten().tolist()
    found = over_shards({"m": make()}, output, target, cuts)
    names = ["m"] if len(expected) == 1 else [f"m_{i}" for i in range(len(expected))]
    assert [found[key] for key in names] == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("kind", "reduce"), [("MaxMetric", torch.max), ("MinMetric", torch.min)])
def test_extremes_are_merged_by_the_metrics_own_rule(kind: str, reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
    class Extreme(getattr(torchmetrics, kind)):  # type: ignore[misc]
        def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
            super().update(output)

    assert over_shards({"m": Extreme()}, VALUES, VALUES, [3, 20])["m"] == float(reduce(VALUES))


def test_a_state_that_is_a_mean_counts_every_shard_once() -> None:
    class Average(torchmetrics.Metric):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.add_state("average", torch.tensor(0.0), dist_reduce_fx="mean")

        def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
            self.average = output.mean()

        def compute(self) -> torch.Tensor:
            return self.average

    found = over_shards({"m": Average()}, VALUES, VALUES, [10, 20, 30])
    assert found["m"] == pytest.approx(VALUES.mean().item(), rel=1e-5)


def test_several_list_metrics_may_keep_the_same_tensors() -> None:
    """Both keep views of the output itself; a file format that refuses shared memory must not be in the way."""
    both = {"a": torchmetrics.AUROC(task="binary"), "b": torchmetrics.AveragePrecision(task="binary")}
    found = over_shards(both, SCORES, BINARY, [7, 21])
    for name, metric in both.items():
        metric.update(SCORES, BINARY)
        assert found[name] == pytest.approx(float(metric.compute()), rel=1e-6)


def test_states_are_not_gathered_a_second_time_where_torch_groups_are_up() -> None:
    """Over gloo every member combines all shards by itself. torchmetrics must not add the members' copies up."""

    class Total(torchmetrics.SumMetric):  # type: ignore[misc]
        def update(self, output: torch.Tensor, target: torch.Tensor) -> None:
            super().update(output)

    two_members = {"distributed_available_fn": lambda: True, "dist_sync_fn": lambda state, group=None: [state, state]}
    found = over_shards({"m": Total(**two_members)}, BINARY.float(), BINARY, [5, 30])
    assert found["m"] == float(BINARY.sum())


def test_measuring_leaves_the_jobs_own_metric_alone() -> None:
    metric = torchmetrics.MeanMetric()
    over_shards({"m": metric}, VALUES, WEIGHTS, [9])
    assert metric.update_count == 0


@pytest.mark.parametrize(
    ("output", "target", "right"),
    [
        (torch.eye(4), torch.tensor([0, 1, 2, 0]), 3.0),
        (torch.eye(4).expand(2, 4, 4)[:, :3], torch.tensor([[0, 1, 2], [0, 0, 0]]), 4.0),  # (batch, time, classes)
        (torch.eye(4)[:, :3].expand(2, 4, 3), torch.tensor([[0, 1, 2], [0, 0, 0]]), 4.0),  # (batch, classes, time)
        (torch.zeros(2, 3, 5, 6), torch.zeros(2, 5, 6, dtype=torch.int64), 60.0),  # a map of classes
    ],
)
def test_accuracy_knows_the_usual_shapes(output: torch.Tensor, target: torch.Tensor, right: float) -> None:
    assert accuracy(output, target) == (right, float(target.numel()))


@pytest.mark.parametrize(
    ("metrics", "message"),
    [
        ({"loss": accuracy}, "'loss' is taken"),
        ({"f1": "macro"}, "'f1' is neither"),
    ],
)
def test_a_metric_that_cannot_be_one_is_refused(metrics: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        check_metrics(metrics)


def test_a_function_must_return_sum_and_weight() -> None:
    with pytest.raises(JobError, match=r"'mean' must return \(sum, weight\), not float"):
        over_shards({"mean": lambda output, target: 0.5}, LOGITS, CLASSES, [])


def test_a_state_without_a_reduction_is_refused_by_name() -> None:
    with pytest.raises(JobError, match="'mean_x' has no reduction"):
        over_shards({"r": torchmetrics.PearsonCorrCoef()}, VALUES, SCORES, [5])


def test_nothing_to_weigh_is_not_a_number() -> None:
    found = over_shards({"m": lambda output, target: (0.0, 0.0)}, LOGITS, CLASSES, [5])
    assert math.isnan(found["m"])


@pytest.mark.parametrize(("output", "target"), [((5, 1), (5, 1)), ((5, 3), (5, 3)), ((5, 3), (4,))])
def test_accuracy_refuses_shapes_that_it_would_get_wrong(output: tuple[int, ...], target: tuple[int, ...]) -> None:
    with pytest.raises(JobError, match="cannot compare"):
        accuracy(torch.zeros(output), torch.zeros(target, dtype=torch.long))


def test_accuracy_of_sequences_and_of_maps() -> None:
    sequence = torch.zeros(2, 4, 4)  # as many places as classes: the last axis counts
    sequence[..., 3] = 1
    assert accuracy(sequence, torch.full((2, 4), 3)) == (8.0, 8.0)
    maps = torch.zeros(2, 3, 4, 5)
    maps[:, 2] = 1
    assert accuracy(maps, torch.full((2, 4, 5), 2)) == (40.0, 40.0)
