"""Writes down what a model computes: one forward pass on the meta device, operation by operation.

A call of a linear or embedding layer is one entry, and so are attention, dropout and a matrix product: torch would take
them apart into steps that hide what is divided. All other work appears as torch's small set of operations. A trace does
not know how anything is divided; tracing computes no value and takes no memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from distbelief.strategies.mesh.rules.propagation import Operation, Ref, Trace, Value

_NAMES: dict[Any, tuple[str, tuple[str, ...]]] = {
    F.scaled_dot_product_attention: ("attention", ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")),
    F.dropout: ("dropout", ("input", "p", "training", "inplace")),
    torch.dropout: ("dropout", ("input", "p", "training")),
    torch.matmul: ("matmul", ("self", "other")),
    torch.bmm: ("matmul", ("self", "other")),
    torch.Tensor.matmul: ("matmul", ("self", "other")),
    torch.Tensor.bmm: ("matmul", ("self", "other")),
    torch.Tensor.__matmul__: ("matmul", ("self", "other")),
    # Whether these copy depends on strides, which may differ for a member's part.
    torch.reshape: ("reshape", ("self",)),
    torch.flatten: ("reshape", ("self",)),
    torch.Tensor.reshape: ("reshape", ("self",)),
    torch.Tensor.flatten: ("reshape", ("self",)),
    torch.Tensor.contiguous: ("contiguous", ("self",)),
}


class TraceFailed(Exception):
    """The forward pass raised an error; `trace` has the operations before it."""

    def __init__(self, error: Exception, trace: Trace) -> None:
        super().__init__(str(error).splitlines()[0] if str(error) else type(error).__name__)
        self.trace = trace


def is_layer(module: nn.Module) -> bool:
    """Whether a module computes exactly what torch's linear or embedding layers do."""
    return type(module).forward in (nn.Linear.forward, nn.Embedding.forward)


def trace(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    training: bool,
    shapes: Mapping[str, tuple[int, ...]] | None = None,
) -> Trace:
    """Trace one forward pass of `model` on meta, with other `shapes` for some parameters if given. The model stays
    unchanged."""
    swapped = {
        name: torch.empty((shapes or {}).get(name, p.shape), dtype=p.dtype, device="meta")
        for name, p in model.named_parameters()
    }
    buffers = {name: torch.empty_like(b, device="meta") for name, b in model.named_buffers()}
    recorder = _Recorder()
    for name, parameter in model.named_parameters():
        recorder.note(swapped[name], trained=parameter.requires_grad)
        recorder.trace.parameters[recorder.number(swapped[name])] = name

    def on_meta(leaf: Any) -> Any:
        return leaf.to("meta") if isinstance(leaf, torch.Tensor) else leaf

    inputs, named = tree_map(on_meta, args), tree_map(on_meta, dict(kwargs))
    with contextlib.ExitStack() as stack:
        for context in (torch.no_grad(), torch.device("meta"), _mode(model, training), recorder.watching(model)):
            stack.enter_context(context)
        stack.enter_context(_Functions(recorder))
        stack.enter_context(_Dispatch(recorder))
        try:
            output = torch.func.functional_call(model, {**swapped, **buffers}, inputs, named)
        except Exception as error:
            raise TraceFailed(error, recorder.trace) from error
    recorder.trace.outputs = {recorder.number(leaf) for leaf in tree_leaves(output) if isinstance(leaf, torch.Tensor)}
    return recorder.trace


class _Recorder:
    def __init__(self) -> None:
        self.trace = Trace()
        self.muted = 0
        self._kept: list[torch.Tensor] = []  # keeps tensors, so that no id is used twice
        self._numbers: dict[int, int] = {}

    def number(self, tensor: torch.Tensor) -> int:
        return self._numbers[id(tensor)] if id(tensor) in self._numbers else self.note(tensor, trained=False)

    def note(self, tensor: torch.Tensor, *, trained: bool) -> int:
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self._kept)
            self._kept.append(tensor)
        number = self._numbers[id(tensor)]
        before = self.trace.values.get(number)
        order = tuple(sorted(range(tensor.ndim), key=tensor.stride().__getitem__, reverse=True))
        trained = trained or (before is not None and before.trained)
        self.trace.values[number] = Value(tuple(tensor.shape), trained, order)
        return number

    def write(self, name: str, arguments: Mapping[str, Any], output: Any, **more: Any) -> None:
        reads: list[int] = []

        def refer(leaf: Any) -> Any:
            if not isinstance(leaf, torch.Tensor):
                return leaf
            reads.append(self.number(leaf))
            return Ref(reads[-1])

        kept = {key: tree_map(refer, argument) for key, argument in arguments.items()}
        trained = name != "detach.default" and (name == "layer" or any(self.trace.values[r].trained for r in reads))
        gives = [self.note(t, trained=trained) for t in tree_leaves(output) if isinstance(t, torch.Tensor)]
        plain = tuple(str(leaf) for leaf in tree_leaves(kept) if not isinstance(leaf, Ref))
        self.trace.operations.append(Operation(name, kept, plain, tuple(reads), tuple(gives), **more))

    @contextlib.contextmanager
    def quietly(self) -> Iterator[None]:
        self.muted += 1
        try:
            yield
        finally:
            self.muted -= 1

    @contextlib.contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        """Inside the block, a call of a layer is recorded as one operation, and every called module is noted."""
        handles = []
        for name, module in model.named_modules():
            handles.append(module.register_forward_pre_hook(self._begin(name), with_kwargs=True))
            if is_layer(module):
                handles.append(module.register_forward_hook(self._end(name)))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.trace.called.add(name)
            if is_layer(module):
                self.muted += 1
                if kwargs or len(args) != 1 or not isinstance(args[0], torch.Tensor):
                    self.trace.by_keyword.add(name)

        return hook

    def _end(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self.muted -= 1
            self.write("layer", {"input": args[0] if args else None}, output, layer=name)

        return hook


class _Dispatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        if not self._recorder.muted:
            names = [argument.name for argument in func._schema.arguments]
            self._recorder.write(
                func.name().removeprefix("aten::") + ("" if "." in func.name() else ".default"),
                {**dict(zip(names, args, strict=False)), **kwargs},
                output,
                pointwise=torch.Tag.pointwise in func.tags,
                random=torch.Tag.nondeterministic_seeded in func.tags,
            )
        return output


class _Functions(TorchFunctionMode):
    """Records functions as one operation that torch would take apart."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._recorder.muted or (func not in _NAMES and func is not torch.einsum):
            return func(*args, **kwargs)
        with self._recorder.quietly():
            output = func(*args, **kwargs)
        if func is torch.einsum:
            operands = args[1] if len(args) == 2 and isinstance(args[1], list | tuple) else args[1:]
            self._recorder.write("einsum", {"equation": args[0], "operands": list(operands)}, output)
            return output
        name, order = _NAMES[func]
        arguments = {**dict(zip(order, args, strict=False)), **kwargs}
        if "input" in arguments and "self" in order:
            arguments["self"] = arguments.pop("input")
        self._recorder.write(name, arguments, output)
        return output


@contextlib.contextmanager
def _mode(model: nn.Module, training: bool) -> Iterator[None]:
    before = [(module, module.training) for module in model.modules()]
    if not training:
        model.eval()
    try:
        yield
    finally:
        for module, was in before:
            module.training = was
