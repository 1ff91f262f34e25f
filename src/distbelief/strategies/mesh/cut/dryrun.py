"""Dry runs: run a module of a model that is on meta for a moment, with placeholder tensors, and leave the model
unchanged.

`restoring` undoes what the model's own code changes in its attributes during a dry run; otherwise a module that makes a
table in its first pass would keep a table without values. `placeholder_weights` have the right shapes and random
values. Of layers that tensor parallelism divides they have this member's part, without communication. Where a module
does not run that way (a divided vocabulary is complete only with communication), they have the whole layer.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils import _pytree as pytree

# --- a model stays unchanged -----------------------------------------------------------------------------------------

_CONTAINERS = (dict, OrderedDict, list, set)


@contextmanager
def restoring(model: torch.nn.Module) -> Iterator[None]:
    """On exit every module has its former attributes again, and lists and dicts among them have their former contents.

    >>> model = torch.nn.Linear(2, 1)
    >>> with restoring(model):
    ...     model.table = torch.zeros(3)
    >>> hasattr(model, "table")
    False
    """
    attributes = [(vars(module), dict(vars(module))) for module in model.modules()]
    contents = [
        (value, value.copy()) for _, before in attributes for value in before.values() if type(value) in _CONTAINERS
    ]
    try:
        yield
    finally:
        for present, before in attributes:
            for name in present.keys() - before.keys():
                del present[name]
            present.update(before)
        for container, content in contents:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(content)


@contextmanager
def in_mode(model: torch.nn.Module, training: bool) -> Iterator[None]:
    """The model in training or evaluation mode inside the block; on exit every module is as before."""
    with restoring(model):
        model.train(training)
        yield


# --- placeholders ----------------------------------------------------------------------------------------------------

_HOST = torch.device("cpu")


@contextmanager
def with_placeholders(module: torch.nn.Module, device: torch.device) -> Iterator[None]:
    """Inside the block, tensors on meta that modules keep as plain attributes have placeholder values, and divided
    layers do not communicate."""
    made: dict[int, torch.Tensor] = {}
    with restoring(module):
        for one in module.modules():
            if any(isinstance(parameter, DTensor) for parameter in one.parameters()):
                one._forward_hooks, one._forward_pre_hooks = type(one._forward_hooks)(), type(one._forward_pre_hooks)()
            for name, value in list(vars(one).items()):
                if isinstance(value, torch.Tensor) and value.is_meta:
                    vars(one)[name] = made.setdefault(id(value), _ordinary(value, device))
        yield


def placeholder_weights(
    module: torch.nn.Module, device: torch.device, works: Callable[[dict[str, torch.Tensor]], object]
) -> dict[str, torch.Tensor]:
    """Random weights that keep values at an ordinary size: tiny or infinite numbers would take extra time.

    `works` is called if it is uncertain whether the module runs with this member's part of divided layers.
    """
    weights = _placeholder_weights(module, device, local=True)
    if any(isinstance(parameter, DTensor) for parameter in module.parameters()):
        try:
            works(weights)
        except (RuntimeError, IndexError):
            weights = _placeholder_weights(module, device, local=False)
    return weights


def call(module: torch.nn.Module, weights: Mapping[str, torch.Tensor], args: Any, kwargs: Any) -> Any:
    return torch.func.functional_call(module, dict(weights), args, kwargs, tie_weights=True)


def run_on_placeholders(module: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Run a module that is on meta with real placeholder values, because its code looks at values; the result is on
    meta again.

    Afterwards tensors on meta share memory, and count as changed in place, exactly as the real tensors do. The module's
    buffers count as changed in any case: with other values the module might take a branch that changes them.
    """
    with with_placeholders(module, _HOST), torch.device(_HOST):
        weights = placeholder_weights(
            module, _HOST, lambda tried: call(module, tried, *_MetaPairs().real((args, kwargs)))
        )
        pairs = _MetaPairs()
        for name, tensor in (*module.named_parameters(), *module.named_buffers()):
            pairs.pair(tensor, weights[name])
        output = call(module, weights, *pairs.real((args, kwargs)))
    for buffer in module.buffers():
        torch.autograd.graph.increment_version(buffer)
    return pairs.on_meta(output)


def _placeholder_weights(module: torch.nn.Module, device: torch.device, local: bool) -> dict[str, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    made: dict[str, torch.Tensor] = {}
    for name, parameter in module.named_parameters():
        shape = parameter._local_tensor.shape if local and isinstance(parameter, DTensor) else parameter.shape
        value = torch.ones(shape, dtype=parameter.dtype, device=device)
        if parameter.ndim > 1 and value.is_floating_point():
            value.normal_(0.0, 1.0 / math.sqrt(max(1, value[0].numel())), generator=generator)
        made[name] = value.requires_grad_(parameter.requires_grad)
    made.update({name: _ordinary(buffer, device) for name, buffer in module.named_buffers()})
    return made


def _ordinary(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    ones = (
        tensor.is_floating_point() or tensor.dtype is torch.bool
    )  # integers are indices as a rule, and 0 is a valid index
    return torch.full(tensor.shape, int(ones), dtype=tensor.dtype, device=device)


class _MetaPairs:
    """Pairs of real tensors and tensors on meta, made in both directions. Tensors that share memory on one side do so
    on the other."""

    def __init__(self) -> None:
        self._pairs: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._real: dict[int, torch.UntypedStorage] = {}  # storage on meta -> the real one
        self._meta: dict[int, torch.UntypedStorage] = {}
        self._generator = torch.Generator().manual_seed(1)

    def pair(self, tensor: torch.Tensor, real: torch.Tensor) -> None:
        local = getattr(tensor, "_local_tensor", tensor)  # a DTensor's own storage is not where its values are
        if local.untyped_storage().nbytes() == real.untyped_storage().nbytes():
            self._meta[real.untyped_storage()._cdata] = local.untyped_storage()
        self._pairs.append((tensor, real, real._version))

    def real(self, value: Any) -> Any:
        return pytree.tree_map_only(torch.Tensor, self._made_real, value)

    def on_meta(self, value: Any) -> Any:
        """The same value with tensors on meta. Call it after the module has run."""
        for tensor, real, version in self._pairs:
            if real._version != version:
                torch.autograd.graph.increment_version(tensor)
        return pytree.tree_map_only(torch.Tensor, self._made_meta, value)

    def _made_real(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_meta:
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata not in self._real:
            flat = torch.zeros(storage.nbytes() // tensor.itemsize, dtype=tensor.dtype, device=_HOST)
            if flat.is_floating_point() or flat.is_complex():
                flat.normal_(generator=self._generator)
            self._real[storage._cdata] = flat.untyped_storage()
        real = _over(self._real[storage._cdata], tensor, _HOST)
        self.pair(tensor, real)
        return real

    def _made_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._meta:
            fresh = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
            self._meta[storage._cdata] = fresh.untyped_storage()
            self._pairs.append((fresh, tensor, tensor._version))  # keeps the tensor, so that its address stays unique
        return _over(self._meta[storage._cdata], tensor, torch.device("meta"))


def _over(storage: torch.UntypedStorage, like: torch.Tensor, device: torch.device) -> torch.Tensor:
    empty = torch.empty(0, dtype=like.dtype, device=device)
    return empty.set_(storage, like.storage_offset(), like.size(), like.stride())
