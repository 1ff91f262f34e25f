"""One recorded forward pass with all that a cut needs to know of it: what would have to be sent where."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping

import torch
from torch import fx
from torch.utils import _pytree as pytree

from distbelief.strategies.mesh.cut.tracing import Call, Recording
from distbelief.strategies.mesh.cut.values import Facts

_LIGHT = frozenset(
    """getattr getitem size sym_size dim shape numel to type float double half bfloat16 long int bool _to_copy type_as
    view view_as reshape flatten unsqueeze squeeze expand expand_as transpose permute contiguous slice select index
    alias arange ones zeros full ones_like zeros_like full_like new_ones new_zeros new_full tril triu eq ne lt le gt ge
    add sub rsub mul neg floordiv mod truediv logical_and logical_or logical_not bitwise_and bitwise_or bitwise_not
    and_ or_ invert __and__ __or__ where masked_fill cumsum sum any all""".split()  # noqa: SIM905
)
_ATTRIBUTES = frozenset(["getattr", "size", "sym_size", "dim", "numel", "getitem"])


def operation(node: fx.Node) -> str:
    """The bare name of what a node does, however it is called."""
    if isinstance(node.target, str):
        return node.target
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.rpartition("::")[2]
    return str(getattr(node.target, "__name__", ""))


class Film:
    """One recording with all that a cut needs to know of it."""

    def __init__(self, recording: Recording, facts: Facts, modes: Mapping[str, bool]) -> None:
        self.recording = recording
        self.facts = facts
        self.modes = modes
        """Which modules were in training mode: a model may see to it that some never are."""
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

    def relabelled(self, calls: tuple[Call, ...]) -> Film:
        other = copy.copy(self)
        other.recording = dataclasses.replace(self.recording, calls=calls)
        return other

    def targets(self, first: int, end: int) -> set[str]:
        """Modules, parameters and buffers that the nodes [first, end) use."""
        body = [node for node in self.nodes[first:end] if node.op not in ("placeholder", "get_attr", "output")]
        found = {str(node.target) for node in body if node.op == "call_module"}
        return found | {str(one.target) for node in body for one in node.all_input_nodes if one.op == "get_attr"}

    def crossing(self, place: int) -> list[fx.Node]:
        """What must be sent where the pass is cut before the node at `place`."""
        used = [node for node in self.nodes[:place] if self.last_use[node] >= place and node.op != "get_attr"]
        needed = [node for node in used if node not in self.from_inputs]
        values = {node for node in needed if not self.is_attribute(node)}
        return [node for node in needed if not self._told_by(node, values)]

    def _told_by(self, node: fx.Node, values: set[fx.Node]) -> bool:
        return self.is_attribute(node) and all(
            one in values or one in self.from_inputs or self._told_by(one, values) for one in node.all_input_nodes
        )

    def is_attribute(self, node: fx.Node) -> bool:
        """A size, a device, a type: told by the value itself, wherever that is. Never a tensor."""
        value = self.facts.values.get(node)
        return operation(node) in _ATTRIBUTES and not any(
            isinstance(v, torch.Tensor) for v in pytree.tree_leaves(value)
        )
