"""One shard: forward and backward with the shard's own seed, from the committed buffers, into a slot.

The result of a shard is a pure function of (parameters, committed buffers, samples, seed): an earlier shard on this
worker leaves no trace in it. So it does not matter which member computes it, or when, or how often.
"""

from __future__ import annotations

import contextlib
import hashlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from distbelief.data.sources import seed_everything, split_batch
from distbelief.errors import JobError
from distbelief.instrument import Instrument
from distbelief.job import Job
from distbelief.shards import shard_seed
from distbelief.strategies.flatmodel.capture import GradientCapture, placeable
from distbelief.strategies.flatmodel.independence import require_no_sync_batch_norm
from distbelief.strategies.flatmodel.layout import Layout, float_buffers, trainable
from distbelief.strategies.flatmodel.onednn import multiply_as_asked
from distbelief.strategies.tables.embedding import settle, tables_of
from distbelief.strategies.tables.rowgradients import RowGradients
from distbelief.transport.device.accelerator import memory_on
from distbelief.transport.exchange import tile_views
from distbelief.transport.shm.segment import Memory

TIMED = (
    Instrument("forward", __name__, "ShardComputer", ("forward_context",), is_context=True),
    Instrument("wait", __name__, "PendingLoss", ("numbers",)),
)

_SHAPES = 256
"""The number of batch shapes for which the compiler may specialise; more than any data set should have."""


def make_model(job: Job, device: torch.device) -> torch.nn.Module:
    """The model with its initial weights, with the same bits on every machine."""
    seed_everything(job.seed)
    model = job.model if isinstance(job.model, torch.nn.Module) else job.model()
    if not isinstance(model, torch.nn.Module):
        raise JobError(f"`model` made a {type(model).__name__}, not a torch.nn.Module")
    _require_plain_parameters(model)
    model = model.to(device)
    settle(model)
    require_no_sync_batch_norm(model)
    if device.type == "cpu":
        multiply_as_asked(job, model)
    if not trainable(model):
        besides = " beside its tables" if tables_of(model) else ""
        raise JobError(f"the model has no trainable parameters{besides}")
    return model.train()


