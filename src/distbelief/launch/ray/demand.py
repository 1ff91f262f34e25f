"""Telling the cluster that the run would take more: a placement group that waits. An autoscaler adds nodes for it."""

from __future__ import annotations

from typing import Any

from distbelief.launch.ray.rules.places import Need


class Demand:
    def __init__(self, need: Need) -> None:
        self._need = need
        self._group: Any = None
        self._workers = 0

    def make(self, workers: int) -> bool:
        """For so many workers, wherever they fit. Whether it is another demand than before."""
        from ray.util.placement_group import placement_group

        if workers == self._workers:
            return False
        self.withdraw()
        bundles = [self._need.bundle(1)] * workers
        self._group = placement_group(bundles, strategy="PACK")
        self._workers = workers
        return True

    def met(self) -> bool:
        """Whether there is room now. It is given up in the same moment: agents take it, each on its node."""
        if self._group is None or not self._group.wait(0):
            return False
        self.withdraw()
        return True

    def withdraw(self) -> None:
        from ray.util.placement_group import remove_placement_group

        if self._group is not None:
            remove_placement_group(self._group)
        self._group, self._workers = None, 0
