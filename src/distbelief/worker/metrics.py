"""Metrics that do not depend on the number of workers: measured per shard, then combined in the order of the shards.

A metric is a function (output, target) -> (sum, weight), or a torchmetrics Metric. The sums are added exactly; a Metric
merges its states by its own reductions.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from distbelief.control.fitting import cut
from distbelief.errors import JobError

LONGEST_NAME = 200
MOST_BYTES = 1 << 18
"""The longest text of an evaluation's metrics, as JSON: some ten thousand numbers."""


def accuracy(output: torch.Tensor, target: torch.Tensor) -> tuple[float, float]:
    """The number of right predictions, and of all: the largest of the last axis, or of axis 1 for maps of classes.

    >>> accuracy(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
    (1.0, 2.0)
    """
    maps = output.shape[:-1] != target.shape and output.ndim > 2 and output.shape[2:] == target.shape[1:]
    axis = 1 if maps else -1
    chosen = output.argmax(axis)
    if chosen.shape != target.shape:
        raise JobError(
            f"accuracy cannot compare predictions of shape {tuple(output.shape)} with targets {tuple(target.shape)}",
            hint="targets are class numbers: one axis less than the output",
        )
    right = chosen == target
    return float(right.sum()), float(right.numel())


def is_metric_object(metric: Any) -> bool:
    return all(hasattr(metric, name) for name in ("update", "compute", "reset", "_defaults", "_reductions"))


def check_metrics(metrics: Mapping[str, Any]) -> None:
    for name, metric in metrics.items():
        if not name.isprintable() or len(name) > LONGEST_NAME:
            raise JobError(
                f"the metric name {cut(name, 60)!r} is too long or has characters that cannot be printed",
                hint=f"a name has at most {LONGEST_NAME} printable characters",
            )
        if name == "loss":
            raise JobError("the metric name 'loss' is taken: the mean loss is always measured")
        if not is_metric_object(metric) and not callable(metric):
            raise JobError(
                f"the metric '{name}' is neither a function (output, target) -> (sum, weight) nor a torchmetrics Metric"
            )


class ShardMetrics:
    """Measures single shards of an evaluation and combines what all members measured."""

    def __init__(self, metrics: Mapping[str, Any], device: torch.device | None = None) -> None:
        """`device`: where outputs and targets are."""
        check_metrics(metrics)
        self._device = device or torch.device("cpu")
        self._functions = {n: m for n, m in metrics.items() if not is_metric_object(m)}
        self._objects = {n: copy.deepcopy(m) for n, m in metrics.items() if is_metric_object(m)}

    def measure(self, shard: int, output: Any, target: Any, loss: tuple[float, float]) -> dict[str, torch.Tensor]:
        """One shard's contribution as named tensors, which travel without pickle."""
        found = {f"{shard}/loss": torch.tensor(loss, dtype=torch.float64)}
        for name, function in self._functions.items():
            found[f"{shard}/{name}"] = torch.tensor(
                _sum_and_weight(name, function(output, target)), dtype=torch.float64
            )
        for name, metric in self._objects.items():
            metric.to(self._device)
            metric.reset()
            metric.update(output, target)
            for key in metric._defaults:
                value = getattr(metric, key)
                for i, part in enumerate(value if isinstance(value, list) else [value]):
                    # A copy: two metrics may keep views of one output, and safetensors refuses tensors that share
                    # memory.
                    own = torch.as_tensor(part).detach().cpu().clone(memory_format=torch.contiguous_format)
                    found[f"{shard}/{name}/{key}/{i}"] = own
        return found

    def combine(self, shards: int, measured: Mapping[str, torch.Tensor]) -> dict[str, float]:
        """The values over the shards 0..shards-1, from the measurements of all members."""
        values: dict[str, float] = {}
        for name in ("loss", *self._functions):
            rows = [measured[f"{shard}/{name}"] for shard in range(shards)]
            weight = math.fsum(float(row[1]) for row in rows)
            values[name] = math.fsum(float(row[0]) for row in rows) / weight if weight else math.nan
        for name, metric in self._objects.items():
            values.update(self._compute(name, metric, shards, measured))
        _check_size(values)
        return values

    def _compute(self, name: str, metric: Any, shards: int, measured: Mapping[str, torch.Tensor]) -> dict[str, float]:
        whole: Any = None
        for shard in range(shards):
            part = copy.deepcopy(metric).to("cpu")  # the measurements are on the CPU
            part.reset()
            for key, default in metric._defaults.items():
                prefix = f"{shard}/{name}/{key}/"
                parts = [measured[k] for k in _numbered(measured, prefix)]
                setattr(part, key, parts if isinstance(default, list) else parts[0])
            if shard == 0:
                whole = part
                whole._update_count = 1
            else:
                whole._update_count += 1
                _merge(whole, {key: getattr(part, key) for key in metric._defaults})
        whole._to_sync = False  # it has all shards: do not gather over a torch group
        return _as_numbers(name, whole.compute())


def _check_size(values: Mapping[str, float]) -> None:
    """Every evaluation travels to the coordinator and is kept in shared memory, in memory of a fixed size."""
    size = len(json.dumps(values))
    if size > MOST_BYTES:
        raise JobError(
            f"the metrics of one evaluation are {len(values):,} numbers, {size / 1e6:.1f} MB with their names; "
            f"there is room for {MOST_BYTES / 1e6:.2f} MB",
            hint="have the metrics give fewer numbers, such as means over classes, and shorter names",
        )


def _merge(whole: Any, state: Mapping[str, Any]) -> None:
    """Merge one later shard's states into `whole` by the metric's own reductions, in shard order."""
    for key, value in state.items():
        mine, reduce = getattr(whole, key), whole._reductions[key]
        if isinstance(mine, list):
            merged: Any = [*mine, *value]
        elif reduce is None:
            raise JobError(f"the metric state '{key}' has no reduction: it cannot be combined across shards")
        else:
            stacked = torch.stack([torch.as_tensor(mine), torch.as_tensor(value)])
            if getattr(reduce, "__name__", "") == "dim_zero_mean":
                merged = (mine * (whole._update_count - 1) + value) / whole._update_count
            elif getattr(reduce, "__name__", "") == "dim_zero_cat":
                merged = torch.cat([mine.reshape(-1), value.reshape(-1)])
            else:
                merged = reduce(stacked)
        setattr(whole, key, merged)


def _numbered(measured: Mapping[str, torch.Tensor], prefix: str) -> list[str]:
    keys, i = [], 0
    while f"{prefix}{i}" in measured:
        keys.append(f"{prefix}{i}")
        i += 1
    return keys


def _sum_and_weight(name: str, value: Any) -> Sequence[float]:
    if not isinstance(value, tuple) or len(value) != 2:
        raise JobError(f"the metric '{name}' must return (sum, weight), not {type(value).__name__}")
    return [float(value[0]), float(value[1])]


def _as_numbers(name: str, value: Any) -> dict[str, float]:
    if isinstance(value, Mapping):
        return {f"{name}_{key}": float(part) for key, part in value.items()}
    value = torch.as_tensor(value)
    if value.numel() == 1:
        return {name: float(value)}
    return {f"{name}_{i}": float(part) for i, part in enumerate(value.flatten())}
