"""allreduce on a worker without a seat: the model is made, laid out and checked.

`PreparedModel` is shared by all strategies in which each member has the whole model.
"""

from __future__ import annotations

import os
import platform
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch

from distbelief.compression.exchanges.base import CompressedExchange
from distbelief.compression.exchanges.lowrank import LowRankSums
from distbelief.compression.exchanges.ondevice import CodedOnDevice, CodedStretches
from distbelief.compression.exchanges.partialsums import CodedParts
from distbelief.compression.exchanges.tiles import CodedTiles
from distbelief.compression.methods import method_of
from distbelief.compression.powersgd import LowRank
from distbelief.control.credentials import Credential
from distbelief.job import Job
from distbelief.shards import Range, Schedule
from distbelief.strategies.base import BeginFrom, Fetch, Loop, Seat, ServerLink, nothing_saved
from distbelief.strategies.dataparallel.checkedreplica import CheckedReplica
from distbelief.strategies.dataparallel.compressed import CompressedDeviceReplica, CompressedReplica, compressing
from distbelief.strategies.dataparallel.devicereplica import DeviceReplica
from distbelief.strategies.dataparallel.replica import DataParallelReplica
from distbelief.strategies.dataparallel.strategy import AllReduce
from distbelief.strategies.flatmodel.afterupdate import parameter_functions
from distbelief.strategies.flatmodel.compute import Rehearsal, ShardComputer, make_model
from distbelief.strategies.flatmodel.independence import require_no_rows_of_samples
from distbelief.strategies.flatmodel.layout import lay_out, trainable
from distbelief.strategies.flatmodel.namedtensors import frozen, set_frozen
from distbelief.strategies.flatmodel.rules.stepwork import slots_needed
from distbelief.strategies.flatmodel.tileoptimizer import Recipe, state_bytes
from distbelief.strategies.purity import Checked, Impurity
from distbelief.strategies.purity.calls import check_after_update, check_optimizer, check_schedule
from distbelief.strategies.purity.shards import CANARY, check_purity
from distbelief.strategies.tables.embedding import EmbeddingTable
from distbelief.transport.abort import Abort
from distbelief.transport.device.accelerator import Accelerator
from distbelief.transport.device.exchange import DeviceExchange
from distbelief.transport.device.nccl import NcclExchange
from distbelief.transport.exchange import Exchange, Geometry, Group
from distbelief.transport.gloo.exchange import TorchExchange
from distbelief.transport.gloo.rendezvous import Rendezvous
from distbelief.transport.membership import Membership
from distbelief.transport.shm.exchange import SharedSlots
from distbelief.transport.shm.segment import Segment


