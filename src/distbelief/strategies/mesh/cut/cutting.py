"""Cuts a model into units automatically; consecutive units make a stage of a pipeline.

The forward pass is recorded in the first of three ways that gives enough units: torch.fx with whole blocks; torch.fx
with blocks opened; torch.export. If the job names modules in `split`, stages begin at those modules instead.

A unit begins at a call of a module that training and evaluation have in common. The cut may lie anywhere between that
call and the previous one; the place that the fewest values cross is chosen. No cut is made where a value would cross
that cannot be sent, nor between a value and a later change of it in place.
"""

from __future__ import annotations

import difflib
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from distbelief.errors import JobError
from distbelief.strategies.mesh.cut.dryrun import call, in_mode, placeholder_weights, with_placeholders
from distbelief.strategies.mesh.cut.recordedpass import RecordedPass, Unsendable, observe, sent_values
from distbelief.strategies.mesh.cut.stages import Stage, build_stage, write_stage_code
from distbelief.strategies.mesh.cut.tracing import (
    EVERYTHING,
    Call,
    Inputs,
    Recording,
    export,
    failure_reason,
    flat_inputs,
    has_hooks,
    is_block,
    label_calls,
    leaves_around,
    leaves_at,
    trace,
)
from distbelief.strategies.mesh.rules.balance import UnitCost

# --- the cost of each unit, measured ------------------------------------------------------------------------------
# A unit runs as a stage of its own, forward and backward, on the values that the unit before it gave for a real batch.
# Its weights and buffers are placeholders of the right shapes (`dryrun.py`), so the whole model is never in memory.

RUNS = 3
"""Timed runs per unit, after one warm-up run. The median over all units of the same kind is used."""


def measure(
    blueprint: Blueprint, batch_args: tuple[Any, ...], batch_kwargs: Mapping[str, Any], device: torch.device | str
) -> list[UnitCost]:
    """Measure every unit: seconds of forward and backward, bytes of parameters and of tensors kept for backward.

    The model, its gradients and the states of the random generators stay unchanged.
    """
    device = torch.device(device)
    args, kwargs = pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), (batch_args, dict(batch_kwargs)))
    accelerators = [device] if device.type == "cuda" else []
    seconds: dict[Any, list[float]] = defaultdict(
        list
    )  # kind of unit -> of all its runs: blocks are alike, noise is not
    found: list[tuple[Any, int]] = []
    received: tuple[Any, ...] = ()
    with torch.random.fork_rng(devices=accelerators), torch.enable_grad():
        for number in range(len(blueprint.units)):
            stage = blueprint.stage(number, number + 1)
            with in_mode(stage.module, training=True), with_placeholders(stage.module, device):
                kind = _kind(stage, received)
                times, size, received = _measure_unit(stage, received, args, kwargs, device)
            seconds[kind] += times
            found.append((kind, size))
    return [UnitCost(statistics.median(seconds[kind]), size) for kind, size in found]


def _kind(stage: Stage, received: Sequence[Any]) -> Any:
    """Units with an equal kind take the same time: the same layers of the same shapes on the same values."""
    layers = tuple(type(module) for module in stage.module.modules())
    tensors = (*stage.module.parameters(), *stage.module.buffers(), *received)
    shapes = tuple((tuple(t.shape), t.dtype) for t in tensors if isinstance(t, torch.Tensor))
    return layers, shapes, stage.module.operations


