"""What the values of a recorded forward pass are: which are tensors, how large, which share memory, what changes them.

Found by running the graph once on the meta device: no memory, no arithmetic, but every tensor's storage has an
identity there and every in-place operation counts up a version. So nothing has to be guessed from names. A module that
looks at values cannot be run so; where that is allowed, it is run alone on throw-away ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from distbelief.strategies.mesh.cut.standins import run_alone
from distbelief.strategies.mesh.cut.tracing import Recording


@dataclass(frozen=True)
class Part:
    """One tensor or int inside a value; `path` says where: () for the value itself, (0,) for the first of a tuple."""

    path: tuple[int | str, ...]
    size_bytes: int


class Unsendable(Exception):
    """A value with something in it that is neither a tensor nor an int; the text says what."""


@dataclass(frozen=True)
class Facts:
    values: dict[fx.Node, Any]
    """On meta."""
    tied: tuple[tuple[int, int], ...]
    """(first, last) positions of nodes that must be in one stage, because they change and use the same memory."""
    changed: frozenset[fx.Node]
    """Nodes whose value shares memory with something that is changed in place."""


def parts(value: Any, path: tuple[int | str, ...] = ()) -> Iterator[Part]:
    """The tensors and ints of a value; what is fixed (None, a text) is not sent."""
    if isinstance(value, torch.Tensor):
        yield Part(path, value.numel() * value.element_size())
    elif isinstance(value, int):
        yield Part(path, 0)
    elif type(value) in (tuple, list, torch.Size):
        for index, element in enumerate(value):
            yield from parts(element, (*path, index))
    elif type(value) is dict and all(isinstance(key, str) for key in value):
        for key, element in value.items():
            yield from parts(element, (*path, key))
    elif value is not None and not isinstance(value, str):
        raise Unsendable(f"a {type(value).__name__}")


def rebuilt(value: Any, received: Iterator[Any]) -> Any:
    """The same structure as `value`, with what was received for its parts (in the order of `parts`)."""
    if isinstance(value, torch.Tensor | int):
        return next(received)
    if type(value) in (tuple, torch.Size):
        return tuple(rebuilt(element, received) for element in value)
    if type(value) is list:
        return [rebuilt(element, received) for element in value]
    if type(value) is dict:
        return {key: rebuilt(element, received) for key, element in value.items()}
    return value


def observe(model: torch.nn.Module, recording: Recording, leaves: Sequence[Any], may_look: bool = False) -> Facts:
    """`leaves`: the model's flat example inputs, on meta like the model. `may_look`: modules may look at values."""
    watcher = _Watcher(model, recording, may_look)
    state = torch.get_rng_state()
    try:
        with torch.no_grad(), torch.device("meta"):
            watcher.run(*(leaves[recording.inputs[node]] for node in recording.inputs))
    finally:
        torch.set_rng_state(state)
    return Facts(watcher.env, tuple(watcher.tied()), watcher.sharing_changed())


class _Watcher(fx.Interpreter):
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
        except Exception:  # whatever the module's own code raises where there are no values
            if not self._may_look:
                raise
            return run_alone(self.fetch_attr(target), args, kwargs)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        args = super().fetch_args_kwargs_from_env(n)
        if self._device is None:
            return args
        return fx.node.map_aggregate(args, lambda leaf: torch.device("meta") if leaf == self._device else leaf)

    def fetch_attr(self, target: str) -> Any:
        if target in self._constants:
            return self._constants[target].to("meta")
        return super().fetch_attr(target)

    def tied(self) -> Iterator[tuple[int, int]]:
        """What a node made may go to another stage once nothing changes it; what was given stays with its uses."""
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