class PreparedModel(ABC):
    """The whole model on this worker, checked and laid out; it has no seat yet."""

    _computer: ShardComputer
    loop: Loop | None = None

    def __init__(
        self, job: Job, schedule: Schedule, device: torch.device, updates_on: torch.device | None = None
    ) -> None:
        """`updates_on`: the device of the job's optimizer, if it is not the computing device."""
        self.model = make_model(job, updates_on or device)
        self.shards = schedule.shards
        self._job = job
        self._schedule = schedule
        self._device = device
        parameters = [p for _, p in trainable(self.model)]
        self._recipe = Recipe(job.optimizer, parameters, parameter_functions(job, self.model))
        whole = self._recipe.functions
        self._layout = lay_out(self.model, whole_parameters=not self._recipe.elementwise, whole=whole)
        self.model.to(device)

    def facts(self) -> dict[str, str]:
        forms = {table.is_served for table in self.model.modules() if isinstance(table, EmbeddingTable)}
        return {
            "threads": str(torch.get_num_threads()),
            "torch": str(torch.__version__),
            "instruction_set": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
            "device": self._device.type,
            "optimizer": self._recipe.describe(),
            "MKL-DNN": os.environ.get("ONEDNN_MAX_CPU_ISA", "default"),
            **({"matmul": self._job.matmul} if self._job.matmul != "torch" else {}),
            **({"tables": "on servers" if True in forms else "in the workers"} if forms else {}),
        }

    def canary(self, fetch: Fetch) -> str:
        batch, samples = fetch(*CANARY)
        self._require_no_rows_of_samples(batch, samples)
        return self._rehearse(batch, samples).fingerprint()

    def checked_canary(self, fetch: Fetch) -> Checked:
        found = check_purity(self._computer, self._rehearse, fetch)
        self._require_no_rows_of_samples(*fetch(*CANARY))
        return replace(found, impurities=[*found.impurities, *self._impure_updates()])

    def _impure_updates(self) -> list[Impurity]:
        """What is no function in the code that updates the parameters."""
        parameters = self._computer.parameters
        return [
            *check_schedule(self._job.schedule),
            *check_optimizer(self._recipe, parameters),
            *check_after_update(self._recipe.functions, parameters),
        ]

    def _rehearse(self, batch: Any, samples: int) -> Rehearsal:
        return self._computer.rehearse(batch, samples)

    def _require_no_rows_of_samples(self, batch: Any, samples: int) -> None:
        if max(self._schedule.shards, self.shards) > 1:
            require_no_rows_of_samples(self.model, partial(self._computer.look, samples=samples), batch, samples)

    @cached_property
    def parameters(self) -> int:
        return sum(p.numel() for p in self._computer.parameters)

    def let_go(self) -> None:
        self._computer.let_go()

    def connect(self, credential: Credential) -> ServerLink | None:
        return None

    def exchange(self, membership: Membership) -> Group:
        """The exchange of a generation, with the state in host memory."""
        return open_exchange(membership, self.geometry, torch.device("cpu"), exact=True)

    @abstractmethod
    def geometry(self, ranges: Sequence[Range]) -> Geometry:
        """The sizes of a generation's exchange, for these ranges of shards."""

    def frozen(self) -> list[str]:
        return frozen(self.model)

    def set_frozen(self, tensors: Mapping[str, torch.Tensor]) -> None:
        set_frozen(self.model, tensors)


class PreparedAllReduce(PreparedModel):
    """See `Prepared`."""

    def _rehearse(self, batch: Any, samples: int) -> Rehearsal:
        forward = self._computer.forward
        if not self._exact:  # no member compares these bits, and no batch has this shape: compiling would not pay
            self._computer.forward = self.model
        try:
            return super()._rehearse(batch, samples)
        finally:
            self._computer.forward = forward

    def __init__(
        self,
        job: Job,
        schedule: Schedule,
        device: torch.device,
        exact: bool,
        compression: str = "",
        always: bool = False,
        updates_on: torch.device | None = None,
    ) -> None:
        super().__init__(job, schedule, device, updates_on)
        self._exact = exact
        self._computer = ShardComputer(job, self.model, self._layout, device)
        self._compression = compressing(self._layout, compression, job.seed, always) if compression else None

    def least_bytes(self) -> int:
        """One slot for gradients, the values, the optimizer state and the undo log of one tile; with compression also
        two copies of the residuals."""
        layout = self._layout
        states = [state_bytes(self._recipe, layout, tile) for tile in range(layout.parameter_tiles)]
        undo_log = max(tile.size_bytes + state for tile, state in zip(layout.tiles, states, strict=False))
        residuals = 2 * layout.size_bytes if self._compression else 0
        return 2 * layout.size_bytes + sum(states) + residuals + (undo_log if self._device.type == "cpu" else 0)

    def groups(self, mine: Range) -> list[list[Range]]:
        return [[(shard, shard + 1) for shard in range(*mine)] if self._exact else [mine]]

    def geometry(self, ranges: Sequence[Range]) -> Geometry:
        return Geometry(
            tiles=self._layout.tiles,
            slot_bytes=self._layout.size_bytes,
            slots=[slots_needed(self._schedule.shards, mine) if self._exact else 1 for mine in ranges],
            shards=self._schedule.shards,
            marks=len(self._layout.entries),
            integer_bytes=len(self._computer.integer_bytes()),
            compression=self._compression,
            gradient_tiles=self._layout.parameter_tiles,
        )

    def exchange(self, membership: Membership) -> Group:
        return open_exchange(membership, self.geometry, self._device, self._exact)

    def build(
        self, seat: Seat, exchange: Exchange, fetch: Fetch, begin_from: BeginFrom = nothing_saved
    ) -> DataParallelReplica:
        given = self._computer, self._recipe, self._schedule, seat
        if isinstance(exchange, CodedOnDevice):
            return CompressedDeviceReplica(*given, exchange, fetch, self._exact, begin_from)
        if isinstance(exchange, DeviceExchange):
            return DeviceReplica(*given, exchange, fetch, self._exact, begin_from)
        if isinstance(exchange, CompressedExchange):
            return CompressedReplica(*given, exchange, fetch, self._exact, begin_from)
        if isinstance(exchange, TorchExchange) and seat.recheck.whole:
            return CheckedReplica(*given, exchange, fetch, self._exact, begin_from)
        return DataParallelReplica(*given, exchange, fetch, self._exact, begin_from)


