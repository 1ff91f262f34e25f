"""A real Ray cluster of several raylets on this machine, for tests: nodes come, and are killed."""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from typing import Any

import psutil

CPUS = 2
"""Of each node but the head. They are but numbers to Ray, whatever the machine has."""
STORE_BYTES = 80 << 20


class RayCluster:
    """The head takes no workers, as is usual. Each node has an address of its own, on loopback."""

    def __init__(self, nodes: int) -> None:
        self._folder = tempfile.mkdtemp(prefix="ray")  # a short path: Ray's sockets are below it
        self.environment = {
            "RAY_TMPDIR": self._folder,
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_worker_niceness": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
        }
        os.environ.update(self.environment)
        from ray.cluster_utils import Cluster  # it reads the environment

        self._hosts = 2
        self._cluster = Cluster(initialize_head=True, head_node_args=self._node(0))
        self._nodes = [self._cluster.add_node(wait=False, **self._node(CPUS)) for _ in range(nodes)]
        self._cluster.wait_for_nodes()
        self.address = str(self._cluster.address)

    def _node(self, cpus: int) -> dict[str, Any]:
        address = f"127.0.0.{self._hosts}"
        self._hosts += 1
        return {
            "num_cpus": cpus,
            "object_store_memory": STORE_BYTES,
            "node_ip_address": address,
            "include_dashboard": False,
        }

    def add_node(self) -> None:
        self._nodes.append(self._cluster.add_node(**self._node(CPUS)))

    def kill_node_of(self, process: psutil.Process) -> None:
        """SIGKILL for the raylet below which this process is."""
        raylets = {node.all_processes["raylet"][0].process.pid: node for node in self._nodes}
        above = next(parent for parent in process.parents() if parent.pid in raylets)
        node = raylets[above.pid]
        self._nodes.remove(node)
        self._cluster.remove_node(node, allow_graceful=False)

    def actors(self, kind: str) -> list[psutil.Process]:
        """The processes of actors of that class."""
        return [process for process in self._processes() if _title(process).startswith(f"ray::{kind}")]

    def left_behind(self) -> list[str]:
        """What is of a run: actors, and what they have started."""
        return [title for title in map(_title, self._processes()) if "Actor" in title or "distbelief" in title]

    def _processes(self) -> list[psutil.Process]:
        found: list[psutil.Process] = []
        for node in [self._cluster.head_node, *self._nodes]:
            raylet = node.all_processes["raylet"][0].process.pid
            try:
                found += psutil.Process(raylet).children(recursive=True)
            except psutil.NoSuchProcess:
                continue
        return found

    def wait_until_deaths_are_known(self) -> None:
        """Ray's head lists a killed node as alive until its health check fails; a later run would count its cores."""
        self._cluster.wait_for_nodes(timeout=120)

    def close(self) -> None:
        self._cluster.shutdown()
        for name in self.environment:
            os.environ.pop(name, None)
        shutil.rmtree(self._folder, ignore_errors=True)


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""
