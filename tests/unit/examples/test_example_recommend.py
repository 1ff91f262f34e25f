"""The recommend example: its world is as it says, nothing beats its best score, and a model learns most of the rest."""

from __future__ import annotations

import importlib.util
import math
import pathlib
import types
from typing import Any

import numpy as np
import pytest
import torch

from distbelief.data.sources import InMemory, as_source, split_batch
from distbelief.errors import JobError
from distbelief.job import Job

EXAMPLE = pathlib.Path(__file__).parents[3] / "examples" / "recommend.py"


@pytest.fixture(scope="module")
def example() -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("example_recommend", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def evaluated(job: Job, score: Any) -> dict[str, float]:
    """Loss and metrics over the test set as a run has them: batch by batch, the sums over the weights."""
    source = as_source(job.validation)
    found: dict[str, list[tuple[float, float]]] = {}
    for low in range(0, len(source), 1000):
        args, _, target = split_batch(source.fetch(np.arange(low, min(low + 1000, len(source)))))
        output = score(args, target)
        found.setdefault("loss", []).append((float(job.loss(output, target)) * len(target), len(target)))
        for name, metric in job.metrics.items():
            found.setdefault(name, []).append(metric(output, target))
    return {name: sum(a for a, _ in parts) / sum(b for _, b in parts) for name, parts in found.items()}


@pytest.fixture(scope="module")
def small(example: types.ModuleType) -> Job:
    job: Job = example.job(users=100, items=50, crosses=1 << 13, samples=120 * 1024, steps=120, batch=1024)
    return job


def test_numbers_by_hashing_are_even_and_depend_on_everything(example: types.ModuleType) -> None:
    numbers = np.arange(100_000)
    drawn = example.chance("click", numbers)
    assert drawn.min() >= 0
    assert drawn.max() < 1
    counts = np.bincount((drawn * 50).astype(int), minlength=50)
    assert ((counts - 2000) ** 2 / 2000).sum() < 49 + 5 * math.sqrt(98), "a chi-square of 49 degrees of freedom"
    others = [drawn[1:], example.chance("hour", numbers)[:-1], example.chance("click", numbers, 1)[:-1]]
    for other in others:
        assert abs(np.corrcoef(drawn[:-1], other)[0, 1]) < 5 / math.sqrt(len(numbers))
    effects = example.effect("user", numbers)
    assert effects.mean() == pytest.approx(0, abs=0.02)
    assert effects.var() == pytest.approx(1, abs=0.02)
    pairs = example.chance("pair", np.array([1, 2]), np.array([2, 1]))
    assert pairs[0] != pairs[1], "the order of the keys counts"


def test_the_world_is_the_same_everywhere_and_whatever_part_of_it_is_asked_for(example: types.ModuleType) -> None:
    whole = example.impressions(0, 3000, users=1000, items=300)
    part = example.impressions(1000, 500, users=1000, items=300)
    assert all(torch.equal(a[1000:1500], b) for a, b in zip(whole, part, strict=True))
    assert all(column.dtype == torch.int64 for column in whole[:-1])
    *ids, outcome = (column[:5].tolist() for column in whole)
    assert ids[:2] == [[65, 101, 4, 182, 9], [6, 86, 103, 68, 65]]
    assert ids[2:] == [[6, 0, 7, 0, 2], [6, 1, 11, 9, 6], [16, 13, 21, 4, 11]]
    assert [truth * 65536 for _, truth in outcome] == [11417, 14281, 7021, 4726, 7784]
    assert int(whole[-1][:, 0].sum()) == 410


def test_groups_and_categories_belong_to_users_and_items(example: types.ModuleType) -> None:
    user, item, group, category, hour, _ = example.impressions(0, 50_000, users=200, items=100)
    for of, kind, kinds in ((user, group, example.GROUPS), (item, category, example.CATEGORIES)):
        assert len((of * kinds + kind).unique()) == len(of.unique()), "one kind for each"
        assert kind.unique().tolist() == list(range(kinds))
    assert hour.unique().tolist() == list(range(24))
    assert user.min() == 0
    assert user.max() == 199


def test_clicks_come_as_often_as_their_true_probabilities_say(example: types.ModuleType) -> None:
    *ids, outcome = example.impressions(0, 300_000, users=1000, items=300)
    clicked, truth = outcome.double().unbind(dim=1)

    def surprises(parts: torch.Tensor) -> torch.Tensor:
        """Of each part, how many standard deviations its number of clicks is away from what was to be expected."""
        sums = torch.zeros(2, int(parts.max()) + 1, dtype=torch.float64)
        sums.index_add_(1, parts, torch.stack([clicked - truth, truth * (1 - truth)]))
        return sums[0] / sums[1].clamp(min=1).sqrt()

    assert abs(float(surprises(torch.zeros_like(ids[0])))) < 4
    for parts in (*ids, (truth * 20).long()):
        assert float(surprises(parts).abs().max()) < 5


def test_popularity_has_a_long_tail(example: types.ModuleType) -> None:
    user = example.impressions(0, 200_000, users=100_000, items=10)[0]
    counts = user.bincount(minlength=100_000).double()
    head = float(counts[:100].sum() / counts.sum())
    assert head == pytest.approx(math.log(110 / 10) / math.log(100_010 / 10), abs=0.01), "a quarter of all, by 0.1 %"
    assert float((counts == 0).double().mean()) > 0.3, "many are never seen"
    for low in (100, 1000, 10_000):
        share = float(counts[low : 2 * low].sum() / counts.sum())
        expected = math.log((2 * low + 10) / (low + 10)) / math.log(100_010 / 10)
        assert share == pytest.approx(expected, rel=0.05), "twice as rare, but twice as many"


def test_tables_may_be_larger_than_memory_as_far_as_the_data_goes(example: types.ModuleType) -> None:
    user, *_ = example.impressions(0, 10_000, users=50_000_000, items=1_000_000)
    assert 10_000_000 < int(user.max()) < 50_000_000


def test_no_scores_beat_the_true_probabilities(example: types.ModuleType, small: Job) -> None:
    truth = small.validation[-1][:, 1]
    clicks = small.validation[-1][:, 0]
    expected = example.log_loss(truth.logit(), truth)
    drawn = example.log_loss(truth.logit(), clicks)
    spread = float((truth * (1 - truth) * truth.logit() ** 2).sum().sqrt())
    assert abs(drawn - expected) < 4 * spread, "the clicks are drawn from the true probabilities"
    best = evaluated(small, lambda args, target: target[:, 1].logit())
    assert best["loss"] == pytest.approx(best["best_loss"], abs=1e-6)
    assert best["auc"] == best["best_auc"]
    assert best["learned"] == pytest.approx(1, abs=1e-6)
    generator = torch.Generator().manual_seed(5)
    for noise in (0.2, 0.5, 1.0):
        perturbed = (truth.logit() + noise * torch.randn(len(truth), generator=generator)).split(1000)
        scores = iter(perturbed)
        worse = evaluated(small, lambda args, target, scores=scores: next(scores))
        assert worse["loss"] > best["loss"]
        assert worse["auc"] < best["auc"]
        assert worse["learned"] < 1
    for factor, shift in ((0.8, 0.0), (1.25, 0.0), (1.0, 0.2), (1.0, -0.2)):
        biased = evaluated(small, lambda args, target, by=factor, plus=shift: by * target[:, 1].logit() + plus)
        assert biased["loss"] > best["loss"]
        assert biased["auc"] == pytest.approx(best["auc"], abs=1e-4), "the order of the scores is the same"


def test_to_know_only_the_click_rate_is_to_have_learned_nothing(small: Job) -> None:
    rate = small.data[-1][:, 0].mean()
    constant = evaluated(small, lambda args, target: rate.logit().expand(len(target)))
    assert constant["learned"] == pytest.approx(0, abs=1e-6)
    assert constant["auc"] == 0.5
    assert constant["loss"] > constant["best_loss"] * 1.1, "there is something to learn"


def test_ordered_pairs_are_those_of_the_definition(example: types.ModuleType) -> None:
    generator = torch.Generator().manual_seed(1)
    scores = torch.randint(0, 10, (60,), generator=generator).float()  # with ties
    clicked = torch.randint(0, 2, (60,), generator=generator).float()
    yes, no = scores[clicked == 1], scores[clicked == 0]
    by_hand = sum(1.0 if a > b else 0.5 if a == b else 0.0 for a in yes.tolist() for b in no.tolist())
    assert example.ordered_pairs(scores, clicked) == (by_hand, len(yes) * len(no))
    assert example.ordered_pairs(scores, torch.ones(60)) == (0, 0), "no pairs, no weight"


def test_crosses_of_different_features_do_not_meet(example: types.ModuleType) -> None:
    a, b = (grid.flatten() for grid in torch.meshgrid(torch.arange(100), torch.arange(50), indexing="ij"))
    buckets = torch.cat([example.crossed(cross, a, b, 1 << 20) for cross in range(4)])
    assert buckets.min() >= 0
    assert buckets.max() < 1 << 20
    assert len(buckets.unique()) > 0.97 * len(buckets), "20,000 pairs in a million buckets: hardly any by chance"
    huge = example.crossed(3, torch.tensor([49_999_999]), torch.tensor([11]), 1 << 20)
    assert 0 <= int(huge) < 1 << 20, "no overflow"


def test_a_short_training_learns_most_of_what_can_be_learned(small: Job) -> None:
    torch.manual_seed(small.seed)
    assert not isinstance(small.model, torch.nn.Module)
    assert small.schedule is not None
    assert small.steps is not None
    model = small.model()
    assert {"tables.user.weight", "tables.item.weight", "wide.weight"} <= {name for name, _ in model.named_parameters()}
    optimizer = small.optimizer(list(model.parameters()))
    rate = optimizer.param_groups[0]["lr"]
    source = as_source(small.data)
    assert isinstance(source, InMemory), "the examples need no reader processes"
    for step in range(small.steps):
        optimizer.param_groups[0]["lr"] = rate * small.schedule(step)
        low = step * small.global_batch
        args, _, target = split_batch(source.fetch(np.arange(low, low + small.global_batch)))
        optimizer.zero_grad()
        loss: Any = small.loss(model(*args), target)
        loss.backward()
        optimizer.step()
    assert all(parameter.grad is not None and not parameter.grad.is_sparse for parameter in model.parameters())
    model.eval()
    with torch.no_grad():
        after = evaluated(small, lambda args, target: model(*args))
    assert 0.8 < after["learned"] < 1
    assert after["best_loss"] < after["loss"] < 1.04 * after["best_loss"]
    assert 0.5 < after["auc"] < after["best_auc"]


def test_the_truth_does_not_enter_the_training(example: types.ModuleType) -> None:
    output = torch.tensor([-2.0, 0.5, 1.0, 3.0])
    clicked = torch.tensor([1.0, 0.0, 1.0, 0.0])
    one, other = (example.loss(output, torch.stack([clicked, torch.full((4,), truth)], dim=1)) for truth in (0.3, 0.9))
    assert torch.equal(one, other)
    assert not torch.equal(one, example.loss(output, torch.stack([1 - clicked, clicked], dim=1)))


def test_the_test_set_is_fixed_and_never_trained_on(example: types.ModuleType, small: Job) -> None:
    again = example.job(users=100, items=50, crosses=64, samples=1000, steps=3, seed=7)
    assert all(torch.equal(a, b) for a, b in zip(again.validation, small.validation, strict=True))
    assert all(torch.equal(a, b[:1000]) for a, b in zip(again.data, small.data, strict=True))
    assert not torch.equal(again.data[0][:1000], again.validation[0][:1000])


@pytest.mark.parametrize("wrong", [{"users": 0}, {"crosses": 0}, {"samples": -1}, {"steps": 0}, {"hidden": 1}])
def test_sizes_that_make_no_sense_are_refused(example: types.ModuleType, wrong: dict[str, int]) -> None:
    (name,) = wrong
    with pytest.raises(JobError, match=f"{name} must be"):
        example.job(**wrong)
