"""The model of a divided job on one worker, before and between generations: its structure is known, its values are not
in memory. `build` gives the worker its part of the model for one generation.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import msgspec
import torch

from distbelief.checkpoint.sources import MODEL
from distbelief.control.credentials import Credential
from distbelief.data.sources import InMemory, as_source, split_batch
from distbelief.errors import JobError
from distbelief.job import Job
from distbelief.shards import Range, Schedule
from distbelief.strategies.base import BeginFrom, Fetch, Loop, Replica, Seat, ServerLink, nothing_saved
from distbelief.strategies.flatmodel.afterupdate import parameter_functions
from distbelief.strategies.flatmodel.independence import require_no_sync_batch_norm
from distbelief.strategies.flatmodel.layout import trainable
from distbelief.strategies.flatmodel.tileoptimizer import Recipe
from distbelief.strategies.mesh.cut.cutting import Blueprint, measure
from distbelief.strategies.mesh.init.deferred import make_deferred
from distbelief.strategies.mesh.rules.balance import UnitCost
from distbelief.strategies.mesh.rules.schedules import DEFAULT_SCHEDULE, PipelineSchedule, PipelineSeat
from distbelief.strategies.mesh.run.gradientsum import ErrorFeedback, GradientCompression, ResidualMemory
from distbelief.strategies.mesh.run.groups import MeshGroups
from distbelief.strategies.mesh.run.modelpart import Example, build_part
from distbelief.strategies.mesh.run.replica import MeshReplica
from distbelief.strategies.mesh.run.runner import StageRunner
from distbelief.strategies.mesh.run.stagetransfer import StageTransfer
from distbelief.strategies.mesh.state.member import MeshMember, exchange_boxes
from distbelief.strategies.mesh.state.memberstate import Forms, MemberState, PartOptimizer
from distbelief.strategies.mesh.state.restore import restore_state
from distbelief.strategies.mesh.state.snapshots import Snapshots
from distbelief.strategies.mesh.strategy import Meshed
from distbelief.strategies.purity import Checked
from distbelief.strategies.rules.degrees import Degrees
from distbelief.strategies.tables.embedding import settle
from distbelief.transport.gloo.group import TorchGroup
from distbelief.transport.membership import Membership

# --- memory ----------------------------------------------------------------------------------------------------------

_M_MMAP_THRESHOLD = -3


def return_blocks(size_bytes: int) -> None:
    """From now on glibc maps every block of this size or more separately, and unmaps it when it is freed.

    A sharded member gathers and frees block after block, and measuring costs tries every unit once. glibc keeps freed
    memory of such sizes in pieces that the next block does not fit into: measured, a sharded member then takes as much
    memory as the whole model. The price: the system clears every newly mapped page. Without glibc nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, size_bytes)


# --- the model -------------------------------------------------------------------------------------------------------

_SMALL_MODEL_BYTES = 64 << 20
_SMALL_MODELS_BLOCK_BYTES, _BLOCK_BYTES, _SHARDED_BLOCK_BYTES = 4 << 20, 1 << 20, 288 << 10
"""Freed memory of this size goes back to the system at once. That takes time and gains little in a small model. A
sharded member frees all of its layers again and again, not only activations, so smaller pieces count there."""


