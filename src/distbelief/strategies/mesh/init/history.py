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
"""A generator's state (5 kB) is kept about once in so many numbers drawn: later replays go on from there."""


class _Stream:
    """Stands in the arguments of a step for a generator that the operation was given."""


STREAM = _Stream()


@dataclass(frozen=True)
class Piece:
    """A tensor as a place in a storage."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    conjugate: bool = False
    negative: bool = False

    @classmethod
    def at(cls, storage: int, tensor: torch.Tensor) -> Piece:
        size, stride, offset = tuple(tensor.size()), tuple(tensor.stride()), int(tensor.storage_offset())
        return cls(storage, tensor.dtype, size, stride, offset, tensor.is_conj(), tensor.is_neg())

    def of(self, storage: torch.UntypedStorage) -> torch.Tensor:
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor.set_(storage, self.offset, self.size, self.stride)
        tensor = tensor.conj() if self.conjugate else tensor
        return torch._neg_view(tensor) if self.negative else tensor

    def scratch(self, device: str = "cpu") -> torch.Tensor:
        """Memory of the same shape that belongs to nothing."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True)
class Output:
    """A result of a step that has a storage of its own: the how many-th, where it lies, and the storage's size."""

    position: int
    piece: Piece
    size_bytes: int


@dataclass(frozen=True)
class Step:
    """One operation. Its arguments hold pieces for tensors, and STREAM for a generator."""

    func: torch._ops.OpOverload[Any, Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    default_dtype: torch.dtype
    writes: frozenset[int] = frozenset()
    before: int | None = None
    """The state of the generator that it draws from; None: it draws nothing."""
    after: int | None = None
    fills: bool = False
    """It only fills its first argument with random numbers, whatever was there: any memory of that shape will do."""
    outputs: tuple[Output, ...] = ()

    @cached_property
    def touches(self) -> frozenset[int]:
        read = {leaf.storage for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Piece)}
        return frozenset(read | self.creates)

    @cached_property
    def creates(self) -> frozenset[int]:
        return frozenset(output.piece.storage for output in self.outputs)


@dataclass(frozen=True)
class _Constant:
    storage: torch.UntypedStorage
    checksum: int


