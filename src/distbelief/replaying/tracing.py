"""Follows one forward and backward pass through a model, and finds the layer whose values are the first that are not
finite.

Hooks on every module see its inputs and outputs. They also assign the nodes of the autograd graph to modules: new nodes
behind a module's output were made in that module. So the backward pass can be reported by layer, too: hooks on the
nodes see the inputs and outputs of each operation. The hooks change no value.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.autograd.graph import Node

from distbelief.replaying.findings import LOSS, MODEL, Finding, bad_samples, not_finite

_LEAF = "torch::autograd::AccumulateGrad"


@dataclass(frozen=True)
class _Call:
    """A module's call in progress."""

    layer: str
    given_finite: bool
    origins_before: int


class Trace:
    """A context manager around the two passes of one shard.

    >>> net = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LogSoftmax(1))
    >>> with torch.no_grad():
    ...     _ = net[0].weight.fill_(float("inf"))
    >>> with Trace(net, shard=3, indices=[8, 9]) as trace:
    ...     _ = net(torch.ones(2, 2))
    >>> [(one.layer, one.count, one.origin, one.samples) for one in trace.outputs]
    [('0', Count(nan=0, infinite=4), True, (8, 9)), ('1', Count(nan=4, infinite=0), False, (8, 9)), \
('(model)', Count(nan=4, infinite=0), False, (8, 9))]
    """

    def __init__(self, model: torch.nn.Module, shard: int, indices: Sequence[int]) -> None:
        self.outputs: list[Finding] = []
        """Modules whose output was not finite, in the order in which their calls ended: inner before outer."""
        self.gradient: Finding | None = None
        """The first operation of the backward pass with finite inputs and an output that is not finite."""
        self._model = model
        self._shard = shard
        self._indices = indices
        self._under_way: list[_Call] = []
        self._origins = 0
        self._owners: dict[Node, str] = {}
        self._seen: set[str] = set()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def __enter__(self) -> Trace:
        for name, module in self._model.named_modules():
            before, after = partial(self._enter, name or MODEL), partial(self._leave, name or MODEL)
            self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(after, with_kwargs=True))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        # breaks a reference cycle that the garbage collector cannot see: the nodes' hooks refer to this object
        self._owners.clear()

    @property
    def inside(self) -> str:
        """The innermost module whose call is in progress; empty outside of the model."""
        return self._under_way[-1].layer if self._under_way else ""

    def watch_backward(self, loss: torch.Tensor) -> None:
        """Install the hooks on the graph; call it between the two passes."""
        self._claim(LOSS, loss)
        for node, layer in self._owners.items():
            if node.name() != _LEAF:
                self._handles.append(node.register_hook(partial(self._passed, layer, node.name())))

    def _enter(self, name: str, module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if self._under_way:  # the calling module has made the graph up to here
            self._claim(self.inside, (args, kwargs))
        self._under_way.append(_Call(name, not not_finite((args, kwargs)), self._origins))

    def _leave(self, name: str, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self._under_way.pop()
        self._claim(name, output)
        count = not_finite(output)
        if not count:
            return
        # otherwise the value comes from outside, or from an inner module
        origin = call.given_finite and call.origins_before == self._origins
        self._origins += origin
        if name not in self._seen:
            self._seen.add(name)
            samples = bad_samples(output, self._indices)
            self.outputs.append(Finding("output", name, "", self._shard, count, origin, samples))

    def _claim(self, name: str, value: Any) -> None:
        """Assign all unassigned nodes behind these tensors to `name`."""
        leaves = torch.utils._pytree.tree_leaves(value)
        ahead = [leaf.grad_fn for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None]
        while ahead:
            node = ahead.pop()
            if node not in self._owners:
                self._owners[node] = name
                ahead += [before for before, _ in node.next_functions if before is not None]

    def _passed(self, layer: str, operation: str, gave: Any, given: Any) -> None:
        """A node has run: `given` are the gradients of its outputs, `gave` those of its inputs."""
        if self.gradient is None and not not_finite(given) and (count := not_finite(gave)):
            self.gradient = Finding("gradient", layer, operation, self._shard, count, origin=True)
