"""Plans which layers of a model a tensor-parallel group divides, and how.

The plan follows from what the model computes (`trace.py`), not from names. Layers that can be divided by columns,
together with the layers that take their outputs divided by rows, form a group (`search.py`, `rules/propagation.py`).
Every group is then tried: one more forward pass on meta, with the parameter sizes of one member, must do the same
operations on parts of the same values. So a plan contains only divisions that work; every other layer stays whole on
every member, with the reason. Planning needs no process group.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from distbelief.errors import JobError
from distbelief.strategies.mesh.rules.propagation import Trace
from distbelief.strategies.mesh.tensor.search import DropoutSite, Search, Style, kind_of
from distbelief.strategies.mesh.tensor.trace import TraceFailed, is_layer, trace


@dataclass(frozen=True)
class TensorPlan:
    """How a group of `degree` members divides a model: a style for each divided layer."""

    degree: int
    styles: Mapping[str, Style]
    whole: Mapping[str, str]
    """The modules with parameters that stay whole on every member, and why."""
    sites: Mapping[tuple[str, int], DropoutSite] = field(default_factory=dict)
    """Where dropout meets divided values: the n-th dropout or attention after a call of this layer (`apply.py`)."""


def plan(
    model: nn.Module,
    degree: int,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    overrides: Mapping[str, str] | None = None,
) -> TensorPlan:
    """Plan how `degree` members divide this model. The arguments are those of its forward, for any small batch.

    >>> mlp = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8), nn.LayerNorm(8))
    >>> found = plan(mlp, 2, (torch.empty(3, 8, device="meta"),))
    >>> found.styles
    {'0': 'column', '2': 'row'}
    >>> found.whole
    {'3': 'it is small'}
    """
    wishes = read_overrides(model, overrides or {})
    if degree == 1:
        return TensorPlan(1, {}, {})
    args, kwargs = _several_samples(args, kwargs or {})
    traces = [_traced(model, args, kwargs, training) for training in (True, False)]
    search = Search(model, degree, traces, wishes)
    search.find_groups()
    search.try_groups(lambda training, shapes: trace(model, args, kwargs, training=training, shapes=shapes))
    search.add_single_layers()
    for name in [name for name, wish in wishes.items() if wish != "whole" and name not in search.styles]:
        raise JobError(
            f"tensor_plan wants to divide {name}, which is not possible: {search.whole[name]}",
            hint="use patterns that do not match it, or say 'whole' for it in a later one",
        )
    styles = {name: search.styles[name] for name, _ in model.named_modules() if name in search.styles}
    if not styles:
        raise JobError(
            f"tensor:{degree} cannot divide any layer of this model"
            + "".join(f"\n  {name}: {reason}" for name, reason in _fold_blocks(search.whole).items()),
            hint="use pipeline:K or sharded, or say what to divide: Job(tensor_plan={'a pattern of names': 'column'})",
        )
    return TensorPlan(degree, styles, search.whole, search.sites())


def read_overrides(model: nn.Module, overrides: Mapping[str, str]) -> dict[str, str]:
    """The layers that the job's `tensor_plan` names: name -> column, row or whole. The last matching pattern counts."""
    modules = {name: module for name, module in model.named_modules() if name}
    wishes: dict[str, str] = {}
    for pattern, style in overrides.items():
        if style not in ("column", "row", "whole"):
            raise JobError(
                f"tensor_plan: {style!r} (for {pattern!r}) is no way to divide a layer",
                hint="say 'column', 'row' or 'whole'",
            )
        matched = [name for name in modules if fnmatchcase(name, pattern)]
        if not matched:
            near = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.4)
            raise JobError(
                f"tensor_plan: no module of the model is called {pattern!r}",
                hint=f"did you mean {' or '.join(near)}?" if near else f"there are {', '.join(list(modules)[:12])}",
            )
        inside = [n for n in modules if any(n == m or n.startswith(m + ".") for m in matched)]
        layers = [n for n in (inside if style == "whole" else matched) if is_layer(modules[n])]
        if not layers and style != "whole":
            kinds = sorted({type(modules[name]).__name__ for name in matched})
            raise JobError(
                f"tensor_plan: {pattern!r} names {', '.join(kinds)}; only Linear and Embedding layers can be divided",
                hint=f"inside are {', '.join([n for n in inside if is_layer(modules[n])][:6]) or 'none of them'}",
            )
        wishes.update(dict.fromkeys(layers, style))
    return wishes


