"""The Python state that a shard's computation can reach: plain attributes of modules, of the loss, and variables of
functions. A snapshot of it can be compared with a later one, and put back.

Parameters and buffers of the model are no part of it. It sees numbers, texts, containers, tensors, arrays, generators
of random numbers, and the attributes of ordinary objects; not the state of iterators, files or native code.
"""

from __future__ import annotations

import random
import sysconfig
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import nn

from distbelief.strategies.purity.rules.findings import Hidden, Kind

SMALL_BYTES = 1 << 20
"""Larger tensors and arrays outside of the model are neither copied nor compared by their bytes."""
COPIED_BYTES = 64 << 20
MOST_VALUES = 50_000
MOST_ELEMENTS = 1_000
"""Longer containers are compared by their length."""
DEEPEST = 3

_MODULE_KEYS = frozenset(vars(nn.Module())) - {"training"}
_FOREIGN = (
    *{sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")},
    str(Path(torch.__file__).parent),
    str(Path(__file__).parents[2]),
)
"""Where code lies that is not the job's."""
_FOREIGN_TYPES = (
    "builtins",
    "torch",
    "numpy",
    "collections",
    "functools",
    "threading",
    "_thread",
    "weakref",
    "io",
    "random",
)


class _Absent:
    """There is no such attribute or variable."""


ABSENT = _Absent()


@dataclass(frozen=True)
class Kept:
    """A value as it was: `token` is equal for equal values; `restored` gives it its old contents and returns it."""

    token: Any
    restored: Callable[[], Any]
    kind: Kind = "value"


@dataclass(frozen=True)
class Place:
    """An attribute or a variable, and its value at the time of the snapshot."""

    name: str
    owner: str
    in_loss: bool
    kept: Kept
    put: Callable[[Any], None]

    def put_back(self) -> None:
        self.put(self.kept.restored())


Snapshot = dict[str, Place]


def snapshot(model: nn.Module, loss: Any, buffers: Collection[str]) -> Snapshot:
    """The hidden state of a model and a loss. `buffers`: the names of the buffers that are restored before each
    shard."""
    walk = _Walk(model, buffers)
    walk.modules(model, "", in_loss=False)
    walk.callable(loss, "loss", in_loss=True)
    return walk.found


def snapshot_of(value: Any, label: str) -> Snapshot:
    """The hidden state of a function or an object."""
    walk = _Walk(nn.Module(), ())
    walk.callable(value, label, in_loss=False)
    return walk.found


def changes(before: Snapshot, after: Snapshot) -> list[tuple[Place, Hidden]]:
    """The places whose values differ, as they were before. Generators come first, tensors last."""
    found = []
    for name in {**before, **after}:
        then, now = before.get(name), after.get(name)
        if then is not None and now is not None and then.kept.token == now.kept.token:
            continue
        shown = now or then
        assert shown is not None
        place = then or Place(shown.name, shown.owner, shown.in_loss, Kept(None, lambda: ABSENT), shown.put)
        kind = then.kept.kind if then and shown.kept.kind == "value" else shown.kept.kind
        found.append((place, Hidden(shown.name, shown.owner, kind, shown.in_loss)))
    order: list[Kind] = ["generator", "late buffer", "value", "other module", "tensor"]
    return sorted(found, key=lambda one: order.index(one[1].kind))


class _Walk:
    def __init__(self, model: nn.Module, buffers: Collection[str]) -> None:
        self._buffers = buffers
        self.found: Snapshot = {}
        self._seen: set[int] = set()
        self._alive: list[Any] = []  # an id stays unique while its object lives
        self._roots: set[int] = set()
        self._own = {id(one) for one in (*model.modules(), *model.parameters(), *model.buffers())}
        self._keep = Keeper(self._own)

    # --- where state can be --------------------------------------------------------------------------------------

    def modules(self, root: nn.Module, prefix: str, in_loss: bool) -> None:
        for name, module in root.named_modules():
            path = ".".join(filter(None, (prefix, name)))
            label = type(module).__name__
            self._attributes(module, path, f"a Python attribute of {label}", in_loss, 0)
            self._class(type(module), in_loss)
            for hook in _hooks(module):
                self.callable(hook, getattr(hook, "__name__", "hook"), in_loss)
            if id(module) not in self._own:  # a loss that is a module: nobody restores its buffers
                for registered in (module._buffers, module._parameters):
                    what = f"a buffer or parameter of {label}, which is no part of the model"
                    for key, tensor in registered.items():
                        put = partial(_set_key, registered, key)
                        kept = replace(self._keep(tensor), kind="other module")
                        self._place(f"{path}.{key}", what, in_loss, kept, put)
                continue
            for key, tensor in module._buffers.items():
                full = ".".join(filter(None, (path, key)))
                if full not in self._buffers:
                    kept = replace(self._keep(tensor), kind="late buffer")
                    self._place(full, f"a buffer of {label}", in_loss, kept, partial(_set_key, module._buffers, key))

    def callable(self, value: Any, label: str, in_loss: bool) -> None:
        if isinstance(value, partial):
            self.callable(value.func, label, in_loss)
            for number, argument in enumerate(value.args):
                self._value(argument, f"{label}.args[{number}]", "an argument of a partial", in_loss, _nowhere, 0)
            for key, argument in value.keywords.items():
                self._value(argument, f"{label}.{key}", "an argument of a partial", in_loss, _nowhere, 0)
        elif isinstance(value, MethodType):
            self._object(value.__self__, label, in_loss, 0)
            self.callable(value.__func__, label, in_loss)
        elif isinstance(value, FunctionType):
            self._function(value, in_loss)
        elif not isinstance(value, BuiltinFunctionType):
            self._object(value, label, in_loss, 0)

    def _object(self, value: Any, path: str, in_loss: bool, depth: int) -> None:
        if isinstance(value, nn.Module):
            if id(value) not in self._own | self._roots:
                self._roots.add(id(value))
                self.modules(value, path, in_loss)
        elif hasattr(value, "__dict__") and not isinstance(value, type | ModuleType):
            self._attributes(value, path, f"an attribute of {type(value).__name__}", in_loss, depth)
            self._class(type(value), in_loss)

    def _attributes(self, holder: Any, path: str, owner: str, in_loss: bool, depth: int) -> None:
        if not self._first_visit(holder):
            return
        inside = vars(holder)
        for key in list(inside):
            if isinstance(holder, nn.Module) and key in _MODULE_KEYS:
                continue
            name = ".".join(filter(None, (path, key)))
            self._value(inside[key], name, owner, in_loss, partial(_set_key, inside, key), depth)

    def _class(self, kind: type, in_loss: bool) -> None:
        for base in kind.__mro__:
            if base.__module__.split(".")[0] in _FOREIGN_TYPES or not self._first_visit(base):
                continue
            for key, value in list(vars(base).items()):
                if isinstance(function := getattr(value, "__func__", value), FunctionType):
                    self._function(function, in_loss)
                elif not key.startswith("__") and not hasattr(type(value), "__get__"):
                    owner = f"a class attribute of {base.__name__}"
                    put = partial(_set_attribute, base, key)
                    self._value(value, f"{base.__name__}.{key}", owner, in_loss, put, DEEPEST)

    def _function(self, function: FunctionType, in_loss: bool) -> None:
        if function.__code__.co_filename.startswith(_FOREIGN) or not self._first_visit(function):
            return
        name = function.__name__
        for variable, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            put = partial(_set_cell, cell)
            try:
                value = cell.cell_contents
            except ValueError:  # not assigned yet
                continue
            self._value(value, variable, f"a variable around the function {name}", in_loss, put, 0)
        used = sorted(set(_names(function.__code__)))
        self._globals(function.__globals__, used, "", in_loss)
        for variable in used:
            module = function.__globals__.get(variable)
            file = getattr(module, "__file__", None) if isinstance(module, ModuleType) else None
            if file and not file.startswith(_FOREIGN):
                self._globals(vars(module), used, f"{variable}.", in_loss)
        for key, value in list(vars(function).items()):
            put = partial(_set_key, vars(function), key)
            self._value(value, f"{name}.{key}", f"an attribute of the function {name}", in_loss, put, 0)
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if isinstance(value, list | dict | set):
                self._value(value, f"{name}(…)", f"a default argument of {name}", in_loss, _nowhere, 0)

    def _globals(self, inside: dict[str, Any], names: Sequence[str], prefix: str, in_loss: bool) -> None:
        owner = f"a global variable of {Path(str(inside.get('__file__', 'the job'))).name}"
        for name in names:
            if name in inside:
                self._value(inside[name], f"{prefix}{name}", owner, in_loss, partial(_set_key, inside, name), 0)

    def _value(self, value: Any, name: str, owner: str, in_loss: bool, put: Callable[[Any], None], depth: int) -> None:
        with suppress(Exception):  # an object of the job may refuse to be looked at
            self._look_at(value, name, owner, in_loss, put, depth)

    def _look_at(
        self, value: Any, name: str, owner: str, in_loss: bool, put: Callable[[Any], None], depth: int
    ) -> None:
        if isinstance(value, ModuleType) or id(value) in self._own:
            return
        if isinstance(value, type):
            self._class(value, in_loss)
        elif isinstance(value, FunctionType | MethodType | partial):
            self.callable(value, name, in_loss)
        elif depth < DEEPEST and _is_ordinary(value):
            self._place(name, owner, in_loss, Kept(id(value), lambda: value), put)
            self._object(value, name, in_loss, depth + 1)
        else:
            self._place(name, owner, in_loss, self._keep(value), put)
            for key, one in _elements(value):
                if isinstance(one, nn.Module):  # perhaps hidden there from the model's parameters
                    self._object(one, f"{name}[{key!r}]", in_loss, depth + 1)

    def _place(self, name: str, owner: str, in_loss: bool, kept: Kept, put: Callable[[Any], None]) -> None:
        if len(self.found) < MOST_VALUES:
            self.found.setdefault(name, Place(name, owner, in_loss, kept, put))

    def _first_visit(self, value: Any) -> bool:
        if id(value) in self._seen or len(self.found) >= MOST_VALUES:
            return False
        self._seen.add(id(value))
        self._alive.append(value)
        return True


def _hooks(module: nn.Module) -> Iterator[Callable[..., Any]]:
    """The hooks of a module and of its own parameters; of these not our own."""
    for hooks in (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks):
        yield from list(hooks.values())
    for parameter in module._parameters.values():
        for name in ("_backward_hooks", "_post_accumulate_grad_hooks"):
            hooks = getattr(parameter, name, None) or {}
            yield from (hook for hook in list(hooks.values()) if not _is_foreign(hook))


def _is_foreign(hook: Any) -> bool:
    while isinstance(hook, partial | MethodType):
        hook = hook.func if isinstance(hook, partial) else hook.__func__
    return isinstance(hook, FunctionType) and hook.__code__.co_filename.startswith(_FOREIGN)


# --- values ----------------------------------------------------------------------------------------------------------


class Keeper:
    """Keeps values as they are now. `own`: the ids of the model's modules, parameters and buffers, which it leaves."""

    def __init__(self, own: Collection[int]) -> None:
        self._own = own
        self._copied_bytes = 0
        self._values = 0

    def __call__(self, value: Any, depth: int = DEEPEST) -> Kept:
        kind = type(value).__name__
        self._values += 1
        is_long = isinstance(value, str | bytes) and len(value) > MOST_ELEMENTS
        if id(value) in self._own or is_long or self._values > MOST_VALUES:
            return Kept(id(value), lambda: value)
        if value is None or isinstance(value, int | float | complex | str | bytes | torch.dtype | torch.device):
            return Kept((kind, repr(value)), lambda: value)
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray):
            return self._array(value)
        if (generator := _generator(value)) is not None:
            return generator
        if depth and isinstance(value, list | tuple | set | frozenset | dict | deque):
            return self._container(value, depth)
        if depth and _is_ordinary(value) and not isinstance(value, nn.Module):
            inside = vars(value)
            kept = {key: self(one, depth - 1) for key, one in list(inside.items())[:MOST_ELEMENTS]}
            return Kept((id(value), len(inside), _tokens(kept)), partial(_refilled, value, inside, kept))
        return Kept((kind, id(value)), lambda: value)

    def _tensor(self, value: torch.Tensor) -> Kept:
        copied = self._copies(value.nbytes if value.layout == torch.strided and not value.is_meta else SMALL_BYTES + 1)
        version = -1 if value.is_inference() else value._version
        token = id(value), version, checksum(value) if copied else 0
        if not copied:
            return Kept(token, lambda: value, "tensor")
        content = value.detach().clone()

        def restored() -> torch.Tensor:
            with torch.no_grad():
                value.data.copy_(content)
            return value

        return Kept(token[2] if value.numel() else token, restored, "tensor")

    def _array(self, value: np.ndarray) -> Kept:
        if value.dtype == object or not self._copies(value.nbytes):
            return Kept((id(value), value.shape), lambda: value, "tensor")
        content = value.copy()

        def restored() -> np.ndarray:
            if value.flags.writeable:
                value[...] = content
            return value

        return Kept((str(content.dtype), content.shape, content.tobytes()), restored, "tensor")

    def _copies(self, size_bytes: int) -> bool:
        if size_bytes > SMALL_BYTES or self._copied_bytes + size_bytes > COPIED_BYTES:
            return False
        self._copied_bytes += size_bytes
        return True

    def _container(self, value: Any, depth: int) -> Kept:
        kind = type(value).__name__
        if len(value) > MOST_ELEMENTS:
            return Kept((kind, id(value), len(value)), lambda: value)
        if isinstance(value, dict):
            kept = {key: self(one, depth - 1) for key, one in value.items()}
            return Kept((kind, _tokens(kept)), partial(_refilled, value, value, kept), _kind(kept.values()))
        elements = [self(one, depth - 1) for one in value]
        tokens = tuple(one.token for one in elements)
        if isinstance(value, set | frozenset):
            tokens = tuple(sorted(map(repr, tokens)))
        if isinstance(value, tuple | frozenset):
            return Kept((kind, tokens), lambda: ([one.restored() for one in elements], value)[1], _kind(elements))

        def restored() -> Any:
            contents = [one.restored() for one in elements]
            value.clear()
            (value.update if isinstance(value, set) else value.extend)(contents)
            return value

        return Kept((kind, tokens), restored, _kind(elements))


