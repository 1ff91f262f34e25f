"""A recorded forward pass with all that a cut needs to know: what its values are, and which of them would have to be
sent from one stage to the next.

`observe` runs the recorded graph once on the meta device, without memory or arithmetic. There every tensor's storage
has an identity, and every in-place operation counts up a version number, so it finds which values share memory and
which operations change them, without guessing from names. A module that looks at values cannot run on meta; where the
job permits that, the module runs alone on placeholder values (`dryrun.py`).
"""

from __future__ import annotations

import copy
import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from distbelief.strategies.mesh.cut.dryrun import run_on_placeholders
from distbelief.strategies.mesh.cut.tracing import Call, Recording

# --- values ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SentValue:
    """One tensor or int inside a value. `path` tells where: () is the value itself, (0,) the first element of a
    tuple."""

    path: tuple[int | str, ...]
    size_bytes: int


class Unsendable(Exception):
    """A value contains something that is neither a tensor nor an int; the text tells what."""


@dataclass(frozen=True)
class Facts:
    """The facts that `observe` finds about the values of a recorded graph."""

    values: dict[fx.Node, Any]
    """The value of each node, on meta."""
    inseparable: tuple[tuple[int, int], ...]
    """(first, last) positions of nodes that must be in one stage, because they change and use the same memory."""
    changed: frozenset[fx.Node]
    """Nodes whose value shares memory with a tensor that is changed in place."""


def sent_values(value: Any, path: tuple[int | str, ...] = ()) -> Iterator[SentValue]:
    """The tensors and ints of a value. Fixed contents (None, a text) are not sent."""
    if isinstance(value, torch.Tensor):
        yield SentValue(path, value.numel() * value.element_size())
    elif isinstance(value, int):
        yield SentValue(path, 0)
    elif type(value) in (tuple, list, torch.Size):
        for index, element in enumerate(value):
            yield from sent_values(element, (*path, index))
    elif type(value) is dict and all(isinstance(key, str) for key in value):
        for key, element in value.items():
            yield from sent_values(element, (*path, key))
    elif value is not None and not isinstance(value, str):
        raise Unsendable(f"a {type(value).__name__}")


def rebuild(value: Any, received: Iterator[Any]) -> Any:
    """Returns the same structure as `value`, with the received tensors and ints in the order of `sent_values`."""
    if isinstance(value, torch.Tensor | int):
        return next(received)
    if type(value) in (tuple, torch.Size):
        return tuple(rebuild(element, received) for element in value)
    if type(value) is list:
        return [rebuild(element, received) for element in value]
    if type(value) is dict:
        return {key: rebuild(element, received) for key, element in value.items()}
    return value


def observe(model: torch.nn.Module, recording: Recording, leaves: Sequence[Any], may_look: bool = False) -> Facts:
    """Run the recorded graph once on meta. `leaves`: the model's flat example inputs, on meta; `may_look`: whether
    modules may look at values."""
    interpreter = _MetaInterpreter(model, recording, may_look)
    state = torch.get_rng_state()
    try:
        with torch.no_grad(), torch.device("meta"):
            interpreter.run(*(leaves[recording.inputs[node]] for node in recording.inputs))
    finally:
        torch.set_rng_state(state)
    return Facts(interpreter.env, tuple(interpreter.inseparable()), interpreter.sharing_changed())


class _MetaInterpreter(fx.Interpreter):
    def __init__(self, model: torch.nn.Module, recording: Recording, may_look: bool) -> None:
        super().__init__(model, garbage_collect_values=False, graph=recording.graph)
        self._may_look = may_look
        self._constants = recording.constants
        self._device = recording.device
        self._places = {node: place for place, node in enumerate(recording.graph.nodes)}
        self._uses: dict[int, list[int]] = defaultdict(list)  # storage -> positions of the nodes that touch it
        self._changes: dict[int, list[int]] = defaultdict(list)
        self._given: set[int] = set()  # storages that no node made: inputs, parameters, buffers
        self._storages: dict[fx.Node, set[int]] = {}

    def run_node(self, n: fx.Node) -> Any:
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        touched = list(_tensors((args, kwargs)))
        if n.op == "call_module":
            module = self.fetch_attr(str(n.target))
            mine = [*module.parameters(), *module.buffers()]
            self._given.update(map(_storage, mine))
            touched += mine
        before = [tensor._version for tensor in touched]
        value = super().run_node(n)
        made = {_storage(tensor) for tensor in _tensors(value)}
        if n.op in ("placeholder", "get_attr"):
            self._given |= made
        elif n.op != "output":
            for storage in made | {_storage(tensor) for tensor in touched}:
                self._uses[storage].append(self._places[n])
            for tensor, version in zip(touched, before, strict=True):
                if tensor._version != version:
                    self._changes[_storage(tensor)].append(self._places[n])
        self._storages[n] = made
        return value

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            return super().call_module(target, args, kwargs)
        except Exception:  # any error that the module's own code raises without values
            if not self._may_look:
                raise
            return run_on_placeholders(self.fetch_attr(target), args, kwargs)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        args = super().fetch_args_kwargs_from_env(n)
        if self._device is None:
            return args
        return fx.node.map_aggregate(args, lambda leaf: torch.device("meta") if leaf == self._device else leaf)

    def fetch_attr(self, target: str) -> Any:
        if target in self._constants:
            return self._constants[target].to("meta")
        return super().fetch_attr(target)

    def inseparable(self) -> Iterator[tuple[int, int]]:
        """Yields the ranges that must stay in one stage. A value that a node made may go to another stage after its
        last change; a given value (input, parameter, buffer) stays with all of its uses."""
        for storage, changes in self._changes.items():
            uses = self._uses[storage]
            yield min(uses), max(uses) if storage in self._given else max(changes)

    def sharing_changed(self) -> frozenset[fx.Node]:
        return frozenset(node for node, storages in self._storages.items() if storages & self._changes.keys())


