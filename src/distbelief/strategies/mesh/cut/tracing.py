"""A model's forward pass as a graph of values, recorded by torch.fx without running the model.

The tracer does not look into some modules (leaves). It records a call of a leaf as a call of the very same object, so
the leaf's hooks, buffers and inner code stay what they were. The code between leaves is recorded operation by
operation, in order, with in-place operations. A trace fixes the branches that depend on `self.training`, so there is
one recording per mode.
"""

from __future__ import annotations

import operator
import re
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx
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
    around = {name[:end] for name in named for end, letter in enumerate(name) if letter == "."}
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