def prepare(strategy: AllReduce, job: Job, schedule: Schedule, device: torch.device) -> PreparedAllReduce:
    return PreparedAllReduce(job, schedule, device, strategy.exact, strategy.compression, strategy.always)


def open_exchange(
    membership: Membership, geometry: Callable[[Sequence[Range]], Geometry], device: torch.device, exact: bool
) -> Exchange:
    """Open an exchange for members that each have the whole model, by the generation's transport, the state's device
    and the compression.

    `geometry`: the sizes of a generation with these ranges of shards; `device`: where the state lies."""
    if membership.transport == "shm" and membership.segments is not None:
        return membership.share(membership.segments, geometry)
    sizes = geometry(membership.ranges)
    if membership.transport == "nccl":
        on = device, exact, membership.memory, membership.device_memory
        return NcclExchange(membership.rendezvous(), membership.rank, sizes, membership.abort, *on)
    if membership.transport == "slots" and membership.segments is not None:
        past = membership.past(geometry)
        slots = SharedSlots(
            membership.segments, membership.name, membership.rank, sizes, membership.abort, past, membership.memory
        )
        if device.type == "cpu":
            return slots
        return DeviceExchange(slots, sizes, device, membership.device_memory, slots.where)
    networked_by = membership.rendezvous(), membership.rank, sizes, membership.abort, membership.memory
    if device.type == "cpu":
        return networked(*networked_by)
    return networked_on(Accelerator(device, membership.device_memory), *networked_by)


def networked(
    rendezvous: Rendezvous,
    rank: int,
    geometry: Geometry,
    abort: Abort,
    memory: dict[str, Segment] | None = None,
    on: Accelerator | None = None,
) -> TorchExchange:
    """`memory`: segments that this process keeps across generations. `on`: the device of the compressed gradients, None
    for the host; with a device, `networked_on` wraps this exchange and copies between device and host."""
    if geometry.compression is None:
        return TorchExchange(rendezvous, rank, geometry, abort, memory)
    if geometry.compression.apart:
        return CodedParts(rendezvous, rank, geometry, abort, memory)
    method = method_of(geometry.compression.method)
    if isinstance(method, LowRank):
        return LowRankSums(rendezvous, rank, geometry, abort, method, memory, on)
    if on is not None:
        return CodedStretches(rendezvous, rank, geometry, abort, method, memory, on)
    return CodedTiles(rendezvous, rank, geometry, abort, method, memory)


def networked_on(
    on: Accelerator,
    rendezvous: Rendezvous,
    rank: int,
    geometry: Geometry,
    abort: Abort,
    memory: dict[str, Segment] | None = None,
) -> DeviceExchange:
    """The exchange of a member that computes on an accelerator."""
    inner = networked(rendezvous, rank, geometry, abort, memory, on)
    if isinstance(inner, CompressedExchange):
        return CodedOnDevice(inner, geometry, on)
    return DeviceExchange(inner, geometry, on.device, on.kept)