def _storage(tensor: torch.Tensor) -> int:
    local = getattr(tensor, "_local_tensor", tensor)  # a DTensor's own storage is not where its values are
    return int(local.untyped_storage()._cdata)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for element in value:
            yield from _tensors(element)
    elif isinstance(value, dict):
        for element in value.values():
            yield from _tensors(element)


# --- the pass --------------------------------------------------------------------------------------------------------

_LIGHT = frozenset(
    """getattr getitem size sym_size dim shape numel to type float double half bfloat16 long int bool _to_copy type_as
    view view_as reshape flatten unsqueeze squeeze expand expand_as transpose permute contiguous slice select index
    alias arange ones zeros full ones_like zeros_like full_like new_ones new_zeros new_full tril triu eq ne lt le gt ge
    add sub rsub mul neg floordiv mod truediv logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not
    and_ or_ invert __and__ __or__ where masked_fill cumsum sum any all""".split()  # noqa: SIM905
)
_ATTRIBUTES = frozenset(["getattr", "size", "sym_size", "dim", "numel", "getitem"])


def operation(node: fx.Node) -> str:
    """The bare name of the operation that a node does, however it is called."""
    if isinstance(node.target, str):
        return node.target
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.rpartition("::")[2]
    return str(getattr(node.target, "__name__", ""))


class RecordedPass:
    """One recording of a forward pass, with the facts that a cut needs."""

    def __init__(self, recording: Recording, facts: Facts, modes: Mapping[str, bool]) -> None:
        self.recording = recording
        self.facts = facts
        self.modes = modes
        """Which modules were in training mode: a model may keep some in evaluation mode."""
        self.nodes = list(recording.graph.nodes)
        self.place = {node: place for place, node in enumerate(self.nodes)}
        self.last_use = {node: max((self.place[user] for user in node.users), default=-1) for node in self.nodes}
        self.from_inputs: set[fx.Node] = set()
        for node in self.nodes:
            if node.op in ("placeholder", "get_attr"):
                known = node.op == "placeholder" and node not in facts.changed
            else:
                light = node.op in ("call_function", "call_method") and operation(node) in _LIGHT
                known = light and node not in facts.changed and self.from_inputs.issuperset(node.all_input_nodes)
            if known:
                self.from_inputs.add(node)

    def relabelled(self, calls: tuple[Call, ...]) -> RecordedPass:
        other = copy.copy(self)
        other.recording = dataclasses.replace(self.recording, calls=calls)
        return other

    def targets(self, first: int, end: int) -> set[str]:
        """Modules, parameters and buffers that the nodes [first, end) use."""
        body = [node for node in self.nodes[first:end] if node.op not in ("placeholder", "get_attr", "output")]
        found = {str(node.target) for node in body if node.op == "call_module"}
        return found | {str(one.target) for node in body for one in node.all_input_nodes if one.op == "get_attr"}

    def crossing(self, place: int) -> list[fx.Node]:
        """The nodes whose values must be sent if the pass is cut before the node at `place`."""
        used = [node for node in self.nodes[:place] if self.last_use[node] >= place and node.op != "get_attr"]
        needed = [node for node in used if node not in self.from_inputs]
        values = {node for node in needed if not self.is_attribute(node)}
        return [node for node in needed if not self._told_by(node, values)]

    def _told_by(self, node: fx.Node, values: set[fx.Node]) -> bool:
        return self.is_attribute(node) and all(
            one in values or one in self.from_inputs or self._told_by(one, values) for one in node.all_input_nodes
        )

    def is_attribute(self, node: fx.Node) -> bool:
        """Whether a node gives a size, a device or a type, which the next stage can read from the value itself."""
        value = self.facts.values.get(node)
        return operation(node) in _ATTRIBUTES and not any(
            isinstance(v, torch.Tensor) for v in pytree.tree_leaves(value)
        )
