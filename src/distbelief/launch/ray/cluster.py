"""Connecting to a Ray cluster, or starting one on this machine; and what its nodes have.

An unreachable address gives a clear error within seconds; Ray itself would try for minutes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from distbelief.errors import DistBeliefError
from distbelief.launch.ray.rules.places import Node

NAMESPACE = "distbelief"
REACH_S = 5.0
LOOPBACK = "127.0.0.2"
"""The address of a cluster that we start. Ray would replace 127.0.0.1 by another address of this machine."""
STORE_BYTES = 128 << 20
"""Size of Ray's object store in a cluster that we start; almost nothing goes through it."""
_IN_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # `ray job submit` gives its driver the job's environment in it


def address_of(on: str) -> str:
    """The address in the value of --on; empty: connected() looks for a cluster.

    >>> address_of("ray"), address_of("ray://head:10001"), address_of("ray:10.0.0.1:6379")
    ('', 'ray://head:10001', '10.0.0.1:6379')
    """
    if on == "ray":
        return ""
    address = on if on.startswith("ray://") else on.removeprefix("ray:")
    if not re.fullmatch(r"(ray://)?([^/:\s]+|\[[0-9a-fA-F:]+\]):\d+", address):
        raise DistBeliefError(
            f"--on {on} is no address of a Ray cluster",
            hint="use --on ray, --on ray://HOST:10001 (Ray client) or --on ray:HOST:6379 (a node's own address)",
        )
    return address


@contextlib.contextmanager
def connected(on: str, cpus: int) -> Iterator[bool]:
    """Inside the `with` block this process is a driver in the cluster. Yields whether the cluster was started for it,
    which ends with the block. `cpus`: how many CPUs a started cluster must have at least."""
    asked = address_of(on) or os.environ.get("RAY_ADDRESS", "")
    ray = _import_ray()
    if ray.is_initialized():  # the user's own program is a driver already
        yield False
        return
    address = asked if asked not in ("", "auto", "local") else _found_here(asked)
    if address:
        _reach(address)
        options: dict[str, Any] = {"address": address} | _our_code()
    else:
        options = {
            "address": "local",
            "num_cpus": max(os.cpu_count() or 1, cpus),
            "object_store_memory": STORE_BYTES,
            "include_dashboard": False,
            "_node_ip_address": LOOPBACK,
        }
    with contextlib.ExitStack() as stack:
        stack.callback(ray.shutdown)
        try:
            with _default_niceness():
                ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR", **options)
        except Exception as error:  # Ray raises many kinds, and documents none
            raise _cannot_connect(address, error) from error
        yield not address


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise DistBeliefError("Ray is not installed here", hint="pip install 'distbelief[ray]'") from error
    return ray


def _found_here(asked: str) -> str:
    """The address of the cluster on this machine; empty: none exists, or none is wanted."""
    if asked == "local":
        return ""
    from ray._private import services

    try:
        address = str(services.canonicalize_bootstrap_address("auto") or "")
    except ConnectionError:
        address = ""
    if address and not _answers(address):
        address = ""  # the address file of a dead cluster
    if not address and asked == "auto":
        raise DistBeliefError(
            "no Ray cluster runs on this machine, and RAY_ADDRESS is 'auto'",
            hint="start one with `ray start --head`, or unset RAY_ADDRESS to have one started for the run",
        )
    return address


@contextlib.contextmanager
def _default_niceness() -> Iterator[None]:
    """Ray would run the processes of a new cluster at nice 15, where other programs would starve them."""
    name = "RAY_worker_niceness"
    ours = name not in os.environ
    if ours:
        os.environ[name] = "0"
    try:
        yield
    finally:
        if ours:
            del os.environ[name]


def _our_code() -> dict[str, Any]:
    """Options that send this version of the package to all nodes. A job that was submitted to Ray has its environment
    already."""
    if _IN_JOB in os.environ:
        return {}
    return {"runtime_env": {"py_modules": [str(Path(__file__).parents[2])]}}


def _reach(address: str) -> None:
    if not _answers(address):
        raise DistBeliefError(
            f"no answer from {address}: is a Ray cluster running there?",
            hint="`ray status` on its head node says; the client's port (ray://) is 10001, a node's own 6379",
        )


def _answers(address: str) -> bool:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), REACH_S):
            return True
    except (OSError, ValueError):
        return False


def _cannot_connect(address: str, error: Exception) -> DistBeliefError:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    what = lines[0] if lines else type(error).__name__
    if not address:
        return DistBeliefError(f"cannot start a Ray cluster here: {what}", details=str(error))
    hint = "Python and Ray must be the same versions here and there; Ray's logs on its head node may say more"
    if "grpc" in what:
        hint = "pip install 'distbelief[ray]' brings the Ray client"
    return DistBeliefError(f"cannot connect to the Ray cluster at {address}: {what}", hint=hint, details=str(error))


# --- its nodes -------------------------------------------------------------------------------------------------------


def nodes(ours: frozenset[str]) -> list[Node]:
    """The nodes that are alive. `ours`: nodes with an agent of this run."""
    import ray

    free = _asked_of_head(_free)
    found = []
    for node in ray.nodes():
        if not node["Alive"] or node["NodeID"] not in free:
            continue
        has, left = node["Resources"], free[node["NodeID"]]
        found.append(
            Node(
                id=node["NodeID"],
                name=node["NodeManagerHostname"],
                cpus=has.get("CPU", 0.0),
                free_cpus=left.get("CPU", 0.0),
                gpus=has.get("GPU", 0.0),
                free_gpus=left.get("GPU", 0.0),
                is_ours=node["NodeID"] in ours,
            )
        )
    return found


def grows() -> bool:
    """Whether the cluster has an autoscaler, which adds nodes on demand."""
    import ray

    try:
        return bool(_asked_of_head(_is_scaled))
    except ray.exceptions.RayError:  # unknown: assume that no nodes are added
        return False


def _asked_of_head(question: Callable[[], Any]) -> Any:
    """Runs the question in the cluster, because a driver that came through the Ray client cannot ask. The question runs
    on the head node: for some seconds Ray still treats a dead node as alive, and a task sent there gets no answer."""
    import ray

    return ray.get(ray.remote(num_cpus=0)(question).options(**on_head()).remote())


def on_head() -> dict[str, Any]:
    """Options that put an actor or a task on the head node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    head = _head_node()
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(head, soft=False)} if head else {}


def _head_node() -> str:
    """The id of the node with the cluster's own state. An actor on it lives as long as the cluster."""
    import ray

    for node in ray.nodes():
        if node["Alive"] and "node:__internal_head__" in node["Resources"]:
            return str(node["NodeID"])
    return ""


def _is_scaled() -> bool:
    """An autoscaler has names for the kinds of its nodes; without one, each node is of its own kind. Two versions of
    the autoscaler are in use, and each reports the kinds elsewhere."""
    import ray
    from ray.autoscaler.v2.sdk import get_cluster_status
    from ray.experimental.internal_kv import _internal_kv_get

    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    kinds = {node.node_id: node.ray_node_type_name for node in [*status.active_nodes, *status.idle_nodes]}
    if told := _internal_kv_get("__autoscaling_status"):
        kinds |= (json.loads(told).get("autoscaler_report") or {}).get("node_type_mapping") or {}
    return any(kind not in ("", f"node_{node}") for node, kind in kinds.items())


def _free() -> dict[str, dict[str, float]]:
    """The free resources of each node."""
    from ray._private.state import available_resources_per_node

    return dict(available_resources_per_node())
