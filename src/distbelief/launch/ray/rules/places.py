"""Which nodes of a Ray cluster get how many workers. Pure: nodes in, places out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Need:
    """The resources of one worker."""

    cpus: int = 1
    gpus: int = 0

    def bundle(self, workers: int) -> dict[str, float]:
        """The bundle of a placement group for this number of workers.

        >>> Need(2).bundle(3), Need(1, 1).bundle(2)
        ({'CPU': 6.0}, {'CPU': 2.0, 'GPU': 2.0})
        """
        bundle = {"CPU": float(self.cpus * workers)}
        return bundle | {"GPU": float(self.gpus * workers)} if self.gpus else bundle


@dataclass(frozen=True)
class Node:
    """A node that is alive: all of its resources, and the free ones."""

    id: str
    name: str
    cpus: float
    free_cpus: float
    gpus: float = 0.0
    free_gpus: float = 0.0
    is_ours: bool = False
    """Whether the node has an agent of this run already."""

    def room(self, need: Need) -> int:
        """The number of workers that fit now."""
        return _fitting(self.free_cpus, self.free_gpus, need)

    def capacity(self, need: Need) -> int:
        """The number of workers that would fit on the empty node."""
        return _fitting(self.cpus, self.gpus, need)


@dataclass(frozen=True)
class Place:
    node: str
    """The node's id."""
    name: str
    workers: int


def place(nodes: Sequence[Node], need: Need, wanted: int) -> list[Place]:
    """Places for as many of the wanted workers as fit, on few nodes, since the workers of a node share memory.

    The smallest node that takes all the rest is chosen, else the largest; nodes without an agent of ours come first,
    since two agents on a node share nothing.

    >>> nodes = [Node("a", "a", 4, 4), Node("b", "b", 8, 8), Node("c", "c", 2, 2)]
    >>> [(place.node, place.workers) for place in place(nodes, Need(), 9)]
    [('b', 8), ('c', 1)]
    """
    places: list[Place] = []
    for left in ([node for node in nodes if not node.is_ours], [node for node in nodes if node.is_ours]):
        while wanted > 0 and left:
            enough = [node for node in left if node.room(need) >= wanted]
            if enough:
                chosen = min(enough, key=lambda node: (node.room(need), node.name, node.id))
            else:
                chosen = max(left, key=lambda node: node.room(need))
            workers = min(chosen.room(need), wanted)
            if not workers:
                break
            places.append(Place(chosen.id, chosen.name, workers))
            left.remove(chosen)
            wanted -= workers
    return places


def apart(places: Sequence[Place], need: Need) -> list[Place]:
    """The places of agents. With GPUs each worker has an agent of its own, so that it sees only its own GPU.

    >>> [(place.node, place.workers) for place in apart([Place("a", "a", 2)], Need(1, 1))]
    [('a', 1), ('a', 1)]
    """
    if not need.gpus:
        return list(places)
    return [replace(place, workers=1) for place in places for _ in range(place.workers)]


def room(nodes: Sequence[Node], need: Need) -> int:
    return sum(node.room(need) for node in nodes)


def shortage(nodes: Sequence[Node], need: Need, wanted: int) -> str:
    """Why the wanted workers do not fit into these nodes, even if all other programs end. Empty: they would fit.

    >>> shortage([Node("a", "a", 4, 0)], Need(), 8)
    'the Ray cluster has 4 CPUs on 1 node; 8 workers want 8'
    >>> shortage([Node("a", "a", 4, 4), Node("b", "b", 4, 4)], Need(3), 3)
    'the Ray cluster has 8 CPUs on 2 nodes, with room for 2 workers of 3 CPUs each; 3 are wanted'
    """
    fitting = sum(node.capacity(need) for node in nodes)
    if fitting >= wanted:
        return ""
    has = _count(sum(node.cpus for node in nodes), "CPU")
    each = _count(need.cpus, "CPU")
    if need.gpus:
        has += f" and {_count(sum(node.gpus for node in nodes), 'GPU')}"
        each += f" and {_count(need.gpus, 'GPU')}"
    where = f"the Ray cluster has {has} on {_count(len(nodes), 'node')}"
    if need == Need():
        return f"{where}; {_count(wanted, 'worker')} want {wanted}"
    return f"{where}, with room for {_count(fitting, 'worker')} of {each} each; {wanted} are wanted"


def _fitting(cpus: float, gpus: float, need: Need) -> int:
    by_gpu = int(gpus // need.gpus) if need.gpus else None
    by_cpu = int(cpus // need.cpus)
    return max(by_cpu if by_gpu is None else min(by_cpu, by_gpu), 0)


def _count(number: float, what: str) -> str:
    return f"{number:g} {what}" if number == 1 else f"{number:g} {what}s"
