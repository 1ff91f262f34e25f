"""The log of the operations that gave a model its initial values, and their execution: all of them or some.

A tensor in the log is a `StorageView`: a place in a numbered storage. So views need no log entry, and a walk backwards
over storages finds what a tensor depends on. A random operation turns one state of a random generator into the next;
states are numbered too, so that a new seed in the middle, a saved and restored state, and a separate generator need no
special cases. The log knows nothing of models, nor how the operations were recorded.
"""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from distbelief.errors import JobError

_REMEMBERED = 1 << 20
"""After about this many numbers drawn, the log keeps a generator's state (5 kB): later replays continue from there."""


class _GeneratorPlaceholder:
    """Stands for a random generator among the arguments of a recorded operation."""


GENERATOR = _GeneratorPlaceholder()


@dataclass(frozen=True)
class StorageView:
    """A tensor as a place in a numbered storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugate: bool = False
    negative: bool = False

    @classmethod
    def at(cls, storage: int, tensor: torch.Tensor) -> StorageView:
        size, stride, offset = tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset())
        return cls(storage, tensor.dtype, size, stride, offset, tensor.is_conj(), tensor.is_neg())

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        tensor = tensor.conj() if self.conjugate else tensor
        return torch._neg_view(tensor) if self.negative else tensor

    def scratch(self, device: str = "cpu") -> torch.Tensor:
        """Fresh memory of the same shape."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Output:
    """A result of an operation, with its own storage: its position among the results, its place, the storage's size."""

    position: int
    view: StorageView
    size_bytes: int


@dataclass(frozen=True)
class RecordedOperation:
    """One operation. Among its arguments a `StorageView` stands for a tensor, and GENERATOR for a random generator."""

    func: torch._ops.OpOverload[Any, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    default_dtype: torch.dtype
    writes: frozenset[int] = frozenset()
    before: int | None = None
    """The number of the generator's state that the operation draws from; None: it draws nothing."""
    after: int | None = None
    """The number of the generator's state afterwards."""
    fills: bool = False
    """Whether the operation only fills its first argument with random numbers, so that any memory of that shape will
    do."""
    outputs: tuple[Output, ...] = ()

    @cached_property
    def touches(self) -> frozenset[int]:
        read = {leaf.storage for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, StorageView)}
        return frozenset(read | self.creates)

    @cached_property
    def creates(self) -> frozenset[int]:
        return frozenset(output.view.storage for output in self.outputs)


@dataclass(frozen=True)
class _Constant:
    storage: torch.UntypedStorage
    checksum: int


