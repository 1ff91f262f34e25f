"""A model's forward pass as a graph of values, recorded by torch.fx, or by torch.export where torch.fx cannot.

torch.fx does not run the model. Its tracer does not look into some modules (leaves). It records a call of a leaf as a
call of the very same object, so the leaf's hooks, buffers and inner code stay what they were. The code between leaves
is recorded operation by operation, in order, with in-place operations. A trace fixes the branches that depend on
`self.training`, so there is one recording per mode.
"""

from __future__ import annotations

import functools
import inspect
import io
import logging
import operator
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from distbelief.strategies.mesh.cut.dryrun import restoring

Inputs = tuple[tuple[Any, ...], dict[str, Any]]

_CONTAINERS = (torch.nn.Sequential, torch.nn.ModuleList, torch.nn.ModuleDict)
_FACTORIES = (
    "arange",
    "empty",
    "eye",
    "full",
    "linspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "randperm",
    "tensor",
    "zeros",
)
_TORCH, _HERE, _PYTHON = Path(torch.__file__).parent, Path(__file__).parent, Path(operator.__file__).parent
_MISSING = re.compile("meta tensor|register_meta|meta device type", re.IGNORECASE)
EVERYTHING = 1 << 10
"""A depth that opens blocks inside blocks, and torch's own layers if they contain other layers."""


@dataclass(frozen=True)
class Call:
    """One call of a leaf module: `first` and `end` are positions among the graph's nodes."""

    path: str
    first: int
    end: int


@dataclass(frozen=True)
class Recording:
    """One recorded forward pass. `inputs`: the placeholders, and which leaf of the model's inputs each of them is."""

    graph: fx.Graph
    inputs: Mapping[fx.Node, int]
    input_count: int
    calls: tuple[Call, ...]
    output: pytree.TreeSpec
    """The structure of the model's output; the graph gives its leaves."""
    constants: Mapping[str, torch.Tensor]
    """Tensors that the code made and that are not part of the model, by their names in the graph."""
    device: torch.device | None = None
    """The device that stands in the graph for the model's device; None if the graph names no device."""
    shapes: Mapping[fx.Node, tuple[int | None, ...]] = field(default_factory=dict)
    """The sizes of inputs that the graph requires; None where any size is right."""


