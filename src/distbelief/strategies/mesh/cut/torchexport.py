"""A model's forward pass as a graph of values, recorded by torch.export: for models whose Python torch.fx cannot
follow.

Export runs the model's own code, so any control flow over settings and shapes works, and records tensor operations
only. It runs on tensors without memory that claim to be on the CPU (not on meta, where constants would lose their
values). The batch size stays open: a graph that is right for one batch size only is refused.
"""

from __future__ import annotations

import functools
import inspect
import io
import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from typing import Any, TextIO

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from distbelief.strategies.mesh.cut.dryrun import restoring
from distbelief.strategies.mesh.cut.tracing import Call, Inputs, Recording, flat_inputs

_aten = torch.ops.aten
_CHECKS = frozenset(
    ["_assert_tensor_metadata", "_assert_scalar", "sym_constrain_range", "sym_constrain_range_for_size"]
)
_HOST = torch.device("cpu")


def export(model: torch.nn.Module, inputs: Inputs) -> Recording:
    """Record one forward pass. Raises any error of export or of the model. The recording has no calls yet: see
    `label_calls`."""
    if any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        raise RuntimeError("torch.export does not follow layers that are divided by tensor parallelism")
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    first = {
        name: names[id(tensor)]
        for found in (model.named_parameters, model.named_buffers)
        for name, tensor in found(remove_duplicate=False)
    }
    loose = {
        f"{path}.{key}" if path else key
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor) and value.is_meta
    }
    args, kwargs = _example(inputs, mode)
    with _quiet(), _without_memory(model, mode), _plain_output(model), torch.random.fork_rng(devices=[]):
        bound = inspect.signature(model.forward).bind(*args, **kwargs).arguments
        program = torch.export.export(model, args, kwargs, dynamic_shapes=_open_shapes(bound), strict=False)
        module = program.module(check_guards=False)
    graph: fx.Graph = module.graph
    _simplify(graph)
    for node in graph.nodes:
        if node.op == "get_attr" and node.target in first:
            node.target = first[node.target]
    found = {str(node.target) for node in graph.nodes if node.op == "get_attr"} - set(first.values()) - loose
    constants = {name: program.constants[name] for name in found}
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    examples = {node: node.meta.get("val") for node in placeholders}
    return Recording(
        graph=graph,
        inputs={node: number for number, node in enumerate(placeholders)},
        input_count=len(placeholders),
        calls=(),
        output=program.call_spec.out_spec,
        constants=constants,
        device=_HOST,
        shapes={
            node: tuple(size.node.maybe_as_int() if isinstance(size, torch.SymInt) else size for size in value.shape)
            for node, value in examples.items()
            if isinstance(value, torch.Tensor)
        },
    )


def label_calls(recording: Recording, leaves: frozenset[str]) -> tuple[Call, ...]:
    """The calls of leaf modules: runs of operations inside the same leaf."""
    calls: list[Call] = []
    for place, node in enumerate(recording.graph.nodes):
        stack = node.meta.get("nn_module_stack") or {}
        paths = (path.partition("@")[0] for path, _ in stack.values())
        label = next((path for path in paths if path in leaves), None)
        if label is None or node.op != "call_function":
            continue
        if calls and calls[-1].path == label:
            calls[-1] = Call(label, calls[-1].first, place + 1)
        else:
            calls.append(Call(label, place, place + 1))
    return tuple(calls)


