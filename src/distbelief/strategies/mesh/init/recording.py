"""Records every tensor operation of some code without doing it: the operation runs on meta and is added to an operation
log. Three parts work together:

`Recorder` sees the operations below autograd, where all of them pass. If the code needs a value (`item`, a shape that
depends on data), it executes what is recorded so far. A real tensor that the code brings along is represented by a
tensor on meta.

`CpuFacade` works above autograd. Recorded tensors are on meta, and code that asks for the device, the values or the
memory of a tensor must not notice that, or it would do other things than in one process.

`GeneratorStates` tells which state a random generator is in, though nothing is drawn from it. After each random
operation the generator gets a marked state that occurs nowhere else. The state found before the next random operation
tells what happened in between: nothing, a new seed, or the return to a saved state. No function of torch is replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_map_only, tree_unflatten

from distbelief.strategies.mesh.init.operationlog import (
    GENERATOR,
    OperationLog,
    Output,
    RecordedOperation,
    StorageView,
    cannot_follow,
    new_storage,
)

# --- random generators -----------------------------------------------------------------------------------------------


class GeneratorStates:
    """Tells which numbered state each random generator is in, though nothing is drawn from it."""

    def __init__(self, log: OperationLog) -> None:
        self._log = log
        self._marks: dict[bytes, int] = {}
        self._count = 0
        self._found: dict[int, tuple[torch.Generator, torch.Tensor]] = {}

    def find(self, generator: torch.Generator) -> int:
        if generator.device.type != "cpu":
            raise cannot_follow(f"a generator on {generator.device}")
        state = generator.get_state()
        self._found.setdefault(_address(generator), (generator, state))
        content = state.numpy().tobytes()
        if content not in self._marks:
            seeded = torch.Generator().manual_seed(generator.initial_seed()).get_state()
            if _address(generator) == _address(torch.default_generator) and not torch.equal(state, seeded):
                raise cannot_follow("random numbers drawn in another thread, or a state of the generator from outside")
            self._marks[content] = self._log.begin_state(state)
        return self._marks[content]

    def mark(self, generator: torch.Generator, number: int) -> None:
        """Put the generator, under its own seed, into a state that no other mark has: `_count` draws further."""
        self._count += 1
        generator.manual_seed(generator.initial_seed())
        torch.empty(self._count, device="cpu").random_(generator=generator)
        self._marks[generator.get_state().numpy().tobytes()] = number

    def restore(self) -> None:
        for generator, state in self._found.values():
            generator.set_state(state)


def _address(generator: torch.Generator) -> int:
    """The identity of the generator: Python makes a new object for the same generator in every call."""
    return int(generator._cdata)  # type: ignore[attr-defined]


# --- operations ------------------------------------------------------------------------------------------------------

_aten = torch.ops.aten
_SHAPE_ONLY = {
    *(_aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like),
    *(_aten.rand_like, _aten.randn_like, _aten.randint_like),
    *(_aten.new_empty, _aten.new_empty_strided, _aten.new_zeros, _aten.new_ones, _aten.new_full),
}
"""Operations that need the shape of their first argument, not its values."""
_FILLS = {
    *(_aten.normal_.default, _aten.uniform_.default, _aten.bernoulli_.float, _aten.exponential_.default),
    *(_aten.random_.default, _aten.random_.to, getattr(_aten.random_, "from")),
    *(_aten.geometric_.default, _aten.log_normal_.default, _aten.cauchy_.default),
}
_OTHER_LAYOUT = {_aten._linalg_svd}
"""Operations whose results on meta have other strides than real results: executing them finds the shape."""
_UNDECLARED = {_aten.native_batch_norm.default: ("running_mean", "running_var")}
"""Arguments that an operation writes to, though its schema does not say so."""
_NO_DATA = "Cannot copy out of meta tensor; no data!"  # torch's own words, which torch.nn.Module.to looks for


class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Appends every tensor operation that runs inside its `with` block to `log`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.log = OperationLog()
        self._numbers: dict[int, tuple[int, torch.UntypedStorage]] = {}  # by address, which stays unique while kept
        self._meta_storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.generators = GeneratorStates(self.log)
        self.meta_requested = False
        """Whether the present call in the user's code asks for the meta device itself, so for tensors without
        values."""

    def view(self, tensor: torch.Tensor) -> StorageView | None:
        """The place of this tensor in the log; None if the user's code itself put the tensor on meta."""
        known = self._numbers.get(self.on_meta(tensor).untyped_storage()._cdata)
        return None if known is None else StorageView.at(known[0], tensor)

    def on_meta(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor itself if it is on meta; else a tensor on meta that stands for it. The log keeps the present
        values."""
        _expect_plain(tensor)
        if tensor.is_meta:
            return tensor
        return StorageView.at(0, tensor).of(self._meta_storage(tensor.untyped_storage()))

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the log has the tensor: recorded code made it or used it."""
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()._cdata
        return storage in self._numbers or storage in self._meta_storages

    def value(self, tensor: torch.Tensor) -> torch.Tensor:
        """A real copy of what the tensor holds at this point."""
        view = self.view(tensor)
        if view is None:
            raise NotImplementedError(_NO_DATA)
        copied: torch.Tensor = self.log.attempt(self._operation(_aten.clone.default, (view,), {}))
        return copied

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """The default would make torch import its whole compiler (measured: 2.5 s of every worker's start)."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return self._follow(func, args, dict(kwargs or {}))

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if _moves_only(func) and isinstance(args[0], torch.Tensor) and not args[0].is_meta:
            return self._move_real(func, args, kwargs)
        leaves, spec = tree_flatten((args, kwargs))
        metas = [self._meta_leaf(leaf) for leaf in leaves]
        views = [self._view_leaf(leaf, meta) for leaf, meta in zip(leaves, metas, strict=True)]
        on_meta, on_meta_kwargs = tree_unflatten(metas, spec)
        if _moves_only(func):
            return func(*on_meta, **on_meta_kwargs)
        device = self._device(func, kwargs)
        placeless = _placeless(views)
        if func.overloadpacket in _SHAPE_ONLY:
            placeless, views[0] = _placeless(views[1:]), metas[0].detach()
            if device is None and self.view(metas[0]) is None:
                device = "meta"
        place_args, place_kwargs = tree_unflatten(views, spec)
        written = tree_leaves(_written_arguments(func, place_args, place_kwargs))
        writes = frozenset(view.storage for view in written if isinstance(view, StorageView))
        if placeless and (writes or device == "cpu"):
            raise NotImplementedError(_NO_DATA)
        if _takes(func, "device"):
            pinned = {"pin_memory": False} if _takes(func, "pin_memory") else {}
            on_meta_kwargs = {**on_meta_kwargs, "device": torch.device("meta"), **pinned}
            place_kwargs = {**place_kwargs, "device": torch.device("cpu"), **pinned}
        if placeless or device == "meta":
            return func(*on_meta, **on_meta_kwargs)
        operation = self._operation(func, place_args, place_kwargs, writes)
        return self._record(operation, on_meta, on_meta_kwargs, next(filter(_is_generator, leaves), None))

    def _record(
        self,
        operation: RecordedOperation,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        generator: torch.Generator | None,
    ) -> Any:
        """Find the shapes of the results; append the operation if it draws random numbers, makes a tensor or writes
        one."""
        if torch.Tag.nondeterministic_seeded in operation.func.tags:
            generator = generator or torch.default_generator
            operation = replace(operation, before=self.generators.find(generator), after=self.log.number())
        results = self._results(operation, args, kwargs)
        outputs = self._outputs(tree_leaves(results))
        if outputs or operation.writes or operation.before is not None:
            self.log.append(replace(operation, outputs=outputs))
        if generator is not None and operation.after is not None:
            self.generators.mark(generator, operation.after)
        return results

    def _results(self, operation: RecordedOperation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The results on meta. If the shape depends on values, the operation is executed for real."""
        if operation.func.overloadpacket not in _OTHER_LAYOUT and _gives_tensors(operation.func):
            try:
                return operation.func(*args, **kwargs)
            except Exception:  # no kernel for meta; or a mistake in the user's code, which the attempt then raises
                pass
        given = self.log.attempt(operation)
        own = _written_arguments(operation.func, args, kwargs)
        if own and operation.func._schema.returns and operation.func._schema.returns[0].alias_info is not None:
            return own[0] if isinstance(given, torch.Tensor) else own
        return tree_map_only(torch.Tensor, _empty_on_meta, given)

    def _outputs(self, results: list[Any]) -> tuple[Output, ...]:
        outputs, created = [], set()
        for position, result in enumerate(results):
            if isinstance(result, torch.Tensor):
                _expect_plain(result)
                storage = result.untyped_storage()
                if storage._cdata not in self._numbers:
                    created.add(storage._cdata)
                    self._numbers[storage._cdata] = (self.log.number(), storage)
                if storage._cdata in created:
                    view = StorageView.at(self._numbers[storage._cdata][0], result)
                    outputs.append(Output(position, view, storage.nbytes()))
        return tuple(outputs)

    def _operation(self, func: Any, args: Any, kwargs: Any, writes: frozenset[int] = frozenset()) -> RecordedOperation:
        return RecordedOperation(func, args, kwargs, torch.get_default_dtype(), writes, fills=func in _FILLS)

    def _device(self, func: Any, kwargs: Mapping[str, Any]) -> str | None:
        """The device where the user's code wants the result. torch's own code asks for meta because our tensors are
        there."""
        device = kwargs.get("device")
        if device is None:
            return None
        if device.type not in ("cpu", "meta"):
            raise cannot_follow(f"{func} on {device}")
        return "meta" if device.type == "meta" and self.meta_requested else "cpu"

    def _move_real(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do an operation that changes a real tensor's shape or storage, but no values."""
        if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in args):
            raise cannot_follow(f"{func} on a tensor that was made outside of it")
        return func(*args, **kwargs)

    def _meta_leaf(self, leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.on_meta(leaf)
        if isinstance(leaf, torch.UntypedStorage) and leaf.device.type != "meta":
            return self._meta_storage(leaf)
        return None if _is_generator(leaf) else leaf

    def _view_leaf(self, leaf: Any, meta: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return self.view(meta) or meta
        return GENERATOR if _is_generator(leaf) else leaf

    def _meta_storage(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        if storage.device.type != "cpu":
            raise cannot_follow(f"a tensor on {storage.device}")
        if storage._cdata not in self._meta_storages:
            meta = new_storage(storage.nbytes(), "meta")
            self._meta_storages[storage._cdata] = (meta, storage)
            self._numbers[meta._cdata] = (self.log.begin_storage(storage), meta)
        return self._meta_storages[storage._cdata][0]


def _is_generator(leaf: Any) -> bool:
    return isinstance(leaf, torch.Generator)


def _moves_only(func: Any) -> bool:
    return torch.Tag.inplace_view in func.tags and not func.overloadpacket.__name__.startswith("resize")


def _takes(func: Any, name: str) -> bool:
    return any(argument.name == name for argument in func._schema.arguments)


def _placeless(views: list[Any]) -> bool:
    """Whether some tensor has no values, because the user's code itself put it on meta."""
    return any(isinstance(view, torch.Tensor) for view in views)


def _gives_tensors(func: Any) -> bool:
    return all("Tensor" in str(result.type) for result in func._schema.returns)


def _written_arguments(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
    written = []
    for position, argument in enumerate(func._schema.arguments):
        declared = argument.alias_info is not None and argument.alias_info.is_write
        if declared or argument.name in _UNDECLARED.get(func, ()):
            written.append(args[position] if position < len(args) else kwargs.get(argument.name))
    return tuple(written)


def _expect_plain(tensor: torch.Tensor) -> None:
    if is_traceable_wrapper_subclass(tensor) or tensor.layout != torch.strided:
        what = type(tensor).__name__ if tensor.layout == torch.strided else str(tensor.layout)
        raise cannot_follow(f"a tensor of the kind {what}")


def _empty_on_meta(tensor: torch.Tensor) -> torch.Tensor:
    _expect_plain(tensor)
    storage = new_storage(tensor.untyped_storage().nbytes(), "meta")
    return StorageView.at(0, tensor).of(storage)


# --- questions about tensors -----------------------------------------------------------------------------------------


class CpuFacade(TorchFunctionMode):
    """Makes recorded tensors answer like the CPU tensors that they stand for: torch.nn.init skips tensors on meta."""

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
        kwargs, outer = dict(kwargs or {}), self._recorder.meta_requested
        answer = self._answers.get(func)
        if answer is not None and self._recorder.knows(args[0]):
            return answer(func, args, kwargs)
        self._recorder.meta_requested = any(map(self._requests_meta, tree_leaves((args, kwargs))))
        try:
            return func(*args, **kwargs)
        finally:
            self._recorder.meta_requested = outer

    def _requests_meta(self, leaf: Any) -> bool:
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
            content.flags.writeable = False  # a write to the array would not reach the tensor
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