def _require_plain_parameters(model: torch.nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            raise JobError(
                f"'{name}' has no shape yet: its layer is lazy",
                hint="let `model` be a function that makes the model, runs one batch through it (of zeros, of the real "
                "shape), and returns it",
            )
    for name, parameter in trainable(model):
        if parameter.is_complex():
            raise JobError(
                f"the parameter '{name}' is complex: complex parameters are not supported",
                hint="keep its real and imaginary parts in one parameter of floats, with a last axis of 2, and use "
                "torch.view_as_complex in forward",
            )


@dataclass(frozen=True)
class ShardResult:
    """loss_sum: the sum of the loss over the samples, or as the loss function returned it; weight: its divisor."""

    loss_sum: float
    weight: float
    integers: int
    """A checksum of the integer buffers after this shard: all shards must agree on them."""
    touched: np.ndarray
    """Per entry of the layout: whether this shard gave the parameter a gradient, or changed the buffer."""
    rows: Sequence[RowGradients] = ()
    """The row gradients of each table on servers."""


class PendingLoss:
    """A shard's loss and weight on their way from an accelerator to the host. They arrive after the forward pass;
    `numbers` does not wait for work that was launched later."""

    def __init__(self, loss_sum: torch.Tensor, weight: torch.Tensor | float) -> None:
        self._there = None
        self._loss_sum, self._weight = loss_sum, weight
        if loss_sum.is_cuda:
            self._loss_sum = _to_host(loss_sum)
            self._weight = _to_host(weight) if isinstance(weight, torch.Tensor) else weight
            self._there = torch.cuda.current_stream().record_event()

    def numbers(self) -> tuple[float, float]:
        if self._there is not None:
            self._there.synchronize()
        return float(self._loss_sum), float(self._weight)


def _to_host(value: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(value, device="cpu", pin_memory=True).copy_(value, non_blocking=True)


@dataclass(frozen=True)
class Rehearsal:
    """A shard that was computed as a test, and its slot."""

    result: ShardResult
    slot: Memory
    layout: Layout

    @cached_property
    def content(self) -> np.ndarray:
        return self.slot.tensor(torch.uint8, 0, self.layout.size_bytes).cpu().numpy()

    def fingerprint(self) -> str:
        """Equal for equal bits of the whole result."""
        digest = hashlib.blake2b(self.content.data, digest_size=16)
        result = self.result
        digest.update(repr((result.loss_sum, result.weight, result.integers)).encode())
        for one in result.rows:
            digest.update(one.rows.tobytes() + one.gradients.tobytes())
        return digest.hexdigest()

    def checksums(self) -> dict[str, int]:
        """A checksum for each parameter's gradient, each float buffer after the shard, and each table's gradients."""
        found = {}
        for entry in self.layout.entries:
            end = entry.offset_bytes + entry.numel * entry.dtype.itemsize
            found[entry.name] = zlib.crc32(self.content[entry.offset_bytes : end].data)
        for number, one in enumerate(self.result.rows):
            found[f"table {number}"] = zlib.crc32(one.gradients.tobytes(), zlib.crc32(one.rows.tobytes()))
        return found


class ShardComputer:
    """A model, ready to compute shards of a job into slots."""

    def __init__(self, job: Job, model: torch.nn.Module, layout: Layout, device: torch.device) -> None:
        self.job = job
        self.model = model
        self.forward: Callable[..., Any] = compiled(model) if job.compile else model
        """The model, compiled if the job requests it."""
        self.layout = layout
        self.device = device
        self.parameters = [p for _, p in trainable(model)]
        self.tables = [table for _, table in tables_of(model)]
        placed = placeable(model, self.parameters) if device.type == "cpu" and not job.compile else []
        self._capture = GradientCapture(self.parameters, layout, placed)
        self.was_mixed = False
        """Whether this worker computed with members on other kinds of devices."""
        self._buffer_tiles = layout.tiles[layout.parameter_tiles :]
        self._buffers_at = self._buffer_tiles[0].offset_bytes if self._buffer_tiles else layout.size_bytes
        # the model's float buffers in the layout
        self._live = memory_on(device, layout.size_bytes - self._buffers_at)
        self._buffers = _bind_buffers(model, layout, self._live, self._buffers_at)
        self._integers = [b for _, b in model.named_buffers() if not b.is_floating_point()]
        self._committed_integers = [b.clone() for b in self._integers]
        self._live_tiles = tile_views(self._live, self._buffer_tiles, -self._buffers_at)
        self._views: dict[int, _SlotViews] = {}

    def bind_parameters(self, values: Memory, offset_bytes: int) -> None:
        """Move the model's parameters to their places in `values`, and adopt the contents there."""
        self._views.clear()  # the old slots' memory is freed with its last view
        for index, parameter in zip(self.layout.entries_of("parameter"), self.parameters, strict=True):
            entry = self.layout.entries[index]
            at = values.tensor(entry.dtype, offset_bytes + entry.offset_bytes, entry.numel)
            parameter.data = at.view(entry.shape)

    def let_go(self) -> None:
        """Release a generation's memory, also after an aborted shard: its slots may fill a device."""
        self._capture.let_go()
        self._views.clear()

    def write_values(self, values: Memory, offset_bytes: int) -> None:
        """Write the model's present parameters and float buffers to their places in `values`."""
        for index, parameter in zip(self.layout.entries_of("parameter"), self.parameters, strict=True):
            entry = self.layout.entries[index]
            at = values.tensor(entry.dtype, offset_bytes + entry.offset_bytes, entry.numel)
            at.copy_(parameter.detach().reshape(-1))
        for tile, live in zip(self._buffer_tiles, self._live_tiles, strict=True):
            values.tensor(tile.dtype, offset_bytes + tile.offset_bytes, tile.numel).copy_(live)

    def committed_buffers(self, values: Memory, offset_bytes: int) -> list[torch.Tensor]:
        return [values.tensor(t.dtype, offset_bytes + t.offset_bytes, t.numel) for t in self._buffer_tiles]

    def restore_buffers(self, committed: Sequence[torch.Tensor]) -> None:
        for module, key, tensor in self._buffers:
            module._buffers[key] = tensor  # drops a tensor that a forward pass assigned to the buffer
        for live, value in zip(self._live_tiles, committed, strict=True):
            live.copy_(value)
        for integer, value in zip(self._integers, self._committed_integers, strict=True):
            integer.copy_(value)

    def commit_integers(self, content: bytes | None = None) -> None:
        """Commit the present values of the integer buffers, or those in `content`."""
        if content is not None:
            for buffer in filter(torch.numel, self._integers):
                size = buffer.numel() * buffer.element_size()
                part, content = bytearray(content[:size]), content[size:]
                buffer.copy_(torch.frombuffer(part, dtype=buffer.dtype).view(buffer.shape))
        for value, buffer in zip(self._committed_integers, self._integers, strict=True):
            value.copy_(buffer)

    def integer_bytes(self) -> bytes:
        return _joined(self._integers)

    def committed_integer_bytes(self) -> bytes:
        return _joined(self._committed_integers)

    def run(
        self,
        batch: Any,
        samples: int,
        seed: int,
        slot: Memory,
        committed: Sequence[torch.Tensor],
        tile_ready: Callable[[int], None],
        loss_known: Callable[[float, float], None] | None = None,
    ) -> ShardResult:
        """Forward and backward pass of one shard of `samples` samples into `slot`; buffers start from `committed`.
        `loss_known(sum, weight)` is called between the passes."""
        return self.begin(batch, samples, seed, slot, committed, tile_ready, loss_known)()

    def begin(
        self,
        batch: Any,
        samples: int,
        seed: int,
        slot: Memory,
        committed: Sequence[torch.Tensor],
        tile_ready: Callable[[int], None],
        loss_known: Callable[[float, float], None] | None = None,
    ) -> Callable[[], ShardResult]:
        """Like `run`, but may return while an accelerator still computes. The returned function waits for the result;
        the next shard may begin before."""
        views = self._slot_views(slot)
        seed_everything(seed)
        self.restore_buffers(committed)
        self._capture.start(views.parameters, tile_ready)
        for table in self.tables:
            table.forget()
        with self.forward_context():
            args, kwargs, target = split_batch(move(batch, self.device))
            total, weight = loss_sum(self.job.loss(self.forward(*args, **kwargs), target), samples)
        told = PendingLoss(total.detach(), weight)
        if loss_known:
            loss_known(*told.numbers())
        total.backward()  # type: ignore[no-untyped-call]
        touched = self._capture.finish()
        self._rebind_buffers()
        for view, live in zip(views.buffers, self._live_tiles, strict=True):
            view.copy_(live)
        for tile in self._buffer_tiles:
            tile_ready(tile.index)
        marks = np.concatenate([touched, self._changed_buffers(committed)])
        integers = zlib.crc32(self.integer_bytes())
        rows = [table.gradients() for table in self.tables]
        return lambda: ShardResult(*told.numbers(), integers, marks, rows)

    def touched_so_far(self) -> np.ndarray:
        """Which parameters have a gradient of the present shard: final for the tiles that are ready."""
        return self._capture.touched_so_far

    @contextlib.contextmanager
    def forward_context(self) -> Iterator[None]:
        if self.job.precision == "bf16":
            with torch.autocast(self.device.type, dtype=torch.bfloat16):
                yield
        else:
            yield

    def look(
        self, batch: Any, begin: Mapping[str, torch.Tensor], samples: int
    ) -> tuple[float, dict[str, torch.Tensor]]:
        """Forward pass and loss of shard 0 of step 0, without a trace. `begin`: float buffers to begin with, where they
        are not the model's. Returns the loss, and the float buffers afterwards."""
        before = [live.clone() for live in self._live_tiles]
        try:
            seed_everything(shard_seed(self.job.seed, 0, 0))
            self.restore_buffers(before)
            named = dict(float_buffers(self.model))
            for name, value in begin.items():
                named[name].copy_(value)
            with self.forward_context():
                args, kwargs, target = split_batch(move(batch, self.device))
                total, _ = loss_sum(self.job.loss(self.forward(*args, **kwargs), target), samples)
            self._rebind_buffers()
            after = {name: buffer.detach().clone() for name, buffer in float_buffers(self.model)}
            return float(total.detach()), after
        finally:
            self.restore_buffers(before)

    def rehearse(self, batch: Any, samples: int, seed: int | None = None) -> Rehearsal:
        """One shard, as a test; `seed`: that of shard 0 of step 0. The model and its buffers stay unchanged."""
        slot = memory_on(self.device, self.layout.size_bytes)
        before = [live.clone() for live in self._live_tiles]
        seed = shard_seed(self.job.seed, 0, 0) if seed is None else seed
        result = self.run(batch, samples, seed, slot, before, lambda tile: None)
        self.restore_buffers(before)
        self._views.clear()
        return Rehearsal(result, slot, self.layout)

    def _changed_buffers(self, committed: Sequence[torch.Tensor]) -> np.ndarray:
        """A byte per float buffer: whether the shard changed its value."""
        tiles = zip(self._buffer_tiles, self._live_tiles, committed, strict=True)
        changed = np.zeros(len(self.layout.entries) - len(self.parameters), np.uint8)
        for tile, live, value in tiles:
            if not torch.equal(live, value):
                for piece in self.layout.pieces[tile.index]:
                    part = slice(piece.tile_first, piece.tile_first + piece.numel)
                    changed[piece.entry - len(self.parameters)] |= not torch.equal(live[part], value[part])
        return changed

    def _slot_views(self, slot: Memory) -> _SlotViews:
        if id(slot) not in self._views:
            self._views[id(slot)] = _SlotViews(
                slot,
                [
                    slot.tensor(e.dtype, e.offset_bytes, e.numel).view(e.shape)
                    for e in self.layout.entries
                    if e.kind == "parameter"
                ],
                tile_views(slot, self._buffer_tiles),
            )
        return self._views[id(slot)]

    def _rebind_buffers(self) -> None:
        """If a module replaced a buffer instead of writing into it, copy the value and restore our tensor."""
        for module, key, tensor in self._buffers:
            present = module._buffers[key]
            if present is not tensor and present is not None:
                if present.shape != tensor.shape:
                    raise JobError(
                        f"the model's buffer '{key}' changed its shape while training, from {tuple(tensor.shape)} to "
                        f"{tuple(present.shape)}",
                        hint="buffers are averaged over the shards of a step: a value for every sample of a batch does "
                        "not belong into a buffer; a table that grows (of a rotary embedding) has its full size from "
                        "__init__ on, or is a plain attribute, as a cache",
                    )
                tensor.copy_(present)
                module._buffers[key] = tensor


@dataclass(frozen=True)
class _SlotViews:
    slot: Memory
    parameters: list[torch.Tensor]
    buffers: list[torch.Tensor]


def _joined(integers: Sequence[torch.Tensor]) -> bytes:
    return b"".join(one.cpu().contiguous().numpy().tobytes() for one in integers)


def _bind_buffers(
    model: torch.nn.Module, layout: Layout, live: Memory, first_bytes: int
) -> list[tuple[torch.nn.Module, str, torch.Tensor]]:
    places = {layout.entries[i].name: layout.entries[i] for i in layout.entries_of("buffer")}
    moved = {}
    for name, buffer in model.named_buffers():
        if name in places:
            entry = places[name]
            view = live.tensor(entry.dtype, entry.offset_bytes - first_bytes, entry.numel).view(entry.shape)
            view.copy_(buffer)
            moved[id(buffer)] = (buffer, view)  # keeps the old buffer, so that its id stays unique
    for _, buffer in model.named_buffers():
        moved.setdefault(id(buffer), (buffer, buffer))
    bound = []
    for module in model.modules():
        for key, present in module._buffers.items():
            if present is not None:
                module._buffers[key] = moved[id(present)][1]
                bound.append((module, key, moved[id(present)][1]))
    return bound


def compiled(model: torch.nn.Module) -> Callable[..., Any]:
    """The model's forward and backward pass through torch's compiler, compiled at first use.

    Each shape is compiled by itself: otherwise the code for one shape, and so the bits, depend on the shapes that a
    worker has seen before. For the same reason the compiler has no limit on recompilations below `_SHAPES`.
    """
    from torch import _dynamo  # this import takes a second

    _dynamo.config.recompile_limit = _SHAPES
    forward: Callable[..., Any] = torch.compile(model, dynamic=False)
    return forward


def move(batch: Any, device: torch.device) -> Any:
    if device.type == "cpu":
        return batch
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: _sent(t, device), batch)


def _sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Send a tensor from pinned memory, without waiting for the device."""
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)


def loss_sum(value: Any, samples: int) -> tuple[torch.Tensor, float | torch.Tensor]:
    """(sum, weight) from the loss function's result: a mean over the samples, or (sum, weight). A weight on a device
    stays a tensor, so that the host does not wait."""
    weight: float | torch.Tensor
    if isinstance(value, tuple):
        if len(value) != 2:
            raise JobError(f"`loss` returned a tuple of {len(value)}: return a mean, or (sum, weight)")
        total, weight = value
        if not isinstance(weight, torch.Tensor):
            weight = float(weight)
    else:
        total, weight = value, float(samples)
        if isinstance(total, torch.Tensor):
            total = total * samples
    if not isinstance(total, torch.Tensor) or total.numel() != 1:
        what = f"a tensor of shape {tuple(total.shape)}" if isinstance(total, torch.Tensor) else type(total).__name__
        raise JobError(f"`loss` must return one number (a mean over the samples) or (sum, weight), not {what}")
    return total, weight.detach() if isinstance(weight, torch.Tensor) else weight
