"""Computes one shard of a step once more for inspection: with hooks, under the debugger if asked, and without a slot.

The shard gets the same samples, seed and committed buffers as in training, so it gives the same numbers; in addition
all intermediate values can be observed. The replica, which uses the same model, is not changed.
"""

from __future__ import annotations

import bdb
import contextlib
import pdb
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from distbelief.data.sources import seed_everything, split_batch
from distbelief.job import Job
from distbelief.replaying.findings import BATCH, LOSS, Finding, bad_samples, not_finite
from distbelief.replaying.tracing import Trace
from distbelief.strategies.flatmodel.compute import loss_sum, move

_NOT_STEPPED_INTO = [
    *("torch.nn.modules.module", "torch._*", "torch.compiler*", "torch.jit*", "torch.utils*", "torch.autograd*"),
    *("distbelief.replaying.tracing", "distbelief.replaying.findings"),
]
"""The stack frames between a module's call and its own forward."""


@dataclass(frozen=True)
class ShardWork:
    step: int
    shard: int
    seed: int
    indices: Sequence[int]
    batch: Any


@dataclass(frozen=True)
class Passed:
    """The result of one shard."""

    loss_sum: float | None
    """None: an error came before the loss."""
    weight: float
    gradients: list[torch.Tensor | None]
    """Gradients of the summed loss, per trainable parameter."""
    findings: list[Finding]
    error: Exception | None = None
    error_layer: str = ""
    """The module in which the error was raised; empty outside of all modules."""


def pass_through(job: Job, model: torch.nn.Module, work: ShardWork, debug: bool) -> Passed:
    """Run forward and backward of a shard. The model's buffers must be the committed ones; this function changes
    them."""
    device = next(model.parameters()).device
    batch = move(work.batch, device)
    found = _in_batch(batch, work)
    seed_everything(work.seed)
    # torch.compile would compile the hooks in, and the debugger could not step through the model.
    uncompiled = torch.compiler.set_stance("force_eager")
    with uncompiled, Trace(model, work.shard, work.indices) as trace, _collected(model) as gradients:
        try:
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=job.precision == "bf16"):
                value = forward(job, model, batch, work.step, work.shard, work.indices, debug)
                total, told = loss_sum(value, len(work.indices))
                weight = float(told)
            trace.watch_backward(total)
            total.backward()  # type: ignore[no-untyped-call]
        except bdb.BdbQuit:
            raise
        except Exception as error:
            return Passed(None, 0.0, gradients, found + trace.outputs, error, trace.inside)
    found += trace.outputs
    if count := not_finite((total, torch.tensor(weight))):
        found.append(Finding("loss", LOSS, "", work.shard, count, origin=not found))
    elif trace.gradient:  # otherwise the loss is the cause and the gradient only a consequence
        found.append(trace.gradient)
    return Passed(total.item(), weight, gradients, found)


def forward(
    job: Job, model: torch.nn.Module, batch: Any, step: int, shard: int, indices: Sequence[int], debug: bool
) -> Any:
    """Compute the loss. The debugger shows this function's arguments, and `args`, `kwargs` and `target`."""
    args, kwargs, target = split_batch(batch)
    if debug:
        pdb.Pdb(skip=_NOT_STEPPED_INTO).set_trace()
    output = model(*args, **kwargs)
    return job.loss(output, target)


def _in_batch(batch: Any, work: ShardWork) -> list[Finding]:
    found = []
    for path, leaf in torch.utils._pytree.tree_leaves_with_path(batch):
        if count := not_finite(leaf):
            name, samples = torch.utils._pytree.keystr(path), bad_samples(leaf, work.indices)
            found.append(Finding("batch", BATCH, name, work.shard, count, origin=True, samples=samples))
    return found


@contextlib.contextmanager
def _collected(model: torch.nn.Module) -> Iterator[list[torch.Tensor | None]]:
    """Collects the gradients of trainable parameters during the block. The replica's own hooks remove gradients at the
    end of the backward pass, so these hooks read them earlier."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    found: list[torch.Tensor | None] = [None] * len(parameters)

    def arrived(index: int, gradient: torch.Tensor) -> None:
        before = found[index]
        found[index] = gradient.detach() if before is None else before + gradient.detach()

    handles = [p.register_hook(partial(arrived, index)) for index, p in enumerate(parameters)]  # type: ignore[no-untyped-call]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()