def _several_samples(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
    """Two samples in place of one: with a single sample a dimension can seem to be the outermost, though it is not in
    other batches."""
    tensors = [leaf for leaf in tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
    if not tensors or any(tensor.ndim == 0 or len(tensor) != 1 for tensor in tensors):
        return args, kwargs
    doubled: tuple[tuple[Any, ...], Mapping[str, Any]] = tree_map(
        lambda leaf: torch.cat([leaf, leaf]) if isinstance(leaf, torch.Tensor) else leaf, (args, dict(kwargs))
    )
    return doubled


def _traced(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], training: bool) -> Trace:
    try:
        return trace(model, args, kwargs, training=training)
    except TraceFailed as error:
        raise JobError(
            f"tensor parallelism cannot follow this model's forward without values: {error}",
            hint="its code looks at the values of tensors, or keeps tensors that are no buffers; use pipeline:K with "
            "named split points, or sharded",
        ) from error


def explain(plan: TensorPlan, model: nn.Module) -> list[str]:
    """One line for each kind of layer, and the share of the model that is divided; for people.

    >>> mlp = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 8), nn.LayerNorm(8))
    >>> for line in explain(plan(mlp, 2, (torch.empty(3, 8, device="meta"),)), mlp):
    ...     print(line)
    0  Linear 8→64  by columns
    2  Linear 64→8  by rows
    3  LayerNorm    whole: it is small
    99 % of the parameters are divided by 2
    """
    modules = dict(model.named_modules())
    told = {name: _WORDS[style] for name, style in plan.styles.items()}
    told |= {name: f"whole: {reason}" for name, reason in plan.whole.items()}
    ordered = {name: f"{_form(modules[name])}\n{told[name]}" for name in modules if name in told}
    rows = [(name, *text.split("\n")) for name, text in _fold_blocks(ordered).items()]
    wide, wider = (max((len(row[column]) for row in rows), default=0) for column in (0, 1))
    lines = [f"{name:<{wide}}  {form:<{wider}}  {text}" for name, form, text in rows]
    divided = {id(p): p.numel() for name in plan.styles for p in modules[name].parameters(recurse=False)}
    share = 100 * sum(divided.values()) / sum(p.numel() for p in model.parameters())
    return [*lines, f"{share:.0f} % of the parameters are divided by {plan.degree}"]


_WORDS: dict[Style, str] = {
    "column": "by columns",
    "row": "by rows",
    "column_gather": "by columns, and what it gives is gathered",
    "row_split": "by rows, and what it takes is split",
    "vocabulary": "by the rows of its vocabulary",
}


def _form(module: nn.Module) -> str:
    if isinstance(module, nn.Linear):
        return f"Linear {module.in_features}→{module.out_features}"
    if isinstance(module, nn.Embedding):
        return f"Embedding {module.num_embeddings}→{module.embedding_dim}"
    return type(module).__name__


def _fold_blocks(told: Mapping[str, str]) -> dict[str, str]:
    """Join the entries of repeated blocks: names that differ in numbers only, and have the same text.

    >>> _fold_blocks({"a.0.x": "one", "a.1.x": "one", "a.3.x": "one", "b": "two"})
    {'a.0–1,3.x': 'one', 'b': 'two'}
    """
    kinds: dict[tuple[str, str], list[str]] = {}
    for name, text in told.items():
        kinds.setdefault((kind_of(name), text), []).append(name)
    return {_range(kind, names): text for (kind, text), names in kinds.items()}


def _range(kind: str, names: list[str]) -> str:
    pieces = [name.split(".") for name in names]
    shown = []
    for place, piece in enumerate(kind.split(".")):
        numbers = sorted({int(p[place]) for p in pieces}) if piece == "*" else []
        shown.append(",".join(_runs(numbers)) if numbers else piece)
    return ".".join(shown)


def _runs(numbers: list[int]) -> list[str]:
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return [f"{run[0]}–{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs]
