"""Deferred initialisation: the model is made on the meta device, and a worker computes the initial values of its own
part only. No worker ever has the whole model in memory, and the values are the same bits as in one process.

The function that makes the model runs once, on meta, while every tensor operation in it is recorded (`recording.py`).
The values of a few parameters are then computed by executing the recorded operations that they depend on
(`operationlog.py`). Random numbers of other parameters are drawn too and dropped at once, so that the random generator
goes through the same states as in one process. Tensors that the function did not make itself (a ready-made model,
weights read from a file) are kept.
"""

from __future__ import annotations

import contextlib
import copy
import random
import re
import traceback
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch

from distbelief.data.sources import seed_everything
from distbelief.errors import JobError
from distbelief.strategies.mesh.init.operationlog import OperationLog, StorageView, cannot_follow
from distbelief.strategies.mesh.init.recording import CpuFacade, Recorder


class DeferredModel:
    """A model on the meta device whose initial values can be computed tensor by tensor.

    `model` is in train mode and otherwise as its constructor left it. Callers may change it: names stay valid.

    >>> deferred = make_deferred(lambda: torch.nn.Linear(2, 1), seed=0)
    >>> deferred.model.weight.device.type
    'meta'
    >>> [name for name, value in deferred.values(["bias"])]
    ['bias']
    """

    def __init__(
        self,
        model: torch.nn.Module,
        log: OperationLog,
        views: dict[str, StorageView],
        plain_attributes: Collection[str],
    ) -> None:
        self.model = model
        self.plain_attributes = tuple(plain_attributes)
        """Names of tensors that modules keep as plain attributes, neither parameters nor buffers. `values` takes these
        names too."""
        self._log = log
        self._views = views

    def values(self, wanted: Collection[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yields initial values on the CPU, the same bits as in one process, each as soon as it is final.

        The yielded tensors belong to the caller. Tensors that share memory in the model (tied under two names) share it
        here too.
        """
        names: dict[int, list[str]] = {}
        for name in wanted:
            names.setdefault(self._views[name].storage, []).append(name)
        for number, storage in self._log.replay(names.keys()):
            for name in names[number]:
                tensor = self._views[name].of(storage)
                yield name, tensor.clone() if tensor.nbytes < storage.nbytes() else tensor


def make_deferred(make: Callable[[], torch.nn.Module], seed: int) -> DeferredModel:
    """Make the model on meta under `seed`. The caller's random generators keep their states."""
    recorder = Recorder()
    with _generators_kept():
        seed_everything(seed)
        try:
            with _explained(), recorder, CpuFacade(recorder):
                model = make()
        finally:
            recorder.generators.restore()
    if not isinstance(model, torch.nn.Module):
        raise JobError(f"`model` made a {type(model).__name__}, not a torch.nn.Module")
    tensors = dict(_tensors(model))
    views = {name: _view(recorder, name, tensor) for name, tensor in tensors.items()}
    plain = dict(_plain_attributes(model))
    plain_views = {name: recorder.view(tensor) for name, tensor in plain.items()}
    views.update({name: view for name, view in plain_views.items() if view is not None})
    if any(not tensor.is_meta for tensor in (tensors | plain).values()):
        model = _on_meta(model, recorder, [*tensors.values(), *plain.values()])
    return DeferredModel(model.train(), recorder.log, views, [name for name in plain if name in views])


def _tensors(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers under all of their names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _plain_attributes(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules(remove_duplicate=False):
        for key, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{prefix}.{key}" if prefix else key, value


def _view(recorder: Recorder, name: str, tensor: torch.Tensor) -> StorageView:
    if torch.nn.parameter.is_lazy(tensor):
        raise JobError(
            f"'{name}' has no shape before the model's first batch (a lazy module)",
            hint="give the layer its input size, for instance torch.nn.Linear(64, 10) instead of LazyLinear(10)",
        )
    view = recorder.view(tensor)
    if view is None:
        raise JobError(
            f"'{name}' was left on the meta device, without values, by the function that makes the model",
            hint="make the model without `torch.device('meta')`: DistBelief itself avoids the memory of the whole",
        )
    return view


def _on_meta(model: torch.nn.Module, recorder: Recorder, tensors: Collection[torch.Tensor]) -> torch.nn.Module:
    """A copy of the model whose tensors are on meta. The model with the real tensors may belong to the user."""
    on_meta: dict[int, Any] = {id(tensor): _meta_tensor(recorder, tensor) for tensor in tensors}
    return copy.deepcopy(model, on_meta)


def _meta_tensor(recorder: Recorder, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    on_meta = recorder.on_meta(tensor.detach())
    if isinstance(tensor, torch.nn.Parameter):
        on_meta = torch.nn.Parameter(on_meta, tensor.requires_grad)
    on_meta.__dict__.update(tensor.__dict__)
    return on_meta


@contextlib.contextmanager
def _generators_kept() -> Iterator[None]:
    state, cuda = torch.default_generator.get_state(), None
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        cuda = torch.cuda.get_rng_state_all()
    arrays, numbers = np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.default_generator.set_state(state)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)
        np.random.set_state(arrays)
        random.setstate(numbers)


@contextlib.contextmanager
def _explained() -> Iterator[None]:
    """Replaces torch's errors about meta tensors: users who never used the meta device could not understand them."""
    try:
        yield
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        if not re.search(r"\bmeta\b|\bMeta|read-only|unallocated|RNG state", str(error)):
            raise
        explained = cannot_follow(str(error).splitlines()[0])
        explained.details = traceback.format_exc()
        raise explained from error