def _kind(elements: Iterable[Kept]) -> Kind:
    return "tensor" if any(one.kind == "tensor" for one in elements) else "value"


def _generator(value: Any) -> Kept | None:
    """A generator of random numbers of its own."""
    if isinstance(value, torch.Generator):
        if value is torch.default_generator:
            return Kept("default", lambda: value)
        state = value.get_state()
        return Kept(state.numpy().tobytes(), partial(_given_back, value, value.set_state, state), "generator")
    if isinstance(value, np.random.Generator):
        bits, content = value.bit_generator, value.bit_generator.state
        return Kept(repr(content), partial(_given_back, value, partial(setattr, bits, "state"), content), "generator")
    if isinstance(value, np.random.RandomState):
        legacy = value.get_state(legacy=False)
        return Kept(repr(legacy), partial(_given_back, value, value.set_state, legacy), "generator")
    if isinstance(value, random.Random) and not isinstance(value, random.SystemRandom):
        drawn = value.getstate()
        return Kept(hash(drawn), partial(_given_back, value, value.setstate, drawn), "generator")
    return None


def _given_back(value: Any, setter: Callable[[Any], object], content: Any) -> Any:
    setter(content)
    return value


def _refilled(value: Any, inside: dict[Any, Any], kept: dict[Any, Kept]) -> Any:
    contents = {key: one.restored() for key, one in kept.items()}
    if len(inside) <= MOST_ELEMENTS:
        inside.clear()
    inside.update(contents)
    return value