class PreparedMesh:
    """See `Prepared`. Keeps this worker's state from one generation to the next."""

    loop: Loop | None = None

    def __init__(
        self, job: Job, schedule: Schedule, pipeline_schedule: PipelineSchedule, snapshots: int | None,
        compression: GradientCompression | None,
    ) -> None:  # fmt: skip
        """`snapshots`: steps between two snapshots in memory; None: chosen by their cost; 0: none."""
        given = job.model
        self._deferred = make_deferred((lambda: given) if isinstance(given, torch.nn.Module) else given, job.seed)
        self.model = self._deferred.model.train()
        settle(self.model)
        require_no_sync_batch_norm(self.model)
        if not trainable(self.model):
            raise JobError("the model has no trainable parameters")
        self._job = job
        self._schedule = schedule
        self._pipeline_schedule = pipeline_schedule
        self._same_shapes = isinstance(as_source(job.data, job.collate), InMemory)
        # An optimizer looks at shapes when it is made. These parameters have the shapes but no memory.
        placeholders = [
            torch.nn.Parameter(torch.zeros(1, dtype=p.dtype).expand(p.shape)) for _, p in trainable(self.model)
        ]
        self._recipe = Recipe(job.optimizer, placeholders, parameter_functions(job, self.model))
        self._state: MemberState | None = None
        self._snapshots = Snapshots(snapshots)
        self._compression = compression
        self._residuals = ResidualMemory()
        self.shards = schedule.shards
        self._costs: dict[int, Sequence[UnitCost]] = {}

    @cached_property
    def parameters(self) -> int:
        return sum(p.numel() for _, p in trainable(self.model))

    def least_bytes(self) -> int:
        """0: the size of a part is not known before it is built."""
        return 0

    def facts(self) -> dict[str, str]:
        return {
            "threads": str(torch.get_num_threads()),
            "torch": str(torch.__version__),
            "instruction_set": f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}",
            "device": "cpu",
            "optimizer": self._recipe.describe(),
        }

    def canary(self, fetch: Fetch) -> str:
        """Empty: members add in different orders, so their bits differ anyway."""
        return ""

    def checked_canary(self, fetch: Fetch) -> Checked:
        """Nothing is checked: no worker has a model to compute with before it has a seat."""
        return Checked(self.canary(fetch))

    def groups(self, mine: Range) -> list[list[Range]]:
        return [[(shard, shard + 1) for shard in range(*mine)]]

    def frozen(self) -> list[str]:
        return []  # frozen parameters are part of the state

    def set_frozen(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Does nothing: frozen parameters are part of the state."""

    def connect(self, credential: Credential) -> ServerLink | None:
        return None

    def exchange(self, membership: Membership) -> TorchGroup:
        return membership.group()

    def build(self, seat: Seat, exchange: TorchGroup, fetch: Fetch, begin_from: BeginFrom = nothing_saved) -> Replica:
        degrees = Degrees(*seat.degrees)
        return_blocks(self._block_bytes(degrees))
        groups = MeshGroups(exchange, degrees, seat.generation)
        pipeline_schedule = self._pipeline_schedule if degrees.pipeline > 1 else DEFAULT_SCHEDULE
        pipeline = PipelineSeat(groups.pipeline, groups.place.pipeline, pipeline_schedule)

        def batch() -> Any:
            return fetch(0, 0, 1)[0]

        def example() -> Example:
            args, kwargs, _ = split_batch(batch())
            on_meta: Example = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to("meta"), (args, kwargs))
            return on_meta

        def costs(blueprint: Blueprint) -> Sequence[UnitCost]:
            return self._agreed_costs(exchange, blueprint, batch)

        part = build_part(self.model, self._job, groups, pipeline, example, costs)
        whole_parts = degrees.tensor == degrees.sharded == 1
        transfer = StageTransfer(exchange, self._same_shapes)
        halves = pipeline_schedule == "zbv" and whole_parts
        runner = StageRunner(self._job, part.stages, pipeline, transfer, halves, part.call_context)
        state = MemberState(self._job, part, PartOptimizer(self._recipe, part.held), runner.buffers)
        held = exchange_boxes(groups, state.boxes())
        feedback = ErrorFeedback(groups, part.held, self._residuals) if self._compression else None
        member = MeshMember(
            self._job, groups, state, self._recipe, self.model, self._forms, held, self._compression, feedback
        )
        rolled_back = restore_state(member, self._state, self._snapshots, begin_from, self._deferred)
        if feedback:
            feedback.load(state.applied, begin_from)
        self._state = state
        self._snapshots.begin(state, member.has_single_holders())
        return MeshReplica(member, self._schedule, seat, runner, self._snapshots, fetch, rolled_back)

    def let_go(self) -> None:
        """Does nothing: the next generation needs the state."""

    def _block_bytes(self, degrees: Degrees) -> int:
        if sum(p.nbytes for p in self.model.parameters()) < _SMALL_MODEL_BYTES:
            return _SMALL_MODELS_BLOCK_BYTES
        return _SHARDED_BLOCK_BYTES if degrees.sharded > 1 else _BLOCK_BYTES

    def _agreed_costs(self, group: TorchGroup, blueprint: Blueprint, batch: Any) -> Sequence[UnitCost]:
        """The costs of the units. Rank 0 measures them once per process; all members use the same numbers."""
        units = len(blueprint.units)
        if group.rank == 0 and units not in self._costs:
            args, kwargs, _ = split_batch(batch())
            self._costs[units] = measure(blueprint, args, kwargs, torch.device("cpu"))
        mine = [(one.seconds, one.bytes) for one in self._costs[units]] if group.rank == 0 else []
        told = group.gather(msgspec.msgpack.encode(mine))[0]
        return [UnitCost(*one) for one in msgspec.msgpack.decode(told, type=list[tuple[float, int]])]

    @cached_property
    def _forms(self) -> Forms:
        """The names of a whole state's tensors, with types and shapes."""
        found = {f"{MODEL}{name}": (p.dtype, tuple(p.shape)) for name, p in self.model.named_parameters()}
        found |= {f"{MODEL}{name}": (b.dtype, tuple(b.shape)) for name, b in self.model.named_buffers()}
        for number, (name, parameter) in enumerate(trainable(self.model)):
            for field in self._recipe.fields(number, parameter.numel()):
                shape = tuple(parameter.shape) if self._recipe.elementwise and field.shape else field.shape
                found[f"optimizer/{field.key}/{name}"] = (field.dtype, shape)
            found[f"begun/{name}"] = (torch.uint8, ())
        return found


def prepare(strategy: Meshed, job: Job, schedule: Schedule, device: torch.device) -> PreparedMesh:
    if device.type != "cpu":
        raise JobError(f"a model is not divided among several '{device}' yet", hint="use allreduce, or --device cpu")
    if job.compile:
        raise JobError(
            "a model that is divided is not compiled", hint="leave `compile` out of the job, or use allreduce"
        )
    if job.matmul != "torch":
        raise JobError(
            f"a model that is divided does not multiply with {job.matmul}",
            hint="leave `matmul` out of the job, or take a strategy that does not divide it, such as allreduce",
        )
    compression = GradientCompression(strategy.compression, strategy.always) if strategy.compression else None
    return PreparedMesh(job, schedule, strategy.schedule, strategy.snapshots, compression)
