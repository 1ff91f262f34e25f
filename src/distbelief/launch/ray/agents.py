"""The agents of a run in a Ray cluster: they start where nodes have room, are watched, and are ended.

An agent is an actor that hosts the run's members on its node as child processes. The members of a node share memory,
which their agent keeps, and an agent can kill a frozen member with certainty; so there is one actor per node, not one
per worker. If an agent ends, or its node, the kernel ends its members.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from distbelief.errors import DistBeliefError
from distbelief.launch.joining import serve_host
from distbelief.launch.launch import Invitation
from distbelief.launch.ray.rules.places import Need, Place

PLACED_S = 5.0
"""Ray makes a placement group within this time if it has room."""


@dataclass(frozen=True)
class Running:
    place: Place
    host: str
    actor: Any
    ended: Any
    """Ray's reference to the result of `serve`."""
    group: Any


@dataclass(frozen=True)
class Gone:
    host: str
    node: str
    reason: str
    refused: bool
    """Whether the node cannot take part: another agent on it would fail too."""
    is_certain: bool = True
    """Whether only the agent is gone; otherwise its node may be gone too."""


class Agents:
    def __init__(self, run: str, need: Need) -> None:
        self._run = run
        self._need = need
        self._running: list[Running] = []
        self._reserved: list[Any] = []
        """Placement groups without an agent."""
        self._names: set[str] = set()

    @property
    def workers(self) -> int:
        """The number of workers that the running agents have room for."""
        return sum(one.place.workers for one in self._running)

    @property
    def nodes(self) -> frozenset[str]:
        return frozenset(one.place.node for one in self._running)

    def reserve(self, places: Sequence[Place]) -> bool:
        """Make a placement group for every place, or none: two runs that each hold a half would wait for ever."""
        from ray.util.placement_group import placement_group, remove_placement_group

        groups = [
            placement_group(
                [self._need.bundle(place.workers)],
                bundle_label_selector=[{"ray.io/node-id": place.node}],
            )
            for place in places
        ]
        deadline = time.monotonic() + PLACED_S
        if all(group.wait(max(deadline - time.monotonic(), 0.0)) for group in groups):
            self._reserved = groups
            return True
        for group in groups:  # another run was faster
            remove_placement_group(group)
        return False

    def start(self, places: Sequence[Place], invitation: Invitation) -> None:
        """Start an agent in each reserved place."""
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor = ray.remote(AgentActor)
        groups, self._reserved = self._reserved, []
        for place, group in zip(places, groups, strict=True):
            host = self._name(place.name)
            bundle = self._need.bundle(place.workers)
            one = actor.options(
                name=f"{self._run} on {host}",
                num_cpus=bundle["CPU"],
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, 0),
            ).remote()
            ended = one.serve.remote(invitation, place.workers, host, os.getcwd())
            self._running.append(Running(place, host, one, ended, group))

    def _name(self, wanted: str) -> str:
        """A unique name for each agent: only members under the same host name share memory."""
        name, number = wanted, 2
        while name in self._names:
            name, number = f"{wanted}-{number}", number + 1
        self._names.add(name)
        return name

    def collect(self) -> list[Gone]:
        """Agents that have ended since the last call."""
        import ray
        from ray.util.placement_group import remove_placement_group

        if not self._running:
            return []
        there = [one.ended for one in self._running]
        done, _ = ray.wait(there, num_returns=len(there), timeout=0)
        gone = []
        for one in [one for one in self._running if one.ended in done]:
            try:
                reason = str(ray.get(one.ended))
                gone.append(Gone(one.host, one.place.node, reason or "it has ended", bool(reason)))
            except ray.exceptions.RayError as error:
                ray.kill(one.actor)  # an agent that is only out of reach must not come back beside its successor
                certain = not isinstance(error, ray.exceptions.ActorUnavailableError)
                gone.append(Gone(one.host, one.place.node, _brief(error), False, certain))
            self._running.remove(one)
            remove_placement_group(one.group)
        return gone

    def wait(self, timeout_s: float) -> None:
        """Wait until all agents have ended by themselves, at most this long."""
        import ray

        there = [one.ended for one in self._running]
        if there:
            ray.wait(there, num_returns=len(there), timeout=timeout_s)

    def close(self) -> None:
        """Kill all agents; their members die with them."""
        import ray
        from ray.util.placement_group import remove_placement_group

        for one in self._running:
            ray.kill(one.actor)
            remove_placement_group(one.group)
        for group in self._reserved:
            remove_placement_group(group)
        self._running, self._reserved = [], []


def _brief(error: Exception) -> str:
    """The first line of Ray's many-line explanation.

    >>> _brief(RuntimeError("The worker died.\\n\\tclass_name: A"))
    'The worker died.'
    """
    known = {"ActorDiedError": "its actor has died", "ActorUnavailableError": "its actor cannot be reached"}
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return known.get(type(error).__name__) or (lines[0] if lines else type(error).__name__)


class AgentActor:
    def serve(self, invitation: Invitation, workers: int, host: str, folder: str) -> str:
        """Host at most `workers` workers until the run ends. Returns why this node cannot take part; empty: it did.

        `folder`: where the run was started. Members work there if the node has it, so that a job finds its files by the
        same relative paths. What they print goes to Ray's log of this actor too.
        """
        with contextlib.suppress(OSError):
            os.chdir(folder)
        try:
            serve_host(invitation, workers, host)
        except DistBeliefError as error:
            return f"{error.message}; {error.hint}" if error.hint else error.message
        return ""


class Demand:
    def __init__(self, need: Need) -> None:
        self._need = need
        self._group: Any = None
        self._workers = 0

    def make(self, workers: int) -> bool:
        """Ask for room for this number of workers on any nodes. Returns whether the demand has changed."""
        from ray.util.placement_group import placement_group

        if workers == self._workers:
            return False
        self.withdraw()
        bundles = [self._need.bundle(1)] * workers
        self._group = placement_group(bundles, strategy="PACK")
        self._workers = workers
        return True

    def met(self) -> bool:
        """Whether the cluster has room now. The placement group is removed at once: agents then reserve the room by
        node."""
        if self._group is None or not self._group.wait(0):
            return False
        self.withdraw()
        return True

    def withdraw(self) -> None:
        from ray.util.placement_group import remove_placement_group

        if self._group is not None:
            remove_placement_group(self._group)
        self._group, self._workers = None, 0