def _tokens(kept: dict[Any, Kept]) -> tuple[Any, ...]:
    return tuple((key_token(key), one.token) for key, one in kept.items())


def key_token(key: Any) -> Any:
    return repr(key) if isinstance(key, str | int) else id(key)


def _is_ordinary(value: Any) -> bool:
    """An object whose attributes are its state."""
    return (
        hasattr(value, "__dict__")
        and not isinstance(value, type | ModuleType | FunctionType)
        and type(value).__module__.split(".")[0] not in _FOREIGN_TYPES
    )


def _elements(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, list | tuple | dict) and len(value) <= MOST_ELEMENTS:
        return value.items() if isinstance(value, dict) else enumerate(value)
    return ()


def _names(code: CodeType) -> Iterator[str]:
    """The global names that a function uses, and those of the functions inside it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)


def _set_key(inside: dict[str, Any], key: str, value: Any) -> None:
    if value is ABSENT:
        inside.pop(key, None)
    else:
        inside[key] = value


def _set_attribute(holder: Any, key: str, value: Any) -> None:
    if value is ABSENT:
        with suppress(AttributeError):
            delattr(holder, key)
    else:
        setattr(holder, key, value)


def _set_cell(cell: CellType, value: Any) -> None:
    if value is not ABSENT:
        cell.cell_contents = value


def _nowhere(value: Any) -> None:
    """A value that can only be restored in place."""


# --- the bytes of values ---------------------------------------------------------------------------------------------


def content(value: Any, depth: int = 8) -> Any:
    """A value that is equal for two batches with the same bytes. What it does not know counts as equal.

    >>> content({"x": torch.zeros(2), "n": 3}) == content({"x": torch.zeros(2), "n": 3})
    True
    >>> content([torch.zeros(2)]) == content([-torch.zeros(2)])   # by bytes
    False
    """
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), checksum(value)
    if isinstance(value, np.ndarray) and value.dtype != object:
        bits = np.ascontiguousarray(value).reshape(-1).view(np.uint8)
        return "array", str(value.dtype), value.shape, zlib.crc32(bits.data)
    if isinstance(value, str) and value.startswith("/"):
        return "path"  # hosts keep their files in different folders
    if isinstance(value, int | float | complex | str | bytes | bytearray | np.generic) or value is None:
        return type(value).__name__, repr(value)
    if depth and isinstance(value, dict):
        return "dict", tuple((str(key), content(one, depth - 1)) for key, one in value.items())
    if depth and isinstance(value, Sequence):
        return type(value).__name__, tuple(content(one, depth - 1) for one in value)
    if depth and hasattr(value, "__dict__"):
        return type(value).__name__, content(vars(value), depth - 1)
    return type(value).__name__


def checksum(tensor: torch.Tensor) -> int:
    """A checksum of a tensor's bytes."""
    if tensor.layout != torch.strided or tensor.is_meta or not tensor.numel():
        return 0
    plain = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor.detach()
    flat = plain.cpu().contiguous().reshape(-1)
    return zlib.crc32(flat.view(torch.uint8).numpy().data)