@contextmanager
def _without_memory(model: torch.nn.Module, mode: FakeTensorMode) -> Iterator[None]:
    """Inside the block the model's tensors claim to be on the CPU, without memory. A tensor with two names stays one
    tensor."""
    made: dict[int, torch.Tensor] = {}
    with restoring(model):
        for module in model.modules():
            places: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, vars(module))
            for place in places:
                for name, tensor in list(place.items()):
                    if not isinstance(tensor, torch.Tensor) or not tensor.is_meta:
                        continue
                    if id(tensor) not in made:
                        with mode:
                            fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_HOST)
                        own = isinstance(tensor, torch.nn.Parameter)
                        made[id(tensor)] = torch.nn.Parameter(fake, tensor.requires_grad) if own else fake
                    place[name] = made[id(tensor)]
        yield


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence export in this thread: it prints its graph when it fails and logs a warning, but its exception says
    enough."""
    thread = threading.get_ident()
    shapes = logging.getLogger("torch.fx.experimental.symbolic_shapes")

    def of_others(record: logging.LogRecord) -> bool:
        return record.thread != thread

    shapes.addFilter(of_others)
    try:
        with redirect_stderr(_OtherThreads(sys.stderr, thread)):
            yield
    finally:
        shapes.removeFilter(of_others)


class _OtherThreads(io.TextIOBase):
    """Passes on the output of other threads only."""

    def __init__(self, stream: TextIO, thread: int) -> None:
        self._stream = stream
        self._thread = thread

    def write(self, text: str) -> int:
        return len(text) if threading.get_ident() == self._thread else self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()


@contextmanager
def _plain_output(model: torch.nn.Module) -> Iterator[None]:
    """Inside the block the model returns None in place of outputs other than tensors and numbers, such as a cache of a
    language model."""
    forward = model.forward

    @functools.wraps(forward)
    def plain(*args: Any, **kwargs: Any) -> Any:
        kinds = (torch.Tensor, int, float, str, type(None))
        return pytree.tree_map(lambda leaf: leaf if isinstance(leaf, kinds) else None, forward(*args, **kwargs))

    own = "forward" in vars(model)
    model.forward = plain
    try:
        yield
    finally:
        if own:
            model.forward = forward
        else:
            del model.forward


def _example(inputs: Inputs, mode: FakeTensorMode) -> Inputs:
    """Inputs like the given ones, with another batch size: 1 and sizes of other dimensions are special cases for
    export."""
    leaves, spec = flat_inputs(*inputs)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    sizes = {size for tensor in tensors for size in tensor.shape}
    batches = {tensor.shape[0] for tensor in tensors if tensor.ndim}
    batch = next(size for size in (7, 11, 13, 17, 19, 23, 29, 31) if size not in sizes) if len(batches) == 1 else None

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        shape = (batch or leaf.shape[0], *leaf.shape[1:]) if leaf.ndim else ()
        with mode:
            return torch.empty(shape, dtype=leaf.dtype, device=_HOST)

    args, kwargs = pytree.tree_unflatten([fake(leaf) for leaf in leaves], spec)
    return args, kwargs


def _open_shapes(bound: dict[str, Any]) -> dict[str, Any]:
    tensors = [leaf for leaf in pytree.tree_leaves(bound) if isinstance(leaf, torch.Tensor) and leaf.ndim]
    first = Dim.DYNAMIC if len({tensor.shape[0] for tensor in tensors}) == 1 else Dim.AUTO

    def shape(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return None
        return {place: first if place == 0 else Dim.AUTO for place in range(leaf.ndim)}

    return {name: pytree.tree_map(shape, value) for name, value in bound.items()}


def _simplify(graph: fx.Graph) -> None:
    """Remove nodes that only matter for the trace: checks, moves to the trace's device, copies of a buffer onto
    itself."""
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        name = node.target._schema.name.rpartition("::")[2]
        if name in _CHECKS and not node.users:
            graph.erase_node(node)
        elif name == "to" and _changes_nothing(node):
            node.replace_all_uses_with(node.all_input_nodes[0])
            graph.erase_node(node)
        elif node.target is _aten.copy_.default and node.all_input_nodes[0].op == "get_attr" and not node.users:
            _earlier(graph, node)


def _changes_nothing(node: fx.Node) -> bool:
    """Whether a move of a tensor changes nothing. Under autocast the input may have another type than in the trace; a
    move that kept the type must then keep it too."""
    source, result = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    copies = bool(node.kwargs.get("copy", False)) or True in node.args
    return source is not None and result is not None and source.dtype == result.dtype and not copies


def _earlier(graph: fx.Graph, copy: fx.Node) -> None:
    """Move a buffer's update from the end, where export puts it, to just behind the last use; at the end it would
    prevent every cut before it."""
    buffer, value = copy.all_input_nodes
    in_place = isinstance(value.target, torch._ops.OpOverload) and value.target._schema.is_mutable
    if in_place and value.args[0] is buffer:
        graph.erase_node(copy)
        return
    order = {node: place for place, node in enumerate(graph.nodes)}
    others = [user for user in buffer.users if user is not copy]
    max([value, *others], key=order.__getitem__).append(copy)
