"""The process groups of a mesh: the ranks that differ from this member in some dimensions only."""

from __future__ import annotations

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from distbelief.strategies.rules.degrees import DIMENSIONS, Degrees, Place
from distbelief.transport.gloo.group import TorchGroup


class MeshGroups:
    """The process groups of one generation. Collective: all members make them together when the generation begins."""

    def __init__(self, world: TorchGroup, degrees: Degrees, generation: int) -> None:
        self.world = world
        self.degrees = degrees
        self.place: Place = degrees.place(world.rank)
        # torch caches what it knows of a mesh by its dimensions' names. This process may have had another place in the
        # last mesh, whose groups are gone, so each generation has its own names.
        self._names = {dimension: f"{dimension} {generation}" for dimension in DIMENSIONS}
        with world.more_groups():
            sizes = tuple(degrees.as_list())
            self._mesh: DeviceMesh = init_device_mesh("cpu", sizes, mesh_dim_names=tuple(self._names.values()))
            self.data: dist.ProcessGroup = self._mesh.get_group(self._names["data"])
            """The members that hold the same part and have other data."""
            self.samples: dist.ProcessGroup = self._group_of("data", "sharded")
            """The members that run the same stages on other data, whether they hold the same part or not."""

    def _group_of(self, *dimensions: str) -> dist.ProcessGroup:
        mine: dist.ProcessGroup | None = None
        for ranks in self.degrees.groups(*dimensions):  # every member takes part in making every group
            group = dist.new_group(list(ranks))
            if self.world.rank in ranks:
                mine = group
        assert mine is not None
        return mine

    def mesh(self, dimension: str) -> DeviceMesh:
        return self._mesh[self._names[dimension]]

    @property
    def pipeline(self) -> Sequence[int]:
        """The ranks of this member's pipeline, by stage."""
        return next(ranks for ranks in self.degrees.groups("pipeline") if self.world.rank in ranks)
