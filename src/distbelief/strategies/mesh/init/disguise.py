"""Recorded tensors are on meta, and code that asks them must not see it: it would do other things than in one process.

This is above autograd, where a tensor is asked for its device, its values or its memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from distbelief.strategies.mesh.init.history import cannot_follow
from distbelief.strategies.mesh.init.recording import Recorder


class Disguise(TorchFunctionMode):
    """Recorded tensors answer as the CPU tensors that they stand for: torch.nn.init skips what is on meta."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        tensor: Any = torch.Tensor
        self._answers: dict[Any, Callable[..., Any]] = {
            tensor.device.__get__: lambda *_: torch.device("cpu"),
            tensor.is_meta.__get__: lambda *_: False,
            tensor.is_cpu.__get__: lambda *_: True,
            tensor.get_device: lambda *_: -1,
            tensor.cpu: lambda func, args, kwargs: args[0],
            tensor.share_memory_: lambda func, args, kwargs: args[0],
            tensor.pin_memory: lambda func, args, kwargs: args[0],
            tensor.to: self._to,
            tensor.tolist: self._read,
            tensor.numpy: self._read,
            tensor.__array__: self._read,
            tensor.__dlpack__: self._read,
            tensor.__format__: self._read,
            tensor.__repr__: self._read,
            tensor.new_tensor: self._new_tensor,
            tensor.data_ptr: self._memory,
            tensor.untyped_storage: self._memory,
            tensor.data.__set__: self._set_data,
        }

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs, outer = dict(kwargs or {}), self._recorder.meta_wished
        answer = self._answers.get(func)
        if answer is not None and self._recorder.knows(args[0]):
            return answer(func, args, kwargs)
        self._recorder.meta_wished = any(map(self._wishes_meta, tree_leaves((args, kwargs))))
        try:
            return func(*args, **kwargs)
        finally:
            self._recorder.meta_wished = outer

    def _wishes_meta(self, leaf: Any) -> bool:
        if isinstance(leaf, torch.Tensor):
            return leaf.is_meta and not self._recorder.knows(leaf)
        return isinstance(leaf, torch.device | str) and str(leaf) == "meta"

    def _to(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        args, kwargs = tree_map(_stay, (args, kwargs))
        return func(*args, **kwargs)

    def _read(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _disable_current_modes():
            content = func(self._recorder.value(args[0]), *args[1:], **kwargs)
        if isinstance(content, np.ndarray):
            content.flags.writeable = False  # what is written there would not reach the tensor
        return content

    def _new_tensor(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **{"device": torch.device("cpu"), **kwargs})

    def _memory(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise cannot_follow(f"{func.__name__}(), or a copy by pickle")

    def _set_data(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with _disable_current_modes():
            target, value = args[0].is_meta, self._recorder.on_meta(args[1])
        if not target:
            raise cannot_follow("`.data = …` of a tensor that was made outside of it")
        return func(args[0], value)


def _stay(leaf: Any) -> Any:
    if isinstance(leaf, torch.device | str) and torch.device(leaf).type == "cpu":
        return torch.device("meta")
    return leaf