class OperationLog:
    """Operations in order, with the real tensors and the generator states that they started from."""

    def __init__(self) -> None:
        self.operations: list[RecordedOperation] = []
        self._constants: dict[int, _Constant] = {}
        self._written: set[int] = set()
        self._sizes: dict[int, int] = {}
        self._states: dict[int, torch.Tensor] = {}
        self._drawn = 0
        self._numbers = itertools.count()

    def number(self) -> int:
        """A new number for a storage or a generator state."""
        return next(self._numbers)

    def begin_storage(self, storage: torch.UntypedStorage) -> int:
        """Number a real storage that was made before or outside of the log. The log keeps it without a copy."""
        number = self.number()
        self._constants[number] = _Constant(storage, _checksum(storage))
        return number

    def begin_state(self, state: torch.Tensor) -> int:
        number = self.number()
        self._states[number] = state
        return number

    def append(self, operation: RecordedOperation) -> None:
        self.operations.append(operation)
        self._written |= operation.writes
        self._sizes.update({output.view.storage: output.size_bytes for output in operation.outputs})

    def attempt(self, operation: RecordedOperation) -> Any:
        """The result that `operation` would have as the next one. Changes nothing."""
        passing: dict[int, torch.Tensor] = {}
        states = frozenset() if operation.before is None else frozenset([operation.before])
        live = dict(self._replay(operation.touches, states, passing))
        return self._run(operation, live, passing)

    def replay(self, wanted: Set[int]) -> Iterator[tuple[int, torch.UntypedStorage]]:
        """Yields the storages `wanted` with their final contents, each as soon as no other operation needs it."""
        return self._replay(wanted, frozenset(), {})

    def _replay(
        self, wanted: Set[int], wanted_states: Set[int], passing: dict[int, torch.Tensor]
    ) -> Iterator[tuple[int, torch.UntypedStorage]]:
        plan = self._plan(wanted, wanted_states)
        last_use = {number: i for i, scratch in plan for number in (() if scratch else self.operations[i].touches)}
        last_draw = {self.operations[i].before: i for i, _ in plan}
        for number in wanted - last_use.keys():
            yield number, _copy(self._constant(number))
        live: dict[int, torch.UntypedStorage] = {}
        for i, scratch in plan:
            operation = self.operations[i]
            if scratch:
                filled = operation.args[0].scratch()
                self._call(operation, (filled, *operation.args[1:]), operation.kwargs, passing)
                del filled
                done: list[int] = []
            else:
                self._run(operation, live, passing)
                done = [number for number in operation.touches if last_use[number] == i]
            if (
                operation.before is not None
                and last_draw[operation.before] == i
                and operation.before not in wanted_states
            ):
                passing.pop(operation.before, None)
            for number in done:
                storage = live.pop(number)
                if number in wanted:
                    yield number, _copy(storage) if self._is_constant(number) else storage
                del storage

    def _plan(self, wanted: Set[int], wanted_states: Set[int]) -> list[tuple[int, bool]]:
        """The operations to execute, in order; True: the operation is needed only for the random numbers that it
        draws."""
        storages = set(wanted)
        states = {state for state in wanted_states if state not in self._states}
        overwritten: set[int] = set()  # a later operation fills the whole storage, so its contents before do not matter
        plan = []
        for i in range(len(self.operations) - 1, -1, -1):
            operation = self.operations[i]
            contents = any(number in storages and number not in overwritten for number in operation.writes)
            changes = contents or not storages.isdisjoint(operation.creates)
            if not changes and (operation.after is None or operation.after not in states):
                continue
            scratch = operation.fills and not changes
            plan.append((i, scratch))
            if not scratch:
                storages |= operation.touches
                storages -= operation.creates
                overwritten -= operation.touches
                if operation.fills and self._is_whole(operation.args[0]):
                    overwritten.add(operation.args[0].storage)
            if operation.before is not None and operation.before not in self._states:
                states.add(operation.before)
        return plan[::-1]

    def _is_whole(self, view: StorageView) -> bool:
        return torch.Size(view.size).numel() * view.dtype.itemsize == self._sizes.get(view.storage)

    def _run(
        self, operation: RecordedOperation, live: dict[int, torch.UntypedStorage], passing: dict[int, torch.Tensor]
    ) -> Any:
        def real(leaf: Any) -> Any:
            if not isinstance(leaf, StorageView):
                return leaf
            if leaf.storage not in live:
                live[leaf.storage] = self._constant(leaf.storage)
            return leaf.of(live[leaf.storage])

        given = {number: live[number]._cdata for number in operation.touches if number in live}
        result = self._call(operation, tree_map(real, operation.args), tree_map(real, operation.kwargs), passing)
        results = tree_leaves(result)
        for output in operation.outputs:
            _keep(output, results[output.position], live, set(given.values()))
        return result

    def _call(
        self,
        operation: RecordedOperation,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        passing: dict[int, torch.Tensor],
    ) -> Any:
        """Call the operation without gradients and outside of modes. The caller's random generators keep their
        states."""
        default_dtype = torch.get_default_dtype()
        with torch._C.DisableTorchFunction(), torch.no_grad():
            torch.set_default_dtype(operation.default_dtype)
            try:
                if operation.before is None or operation.after is None:
                    return operation.func(*args, **kwargs)
                state = passing[operation.before] if operation.before in passing else self._states[operation.before]
                result, passing[operation.after] = _draw(operation.func, args, kwargs, state)
            finally:
                torch.set_default_dtype(default_dtype)
        self._remember(operation, passing[operation.after])
        return result

    def _remember(self, operation: RecordedOperation, state: torch.Tensor) -> None:
        if operation.after is None or operation.after in self._states:
            return
        views = [leaf for leaf in tree_leaves(operation.args) if isinstance(leaf, StorageView)]
        views += [output.view for output in operation.outputs]
        self._drawn += max((torch.Size(view.size).numel() for view in views), default=1)
        if self._drawn >= _REMEMBERED:
            self._drawn = 0
            self._states[operation.after] = state

    def _is_constant(self, number: int) -> bool:
        return number in self._constants and number not in self._written

    def _constant(self, number: int) -> torch.UntypedStorage:
        """The first contents of a real storage: a copy if operations write to it."""
        constant = self._constants[number]
        if _checksum(constant.storage) != constant.checksum:
            raise JobError(
                "a tensor or array that the model was made from has been changed since",
                hint="copy it where the model is made: torch.tensor(array) instead of torch.from_numpy(array)",
            )
        return _copy(constant.storage) if number in self._written else constant.storage


def _draw(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], state: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Call `func` with its generator in `state`; the result, and the generator's state after it."""
    if any(leaf is GENERATOR for leaf in tree_leaves((args, dict(kwargs)))):
        own = torch.Generator()
        own.set_state(state)
        args, kwargs = tree_map(lambda leaf: own if leaf is GENERATOR else leaf, (args, dict(kwargs)))
        return func(*args, **kwargs), own.get_state()
    shared = torch.default_generator
    callers = shared.get_state()
    shared.set_state(state)
    try:
        return func(*args, **kwargs), shared.get_state()
    finally:
        shared.set_state(callers)


def _keep(output: Output, result: torch.Tensor, live: dict[int, torch.UntypedStorage], given: Set[int]) -> None:
    """Take over the storage of a result; copy the result if the kernel chose another layout than the recorded one."""
    storage, view = result.untyped_storage(), output.view
    as_recorded = StorageView.at(view.storage, result) == view and storage.nbytes() == output.size_bytes
    if as_recorded and view.storage not in live and storage._cdata not in given:
        live[view.storage] = storage
        return
    if view.storage not in live:
        live[view.storage] = new_storage(output.size_bytes, "cpu")
    view.of(live[view.storage]).copy_(result)


def new_storage(size_bytes: int, device: str) -> torch.UntypedStorage:
    return torch.UntypedStorage(size_bytes, device=device)  # type: ignore[no-untyped-call]


def _copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    return _bytes(storage).clone().untyped_storage()


def _checksum(storage: torch.UntypedStorage) -> int:
    return zlib.crc32(_bytes(storage).numpy().data)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage)


def cannot_follow(what: str) -> JobError:
    return JobError(
        f"the function that makes the model does something that cannot be followed without all of its memory: {what}",
        hint="make the model with ordinary torch operations on the CPU, in one thread, from the job's seed",
    )
