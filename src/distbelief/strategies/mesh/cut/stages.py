"""A stage: a range of a recorded forward pass as code that runs, with the model's own modules.

A stage holds the modules and parameters that it uses under the model's names. A model is recorded once for training and
once for evaluation; a stage has the code of both and runs the code of its mode. Values that depend on the model's
inputs only and take no time to compute (sizes, masks, positions) are computed in every stage that needs them, not sent.
"""

from __future__ import annotations

import linecache
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from distbelief.errors import JobError
from distbelief.strategies.mesh.cut.recordedpass import RecordedPass, SentValue, operation, rebuild, sent_values
from distbelief.strategies.mesh.cut.tracing import Recording, flat_inputs


class StageModule(torch.nn.Module):
    """Holds the modules and tensors that a stage uses, at the model's own paths, and runs the code of its present
    mode."""

    def __init__(self, codes: Mapping[bool, StageCode]) -> None:
        super().__init__()
        self._codes = codes

    @property
    def operations(self) -> tuple[str, ...]:
        """The names of the operations in training. Stages that do the same with other weights have equal names."""
        return self._codes[True].operations

    def train(self, mode: bool = True) -> StageModule:
        """Put each module into the mode that the model's own `train` gives it."""
        super().train(mode)
        for path, module in self.named_modules():
            if path:
                module.training = self._codes[mode].modes.get(path, mode)
        return self

    def forward(self, received: Sequence[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        code = self._codes[self.training]
        given: list[Any] = []
        if code.inputs:
            leaves, _ = flat_inputs(args, kwargs)
            if len(leaves) != code.input_count:
                raise JobError(f"the model was cut for {code.input_count} inputs and is called with {len(leaves)}")
            given = [leaves[number] for number in code.inputs]
            _check_shapes(given, code.shapes)
        device = _device_of([*received, *given], self) if code.places_device or code.constants else None
        constants = [constant.to(device) for constant in code.constants]
        output = code.run(self, *received, *given, *constants, *([device] if code.places_device else []))
        return output if code.output is None else pytree.tree_unflatten(list(output), code.output)


@dataclass(frozen=True)
class StageCode:
    """The code of a stage in one mode."""

    run: Callable[..., Any]
    receives: tuple[str, ...]
    sends: tuple[str, ...]
    inputs: tuple[int, ...]
    """Which leaves of the model's inputs the stage reads."""
    input_count: int
    shapes: tuple[tuple[int | None, ...] | None, ...]
    """For each of these inputs, its fixed sizes."""
    constants: tuple[torch.Tensor, ...]
    places_device: bool
    targets: frozenset[str]
    """Modules, parameters and buffers of the model that the stage uses."""
    modes: Mapping[str, bool]
    """Which of the model's modules are in training mode."""
    output: pytree.TreeSpec | None
    """The structure of the model's output; None unless this is the last stage."""
    operations: tuple[str, ...]


@dataclass(frozen=True)
class Stage:
    """Some consecutive units of a model. Called with the values from the stage before and the model's own inputs."""

    module: StageModule

    @property
    def receives(self) -> tuple[str, ...]:
        """The values that come from the stage before, in this mode; () for the first."""
        return self.module._codes[self.module.training].receives

    @property
    def sends(self) -> tuple[str, ...]:
        """The values for the next stage, in this mode; () for the last."""
        return self.module._codes[self.module.training].sends

    @property
    def needs_batch(self) -> bool:
        """Whether the stage reads the model's own inputs (in any mode)."""
        return any(code.inputs for code in self.module._codes.values())

    def __call__(self, received: Sequence[Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Returns a tuple of the values in `sends`; the last stage returns the model's own output."""
        return self.module(tuple(received), args, kwargs)


def build_stage(model: torch.nn.Module, codes: Mapping[bool, StageCode]) -> Stage:
    module = StageModule(codes)
    attach(module, model, frozenset[str]().union(*(code.targets for code in codes.values())))
    module.training = model.training
    return Stage(module)


def attach(holder: torch.nn.Module, model: torch.nn.Module, targets: Iterable[str]) -> None:
    """Put the model's own objects into `holder`, under the model's names and in the model's order."""
    modules = {path: place for place, (path, _) in enumerate(model.named_modules(remove_duplicate=False))}
    wanted: set[str] = set()  # modules to attach as a whole
    single: set[str] = set()  # parameters, buffers and other tensors of modules that are not attached
    for target in targets:
        owner, _, key = target.rpartition(".")
        if target in modules:
            wanted.add(target)
        elif owner and key not in vars(origin := model.get_submodule(owner)) and not any(origin.children()):
            wanted.add(owner)
        else:
            single.add(target)
    for path in sorted(wanted, key=modules.__getitem__):
        if not any(path.startswith(f"{other}.") for other in wanted):
            _parent(holder, path).add_module(path.rpartition(".")[2], model.get_submodule(path))
    for path in sorted(single):
        if not any(path.startswith(f"{other}.") for other in wanted):
            origin, key = model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2]
            place = _parent(holder, path)
            if key in origin._parameters:
                place.register_parameter(key, origin._parameters[key])
            elif key in origin._buffers:
                place.register_buffer(
                    key, origin._buffers[key], persistent=key not in origin._non_persistent_buffers_set
                )
            else:
                setattr(place, key, getattr(origin, key))  # code reads it by this name, also after a replacement


def write_stage_code(one_pass: RecordedPass, first: int, end: int, name: str) -> StageCode:
    """The code of the nodes [first, end) of a recording."""
    recording = one_pass.recording
    writer = _Writer(one_pass, first, end)
    source = writer.graph.python_code("self")
    filename = f"<{name}>"
    linecache.cache[filename] = (len(source.src), None, source.src.splitlines(keepends=True), filename)
    namespace: dict[str, Any] = dict(source.globals)
    exec(compile(source.src, filename, "exec"), namespace)
    return StageCode(
        run=namespace["forward"],
        receives=writer.receives,
        sends=writer.sends,
        inputs=tuple(recording.inputs[node] for node in writer.inputs),
        input_count=recording.input_count,
        shapes=tuple(recording.shapes.get(node) for node in writer.inputs),
        constants=tuple(recording.constants[str(node.target)] for node in writer.constants),
        places_device=writer.places_device,
        targets=frozenset(writer.targets),
        modes=one_pass.modes,
        output=recording.output if end == len(one_pass.nodes) else None,
        operations=tuple(operation(node) for node in writer.graph.nodes if node.op in ("call_function", "call_method")),
    )


class _Writer:
    """Copies nodes into a new graph, with the light work that they need from earlier nodes."""

    def __init__(self, one_pass: RecordedPass, first: int, end: int) -> None:
        self._pass = one_pass
        self.graph = fx.Graph()
        self._made: dict[fx.Node, Any] = {}
        self.inputs: list[fx.Node] = []
        self.constants: list[fx.Node] = []
        self.targets: set[str] = set()
        self.places_device = False
        body = one_pass.nodes[first:end]
        arriving = one_pass.crossing(first) if first else []
        leaving = one_pass.crossing(end) if end < len(one_pass.nodes) else []
        self.receives = tuple(_names(one_pass, arriving))
        self.sends = tuple(_names(one_pass, leaving))
        received = iter([self.graph.placeholder(name.replace(".", "_")) for name in self.receives])
        for node in arriving:
            self._made[node] = rebuild(one_pass.facts.values[node], received)
        self._declare(body, leaving, set(arriving))
        for node in body:
            if node.op not in ("placeholder", "get_attr", "output") and node not in one_pass.from_inputs:
                self._copy(node)
        if leaving:
            self.graph.output(
                tuple(self._part(node, part.path) for node in leaving for part in _sent_values(one_pass, node))
            )
        else:
            output = body[-1]
            self.graph.output(fx.map_arg(output.args[0], self._value))

    def _declare(self, body: Sequence[fx.Node], leaving: Sequence[fx.Node], known: set[fx.Node]) -> None:
        """Declare placeholders, which must precede everything else: first find out which inputs the stage will need."""
        reached: set[fx.Node] = set()
        pending = [node for node in body if node.op not in ("placeholder", "get_attr")]
        pending = [node for node in pending if node not in self._pass.from_inputs] + list(leaving)
        while pending:
            node = pending.pop()
            if node not in reached and node not in known:
                reached.add(node)
                pending += node.all_input_nodes
        recording = self._pass.recording
        for node in sorted(reached, key=self._pass.place.__getitem__):
            if node.op == "placeholder":
                self.inputs.append(node)
        for node in sorted(reached, key=self._pass.place.__getitem__):
            if node.op == "get_attr" and node.target in recording.constants:
                self.constants.append(node)
        for node in (*self.inputs, *self.constants):
            self._made[node] = self.graph.placeholder(node.name)
        self.places_device = recording.device is not None and any(_names_device(node, recording) for node in reached)
        if self.places_device:
            self._device = self.graph.placeholder("stage_device")

    def _value(self, node: fx.Node) -> Any:
        return self._made[node] if node in self._made else self._copy(node)

    def _copy(self, node: fx.Node) -> Any:
        args, kwargs = fx.map_arg((node.args, node.kwargs), self._value)
        if self.places_device:
            args, kwargs = _with_device((args, kwargs), self._pass.recording.device, self._device)
        if node.op in ("call_module", "get_attr"):
            self.targets.add(str(node.target))
        self._made[node] = self.graph.create_node(node.op, node.target, tuple(args), dict(kwargs), name=node.name)
        return self._made[node]

    def _part(self, node: fx.Node, path: tuple[int | str, ...]) -> Any:
        value: Any = self._value(node)
        for key in path:
            get = self.graph.call_function if isinstance(value, fx.Node) else lambda get, of: get(*of)
            value = get(operator.getitem, (value, key))
        return value


def _sent_values(one_pass: RecordedPass, node: fx.Node) -> list[SentValue]:
    return list(sent_values(one_pass.facts.values[node]))


def _names(one_pass: RecordedPass, nodes: Iterable[fx.Node]) -> Iterable[str]:
    for node in nodes:
        for part in _sent_values(one_pass, node):
            yield ".".join([node.name, *map(str, part.path)])


def _names_device(node: fx.Node, recording: Recording) -> bool:
    return any(leaf == recording.device for leaf in pytree.tree_leaves((node.args, node.kwargs)))


def _with_device(value: Any, written: torch.device | None, actual: fx.Node) -> Any:
    return fx.node.map_aggregate(value, lambda leaf: actual if leaf == written else leaf)


def _check_shapes(given: Sequence[Any], shapes: Sequence[tuple[int | None, ...] | None]) -> None:
    for value, fixed in zip(given, shapes, strict=True):
        if fixed is None:
            continue
        same = len(fixed) == value.ndim and all(a in (None, b) for a, b in zip(fixed, value.shape, strict=True))
        if not same:
            wanted = " × ".join("any" if size is None else str(size) for size in fixed)
            raise JobError(
                f"the model was cut for inputs of {wanted} and got one of {' × '.join(map(str, value.shape))}",
                hint="bring all samples to one size in `collate`, or name modules in `split`",
            )


def _device_of(values: Sequence[Any], module: torch.nn.Module) -> torch.device:
    """The device of the stage's parameters, or else of its values."""
    tensors = [*module.parameters(), *(value for value in values if isinstance(value, torch.Tensor))]
    return tensors[0].device if tensors else torch.device("cpu")


def _parent(holder: torch.nn.Module, path: str) -> torch.nn.Module:
    for name in path.split(".")[:-1]:
        child = holder._modules.get(name)
        if child is None:
            child = torch.nn.Module()
            holder.add_module(name, child)
        holder = child
    return holder