def flat_inputs(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of the model's inputs, in an order that does not depend on the order of the keyword arguments."""
    return pytree.tree_flatten((args, dict(sorted(kwargs.items()))))


def leaves_at(model: torch.nn.Module, depth: int) -> frozenset[str]:
    """Names of the leaf modules: torch's own layers and, below `depth` opened containers, the elements of
    containers."""
    leaves = set()

    def visit(module: torch.nn.Module, path: str, opened: int) -> None:
        for name, child in module.named_children():
            at = f"{path}.{name}" if path else name
            element = isinstance(module, _CONTAINERS)
            own = type(child).__module__.startswith("torch.nn") and (depth < EVERYTHING or not any(child.children()))
            if isinstance(child, _CONTAINERS) and not has_hooks(child):
                visit(child, at, opened)
            elif has_hooks(child) or own or (element and opened >= depth):
                leaves.add(at)
            else:
                visit(child, at, opened + element)

    visit(model, "", 0)
    return frozenset(leaves)


def leaves_around(model: torch.nn.Module, named: Sequence[str]) -> frozenset[str]:
    """As `leaves_at`, but the named modules and all modules of the same classes are leaves, and modules around them are
    not."""
    modules = dict(model.named_modules(remove_duplicate=False))
    classes = {type(modules[name]) for name in named}
    around = {name[:end] for name in named for end, character in enumerate(name) if character == "."}
    whole = {path for path, module in modules.items() if type(module) in classes} - around - {""} | set(named)
    return frozenset(whole | (leaves_at(model, 0) | leaves_at(model, EVERYTHING)) - around)


def is_block(model: torch.nn.Module, path: str) -> bool:
    """Whether the module is an element of a container: one of the repeated parts that models are made of."""
    return isinstance(model.get_submodule(path.rpartition(".")[0]), _CONTAINERS)


def trace(model: torch.nn.Module, inputs: Inputs, leaves: frozenset[str]) -> Recording:
    """Record one forward pass. Raises any error of the model's code or of the tracer, for example where the code needs
    a value."""
    tracer = _Tracer(leaves, inputs)
    before = set(vars(model)) | set(model._buffers)
    with restoring(model):
        with _factories_recorded(tracer):
            graph = tracer.trace(model)
        for node in [node for node in graph.nodes if node.op == "get_attr" and not node.users]:
            graph.erase_node(node)
        read = {node.target for node in graph.nodes if node.op == "get_attr"}
        fresh = read & {*vars(model), *model._buffers} - before
        constants = {name: getattr(model, name) for name in fresh}
    if any(constant.is_meta for constant in constants.values()):
        raise ValueError("tensors that the model keeps in a list or dict have no names; register them as buffers")
    places = {node: place for place, node in enumerate(graph.nodes)}
    calls = [Call(str(node.target), place, place + 1) for node, place in places.items() if node.op == "call_module"]
    numbers = {node: tracer.numbers[str(node.target)] for node in places if node.op == "placeholder"}
    return Recording(graph, numbers, len(flat_inputs(*inputs)[0]), tuple(calls), tracer.spec, constants)


class _Value(fx.Proxy):
    """A value that is not known yet. In-place changes of it are recorded as such."""

    def __setitem__(self, index: Any, value: Any) -> None:
        self.tracer.create_proxy("call_function", operator.setitem, (self, index, value), {})


def _in_place(name: str) -> Callable[[_Value, Any], fx.Proxy]:
    def method(self: _Value, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", getattr(operator, name), (self, other), {})

    return method


for _name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "iand", "ior", "ixor", "imatmul"):
    setattr(_Value, f"__{_name}__", _in_place(_name))


class _Tracer(fx.Tracer):
    proxy_buffer_attributes = True

    def __init__(self, leaves: frozenset[str], inputs: Inputs) -> None:
        super().__init__()
        self._leaves = leaves
        self._inputs = inputs
        self.numbers: dict[str, int] = {}
        """For each placeholder's name, which leaf of the inputs it is."""
        self.spec: pytree.TreeSpec
        """The structure of the output, after the trace."""

    def is_leaf_module(self, m: torch.nn.Module, module_qualified_name: str) -> bool:
        return module_qualified_name in self._leaves

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Value(node, self)

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        """Tensors and numbers among the inputs become unknown values; other inputs (None, a flag) are fixed."""
        leaves, spec = flat_inputs(*self._inputs)
        values: list[Any] = []
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor | int | float) and not isinstance(leaf, bool):
                self.numbers[f"input_{number}"] = number
                values.append(self.create_proxy("placeholder", f"input_{number}", (), {}))
            else:
                values.append(leaf)
        args, kwargs = pytree.tree_unflatten(values, spec)
        self._read_attributes_by_name()

        def flat(root: torch.nn.Module) -> list[Any]:
            output, self.spec = pytree.tree_flatten(root.forward(*args, **kwargs))
            return output

        return flat, [self.root]

    def _read_attributes_by_name(self) -> None:
        """Make tensors that modules keep as plain attributes unknown too: they have no values yet."""
        made: dict[int, fx.Proxy] = {}
        for path, module in self.root.named_modules():
            for key, value in list(vars(module).items()):
                if isinstance(value, torch.Tensor):
                    name = f"{path}.{key}" if path else key
                    if id(value) not in made:
                        made[id(value)] = self.create_proxy("get_attr", name, (), {})
                    vars(module)[key] = made[id(value)]


@contextmanager
def _factories_recorded(tracer: fx.Tracer) -> Iterator[None]:
    """Record calls of torch's factory functions: the model's code must make such tensors in every pass, above all
    random ones.

    Like fx's own patch of `Module.__call__` this lasts a moment; other threads do not notice it.
    """
    thread = threading.get_ident()

    def recorded(make: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.get_ident() != thread:
                return make(*args, **kwargs)
            return tracer.create_proxy("call_function", make, args, kwargs)

        return call

    before = {name: getattr(torch, name) for name in _FACTORIES}
    try:
        for name, make in before.items():
            setattr(torch, name, recorded(make))
        yield
    finally:
        for name, make in before.items():
            setattr(torch, name, make)


def failure_reason(error: BaseException) -> str:
    """The error that stopped a tracer, and the last line of the user's code that it was in."""
    own = [frame for frame in traceback.extract_tb(error.__traceback__) if not _is_ours(Path(frame.filename))]
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    if _MISSING.search(said):  # users do not know the meta device
        said = "values are needed, and a model is cut before there are any"
    return f"{said} ({own[-1].filename}:{own[-1].lineno}: {own[-1].line})" if own else said


def _is_ours(path: Path) -> bool:
    if not path.is_absolute():  # generated code
        return True
    installed = "site-packages" in path.parts
    return path.is_relative_to(_TORCH) or path.parent == _HERE or (path.is_relative_to(_PYTHON) and not installed)


def has_hooks(module: torch.nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


# --- torch.export, for models whose Python torch.fx cannot follow -------------------------------------------------
# Export runs the model's own code, so any control flow over settings and shapes works, and records tensor operations
# only. It runs on tensors without memory that claim to be on the CPU (not on meta, where constants would lose their
# values). The batch size stays open: a graph that is right for one batch size only is refused.

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
    """Whether a recorded `.to()` is redundant: same type in the trace, no copy requested. Removing it is right under
    autocast too, where the input may have another type."""
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