def _measure_unit(
    stage: Stage, received: Sequence[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
) -> tuple[list[float], int, tuple[Any, ...]]:
    """Returns the seconds of each run, the bytes, and the values that the unit sends."""

    def forward(weights: dict[str, torch.Tensor], inputs: Sequence[Any]) -> Any:
        return call(stage.module, weights, (tuple(inputs), args, kwargs), {})

    weights = placeholder_weights(stage.module, device, lambda tried: forward(tried, _fresh(received)))
    seconds, kept, output = [], 0, None
    for run in range(RUNS + 1):
        inputs = _fresh(received)
        _wait(device)
        begin = time.perf_counter()
        with _kept_for_backward(weights) as storages:
            output = forward(weights, inputs)
        kept = sum(storages.values())
        _backward(output)
        _wait(device)
        if run:
            seconds.append(time.perf_counter() - begin)
        for weight in weights.values():
            weight.grad = None
    parameters = sum(weights[name].nbytes for name, _ in stage.module.named_parameters())
    sent = tuple(value.detach() if isinstance(value, torch.Tensor) else value for value in pytree.tree_leaves(output))
    return seconds, parameters + kept, sent


def _backward(output: Any) -> None:
    reached = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if reached:
        torch.autograd.backward(reached, [torch.ones_like(leaf) for leaf in reached])


def _fresh(received: Sequence[Any]) -> list[Any]:
    """Copies of the values as a stage receives them: without history, but needing a gradient."""

    def fresh(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        return value.detach().clone().requires_grad_(value.is_floating_point())

    return [fresh(value) for value in received]


@contextmanager
def _kept_for_backward(weights: Mapping[str, torch.Tensor]) -> Iterator[dict[int, int]]:
    """Yields, for each storage that autograd keeps inside the block, its bytes. Weights do not count."""
    own = {weight.untyped_storage().data_ptr() for weight in weights.values()}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# --- where a unit may begin ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Anchor:
    """The call of a module (the first, second, …) with which a unit begins."""

    path: str
    occurrence: int


@dataclass(frozen=True)
class _CutPlace:
    position: int
    crossing: int


def anchors_at(model: torch.nn.Module, modes: Sequence[Sequence[Call]], every_call: bool) -> list[Anchor]:
    """Calls of modules at which units may begin: every block, and the first call between blocks. With `every_call`,
    every call. In a model without blocks, every layer with parameters.

    Everything before the first such call belongs to the first unit.
    """
    numbered = list(_numbered(modes[0]))
    if every_call:
        return numbered[1:]
    has_parameters = {call.path: any(True for _ in model.get_submodule(call.path).parameters()) for call in modes[0]}
    blocks = {call.path for call in modes[0] if is_block(model, call.path)}
    groups: list[list[Anchor]] = []
    for anchor in numbered:
        alone = anchor.path in blocks or (not blocks and has_parameters[anchor.path])
        follows = groups and (groups[-1][0].path in blocks) == (anchor.path in blocks)
        if alone or not (groups and follows):
            groups.append([anchor])
        else:
            groups[-1].append(anchor)
    weighty = [group for group in groups if group[0].path in blocks or any(has_parameters[a.path] for a in group)]
    return [group[0] for group in weighty[1:]]


def cut_positions(
    passes: Mapping[bool, RecordedPass], anchors: Sequence[Anchor], at_least: int | None = None
) -> tuple[dict[bool, list[int]], list[str]]:
    """Returns, per mode, the positions of the cuts (equally many in each mode), and the places that cannot be cut, with
    reasons.

    If `at_least` is set, leaves out cuts that many values cross, as long as this many units remain.
    """
    found: list[tuple[Anchor, dict[bool, _CutPlace]]] = []
    refused: list[str] = []
    calls = {
        mode: dict(zip(_numbered(one_pass.recording.calls), one_pass.recording.calls, strict=True))
        for mode, one_pass in passes.items()
    }
    for anchor in anchors:
        places: dict[bool, _CutPlace] = {}
        try:
            for mode, one_pass in passes.items():
                if anchor not in calls[mode]:
                    raise Unsendable(f"{anchor.path} is not called in {'training' if mode else 'evaluation'}")
                places[mode] = _best_place(one_pass, calls[mode][anchor])
                if found and places[mode].position <= found[-1][1][mode].position:
                    raise Unsendable("training and evaluation do not call modules in the same order")
        except Unsendable as reason:
            refused.append(f"a stage cannot begin at {anchor.path}: {reason}")
            continue
        found.append((anchor, places))
    if at_least is not None:
        found = _fewer_values(found, at_least)
    return {mode: [places[mode].position for _, places in found] for mode in passes}, refused


def _fewer_values(
    found: list[tuple[Anchor, dict[bool, _CutPlace]]], at_least: int
) -> list[tuple[Anchor, dict[bool, _CutPlace]]]:
    """The cuts that the fewest values cross, if enough of them are left."""
    counts = [max(place.crossing for place in places.values()) for _, places in found]
    for most in sorted(set(counts)):
        low = [one for one, count in zip(found, counts, strict=True) if count <= most]
        if len(low) + 1 >= at_least:
            return low
    return found


def _best_place(one_pass: RecordedPass, call: Call) -> _CutPlace:
    """The best cut between this call and the call before. Raises the reason if no cut is possible."""
    before = max((other.end for other in one_pass.recording.calls if other.end <= call.first), default=0)
    places, reasons = [], []
    for position in range(call.first, before - 1, -1):
        try:
            places.append(_CutPlace(position, _crossing(one_pass, position)))
        except Unsendable as reason:
            reasons.append(reason)
    if not places:
        raise reasons[0]
    return min(places, key=lambda place: place.crossing)


def _crossing(one_pass: RecordedPass, position: int) -> int:
    for first, last in one_pass.facts.inseparable:
        if first < position <= last:
            raise Unsendable(f"{one_pass.nodes[last].name} changes in place what {one_pass.nodes[first].name} made")
    sent = 0
    for node in one_pass.crossing(position):
        try:
            sent += len(list(sent_values(one_pass.facts.values[node])))
        except Unsendable as what:
            raise Unsendable(
                f"the value {node.name} would have to be sent and is {what}, not a tensor or an int"
            ) from None
    if not sent:
        raise Unsendable("nothing that was computed before is used from there on")
    return sent


def _numbered(calls: Sequence[Call]) -> Iterator[Anchor]:
    times: Counter[str] = Counter()
    for one in calls:
        yield Anchor(one.path, times[one.path])
        times[one.path] += 1


# --- units -----------------------------------------------------------------------------------------------------------


_DEPTHS = (0, 1, 2, 3, EVERYTHING)
_SPLIT_HINT = (
    "name the modules at which stages may begin, so that this code is inside one of them: "
    'Job(split=["blocks.1", "blocks.2"])'
)


@dataclass(frozen=True)
class Unit:
    """A piece of the model that is never cut. `name` is for people; `parameters` are the first names of its
    parameters."""

    name: str
    parameters: tuple[str, ...]


class Blueprint:
    """A model and where it may be cut; gives any range of its units as a stage."""

    def __init__(
        self,
        model: torch.nn.Module,
        passes: Mapping[bool, RecordedPass],
        cuts: Mapping[bool, Sequence[int]],
        refused: Sequence[str],
    ) -> None:
        self._model = model
        self._record_modes = passes
        self._cuts = {mode: [0, *cuts[mode], len(one_pass.nodes)] for mode, one_pass in passes.items()}
        self.way = "torch.fx" if passes[True].recording.device is None else "torch.export"
        self.refused = tuple(refused)
        """Other places where the model could be cut, and why it was not."""
        self.units = tuple(self._unit(number) for number in range(len(cuts[True]) + 1))

    def stage(self, first: int, end: int) -> Stage:
        """The units [first, end) as one stage."""
        if not 0 <= first < end <= len(self.units):
            raise IndexError(f"units {first} to {end} of {len(self.units)}")
        codes = {}
        for training, one_pass in self._record_modes.items():
            cuts = self._cuts[training]
            mode = "training" if training else "evaluation"
            codes[training] = write_stage_code(
                one_pass, cuts[first], cuts[end], f"units {first} to {end - 1} in {mode}"
            )
        return build_stage(self._model, codes)

    def _unit(self, number: int) -> Unit:
        targets: set[str] = set()
        for training, one_pass in self._record_modes.items():
            targets |= one_pass.targets(*self._cuts[training][number : number + 2])
        first, end = self._cuts[True][number : number + 2]
        calls = self._record_modes[True].recording.calls
        paths = list(dict.fromkeys(call.path for call in calls if first <= call.first < end))
        name = " + ".join(paths) if len(paths) < 4 else f"{paths[0]} + … + {paths[-1]}"
        every = self._model.named_parameters(remove_duplicate=False)
        used = {id(p) for n, p in every if any(n == target or n.startswith(f"{target}.") for target in targets)}
        mine = (n for n, p in self._model.named_parameters() if id(p) in used)
        return Unit(name or type(self._model).__name__, tuple(mine))


def make_blueprint(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    split: Sequence[str] = (),
    at_least: int = 1,
) -> Blueprint:
    """Find where `model` may be cut, at `at_least` - 1 places or more. Model and example inputs are on meta.

    >>> with torch.device("meta"):
    ...     model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    ...     blueprint = make_blueprint(model, (torch.empty(5, 4),), {}, at_least=2)
    >>> [unit.name for unit in blueprint.units]
    ['0', '1', '2']
    >>> blueprint.stage(1, 3).receives
    ('_0',)
    """
    if has_hooks(model):
        raise JobError(
            "the model itself has forward hooks, which no stage of it can run",
            hint="register them on modules inside the model",
        )
    attempt = _Attempt(model, (args, dict(kwargs)), bool(split))
    found = _named(attempt, tuple(split)) if split else _automatic(attempt, at_least)
    if found is None:
        raise JobError(
            f"the model cannot be cut into stages, because its code cannot be followed: {attempt.failures[0]}",
            hint=_SPLIT_HINT,
            details="\n".join(attempt.failures),
        )
    if len(found.units) < at_least:
        raise _too_few(found, attempt, at_least, bool(split))
    return found


def _automatic(attempt: _Attempt, at_least: int) -> Blueprint | None:
    best: Blueprint | None = None
    for passes in (attempt.traced, attempt.exported):
        seen: list[frozenset[str]] = []
        for depth in _DEPTHS:
            leaves = leaves_at(attempt.model, depth)
            if leaves in seen:
                continue
            seen.append(leaves)
            recorded = passes(leaves)
            if recorded is None:
                break
            for every_call in (False, True) if depth == 0 else (True,):
                blueprint = _cut(attempt.model, recorded, at_least, every_call)
                if best is None or len(blueprint.units) > len(best.units):
                    best = blueprint
                if len(best.units) >= at_least:
                    return best
    return best


def _cut(model: torch.nn.Module, passes: Mapping[bool, RecordedPass], at_least: int, every_call: bool) -> Blueprint:
    anchors = anchors_at(model, [one_pass.recording.calls for one_pass in passes.values()], every_call)
    cuts, refused = cut_positions(passes, anchors, at_least if every_call else None)
    return Blueprint(model, passes, cuts, refused)


def _named(attempt: _Attempt, split: Sequence[str]) -> Blueprint | None:
    modules = dict(attempt.model.named_modules(remove_duplicate=False))
    for name in split:
        if not name or name not in modules:
            near = difflib.get_close_matches(name, [path for path in modules if path], n=3, cutoff=0.4)
            raise JobError(
                f"split: the model has no module {name!r}",
                hint=f"did you mean {' or '.join(map(repr, near))}?" if near else "see model.named_modules()",
            )
    leaves = leaves_around(attempt.model, split)
    passes = attempt.traced(leaves) or attempt.exported(leaves)
    if passes is None:
        return None
    for name in split:
        if any(all(call.path != name for call in one_pass.recording.calls) for one_pass in passes.values()):
            raise JobError(
                f"split: no stage can begin at {name!r}, because the model never calls this module",
                hint="name modules whose forward runs; a list of modules is not one of them, its elements are",
            )
    order = [call.path for call in passes[True].recording.calls]
    anchors = [Anchor(name, 0) for name in sorted(set(split), key=order.index) if order.index(name) > 0]
    cuts, refused = cut_positions(passes, anchors)
    if refused:
        raise JobError(f"split: {refused[0]}", hint="name a module before or behind it")
    return Blueprint(attempt.model, passes, cuts, ())


def _too_few(found: Blueprint, attempt: _Attempt, at_least: int, named: bool) -> JobError:
    names = " | ".join(unit.name for unit in found.units)
    count = len(found.units)
    units = f"{count} units" if count > 1 else "only one unit"
    fits = f"pipeline:{count} fits" if count > 1 else "use data parallelism, or sharded"
    hint = f"{fits}; or name more modules in `split`" if named else f"{fits}; or a model with more layers"
    return JobError(
        f"the model cannot be cut into {at_least} stages, it has {units}: {names}",
        hint=hint,
        details="\n".join((*found.refused, *attempt.failures)),
    )


class _Attempt:
    """Records the model's forward pass with torch.fx or torch.export, and remembers why a way failed.

    If the user has named modules, the code inside these modules may do anything, for example look at values.
    """

    def __init__(self, model: torch.nn.Module, inputs: Inputs, named: bool) -> None:
        self.model = model
        self._named = named
        self.failures: list[str] = []
        self._inputs = inputs
        self._export: Mapping[bool, RecordedPass] | None = None

    def traced(self, leaves: frozenset[str]) -> Mapping[bool, RecordedPass] | None:
        return self._record_modes("torch.fx", lambda: trace(self.model, self._inputs, leaves))

    def exported(self, leaves: frozenset[str]) -> Mapping[bool, RecordedPass] | None:
        if self._export is None:
            self._export = self._record_modes("torch.export", lambda: export(self.model, self._inputs))
        if self._export is None:
            return None
        return {
            mode: one_pass.relabelled(label_calls(one_pass.recording, leaves))
            for mode, one_pass in self._export.items()
        }

    def _record_modes(self, way: str, record: Callable[[], Recording]) -> Mapping[bool, RecordedPass] | None:
        passes = {}
        for training in (True, False):
            with in_mode(self.model, training):
                try:
                    recording = record()
                    facts = observe(self.model, recording, flat_inputs(*self._inputs)[0], self._named)
                except Exception as error:  # any error that the model's own code raises while it is traced
                    self.failures.append(f"{way}: {failure_reason(error)}")
                    return None
                modes = {path: module.training for path, module in self.model.named_modules(remove_duplicate=False)}
            passes[training] = RecordedPass(recording, facts, modes)
        return passes