class History:
    """Steps in their order, with the real tensors and the states of generators that they began from."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self._constants: dict[int, _Constant] = {}
        self._written: set[int] = set()
        self._sizes: dict[int, int] = {}
        self._states: dict[int, torch.Tensor] = {}
        self._drawn = 0
        self._numbers = itertools.count()

    def number(self) -> int:
        """A number for a storage or a state that is new."""
        return next(self._numbers)

    def begin_storage(self, storage: torch.UntypedStorage) -> int:
        """A storage with contents of its own, made before or outside of the steps. It is kept, not copied."""
        number = self.number()
        self._constants[number] = _Constant(storage, _checksum(storage))
        return number

    def begin_state(self, state: torch.Tensor) -> int:
        number = self.number()
        self._states[number] = state
        return number

    def append(self, step: Step) -> None:
        self.steps.append(step)
        self._written |= step.writes
        self._sizes.update({output.piece.storage: output.size_bytes for output in step.outputs})

    def attempt(self, step: Step) -> Any:
        """What `step` would give if it were the next one. Nothing is changed by it."""
        passing: dict[int, torch.Tensor] = {}
        states = frozenset() if step.before is None else frozenset([step.before])
        live = dict(self._replay(step.touches, states, passing))
        return self._run(step, live, passing)

    def replay(self, wanted: Set[int]) -> Iterator[tuple[int, torch.UntypedStorage]]:
        """The storages `wanted` with their contents after the last step, each as soon as nothing needs it any more."""
        return self._replay(wanted, frozenset(), {})

    def _replay(
        self, wanted: Set[int], wanted_states: Set[int], passing: dict[int, torch.Tensor]
    ) -> Iterator[tuple[int, torch.UntypedStorage]]:
        plan = self._plan(wanted, wanted_states)
        last_use = {number: i for i, scratch in plan for number in (() if scratch else self.steps[i].touches)}
        last_draw = {self.steps[i].before: i for i, _ in plan}
        for number in wanted - last_use.keys():
            yield number, _copy(self._constant(number))
        live: dict[int, torch.UntypedStorage] = {}
        for i, scratch in plan:
            step = self.steps[i]
            if scratch:
                filled = step.args[0].scratch()
                self._call(step, (filled, *step.args[1:]), step.kwargs, passing)
                del filled
                done: list[int] = []
            else:
                self._run(step, live, passing)
                done = [number for number in step.touches if last_use[number] == i]
            if step.before is not None and last_draw[step.before] == i and step.before not in wanted_states:
                passing.pop(step.before, None)
            for number in done:
                storage = live.pop(number)
                if number in wanted:
                    yield number, _copy(storage) if self._is_constant(number) else storage
                del storage

    def _plan(self, wanted: Set[int], wanted_states: Set[int]) -> list[tuple[int, bool]]:
        """The steps to execute, in order, and whether only the numbers that a step draws are wanted of it."""
        storages = set(wanted)
        states = {state for state in wanted_states if state not in self._states}
        overwritten: set[int] = set()  # a later step fills all of it: until then only its memory is wanted
        plan = []
        for i in range(len(self.steps) - 1, -1, -1):
            step = self.steps[i]
            contents = any(number in storages and number not in overwritten for number in step.writes)
            changes = contents or not storages.isdisjoint(step.creates)
            if not changes and (step.after is None or step.after not in states):
                continue
            scratch = step.fills and not changes
            plan.append((i, scratch))
            if not scratch:
                storages |= step.touches
                storages -= step.creates
                overwritten -= step.touches
                if step.fills and self._is_whole(step.args[0]):
                    overwritten.add(step.args[0].storage)
            if step.before is not None and step.before not in self._states:
                states.add(step.before)
        return plan[::-1]

    def _is_whole(self, piece: Piece) -> bool:
        return torch.Size(piece.size).numel() * piece.dtype.itemsize == self._sizes.get(piece.storage)

    def _run(self, step: Step, live: dict[int, torch.UntypedStorage], passing: dict[int, torch.Tensor]) -> Any:
        def real(leaf: Any) -> Any:
            if not isinstance(leaf, Piece):
                return leaf
            if leaf.storage not in live:
                live[leaf.storage] = self._constant(leaf.storage)
            return leaf.of(live[leaf.storage])

        given = {number: live[number]._cdata for number in step.touches if number in live}
        result = self._call(step, tree_map(real, step.args), tree_map(real, step.kwargs), passing)
        results = tree_leaves(result)
        for output in step.outputs:
            _keep(output, results[output.position], live, set(given.values()))
        return result

    def _call(
        self, step: Step, args: tuple[Any, ...], kwargs: Mapping[str, Any], passing: dict[int, torch.Tensor]
    ) -> Any:
        """The operation itself, without gradients and untouched by modes; the caller's generators are left alone."""
        default_dtype = torch.get_default_dtype()
        with torch._C.DisableTorchFunction(), torch.no_grad():
            torch.set_default_dtype(step.default_dtype)
            try:
                if step.before is None or step.after is None:
                    return step.func(*args, **kwargs)
                state = passing[step.before] if step.before in passing else self._states[step.before]
                result, passing[step.after] = _draw(step.func, args, kwargs, state)
            finally:
                torch.set_default_dtype(default_dtype)
        self._remember(step, passing[step.after])
        return result

    def _remember(self, step: Step, state: torch.Tensor) -> None:
        if step.after is None or step.after in self._states:
            return
        pieces = [leaf for leaf in tree_leaves(step.args) if isinstance(leaf, Piece)]
        pieces += [output.piece for output in step.outputs]
        self._drawn += max((torch.Size(piece.size).numel() for piece in pieces), default=1)
        if self._drawn >= _REMEMBERED:
            self._drawn = 0
            self._states[step.after] = state

    def _is_constant(self, number: int) -> bool:
        return number in self._constants and number not in self._written

    def _constant(self, number: int) -> torch.UntypedStorage:
        """The contents that a storage began with: a copy if steps write to it."""
        constant = self._constants[number]
        if _checksum(constant.storage) != constant.checksum:
            raise JobError(
                "a tensor or array that the model was made from has been changed since",
                hint="copy it where the model is made: torch.tensor(array) instead of torch.from_numpy(array)",
            )
        return _copy(constant.storage) if number in self._written else constant.storage


def _draw(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], state: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """Call `func` with its generator in `state`; the result, and the generator's state after it."""
    if any(leaf is STREAM for leaf in tree_leaves((args, dict(kwargs)))):
        own = torch.Generator()
        own.set_state(state)
        args, kwargs = tree_map(lambda leaf: own if leaf is STREAM else leaf, (args, dict(kwargs)))
        return func(*args, **kwargs), own.get_state()
    shared = torch.default_generator
    callers = shared.get_state()
    shared.set_state(state)
    try:
        return func(*args, **kwargs), shared.get_state()
    finally:
        shared.set_state(callers)


def _keep(output: Output, result: torch.Tensor, live: dict[int, torch.UntypedStorage], given: Set[int]) -> None:
    """Take a result's storage over as it is; where the kernel laid it out otherwise than recorded, copy it."""
    storage, piece = result.untyped_storage(), output.piece
    as_recorded = Piece.at(piece.storage, result) == piece and storage.nbytes() == output.size_bytes
    if as_recorded and piece.storage not in live and storage._cdata not in given:
        live[piece.storage] = storage
        return
    if piece.storage not in live:
        live[piece.storage] = new_storage(output.size_bytes, "cpu")
    piece.of(live[piece.storage]).copy_(result)


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
