"""Reaching a Ray cluster, or starting one here; and what its nodes have.

Whatever goes wrong is said in words, and soon: Ray itself tries for minutes to reach an address where nobody is.
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
"""Of a cluster that we start. Ray takes 127.0.0.1 for "whatever address this machine has"."""
STORE_BYTES = 128 << 20
"""Ray's object store in a cluster that we start: next to nothing goes through it."""
_IN_JOB = "RAY_JOB_CONFIG_JSON_ENV_VAR"  # `ray job submit` tells its driver by this which environment it has


def address_of(on: str) -> str:
    """The address in what --on says; empty: whichever is found.

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
    """While this lasts, this process is a driver in the cluster. Tells whether we have started it, to end it again.
    `cpus`: what one that we start must have at least."""
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
            with _as_important_as_others():
                ray.init(namespace=NAMESPACE, log_to_driver=False, logging_level="ERROR", **options)
        except Exception as error:  # of many kinds, none of which Ray documents
            raise _cannot_connect(address, error) from error
        yield not address


def _import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise DistBeliefError("Ray is not installed here", hint="pip install 'distbelief[ray]'") from error
    return ray


def _found_here(asked: str) -> str:
    """The cluster that runs on this machine already; empty: there is none, or none is wanted."""
    if asked == "local":
        return ""
    from ray._private import services

    try:
        address = str(services.canonicalize_bootstrap_address("auto") or "")
    except ConnectionError:
        address = ""
    if address and not _answers(address):
        address = ""  # the note of a cluster that has died
    if not address and asked == "auto":
        raise DistBeliefError(
            "no Ray cluster runs on this machine, and RAY_ADDRESS is 'auto'",
            hint="start one with `ray start --head`, or unset RAY_ADDRESS to have one started for the run",
        )
    return address


@contextlib.contextmanager
def _as_important_as_others() -> Iterator[None]:
    """Ray runs the processes of a cluster that is started now at nice 15: next to anything else they would starve."""
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
    """All nodes run this version of the package, whatever they have installed. A job that was submitted to Ray has its
    environment from there."""
    if _IN_JOB in os.environ:
        return {}
    return {"runtime_env": {"py_modules": [str(Path(__file__).parents[2])]}}


def _reach(address: str) -> None:
    if not _answers(address):
        raise DistBeliefError(
            f"nobody answers at {address}: is a Ray cluster running there?",
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
    """The nodes that are alive. `ours`: those where an agent of the run is."""
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
    """Whether an autoscaler adds nodes when they are asked for."""
    import ray

    try:
        return bool(_asked_of_head(_is_scaled))
    except ray.exceptions.RayError:  # no way to find out: then there is what there is
        return False


def _asked_of_head(question: Callable[[], Any]) -> Any:
    """Asked in the cluster: a driver that came through the Ray client cannot. And of the head node: a node that has
    just died is taken for alive for some seconds, and would not answer."""
    import ray

    return ray.get(ray.remote(num_cpus=0)(question).options(**on_head()).remote())


def on_head() -> dict[str, Any]:
    """Options that put an actor or a task on the head node."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    head = _head_node()
    return {"scheduling_strategy": NodeAffinitySchedulingStrategy(head, soft=False)} if head else {}


def _head_node() -> str:
    """The id of the node that has the cluster's own state: whoever is there lives as long as the cluster does."""
    import ray

    for node in ray.nodes():
        if node["Alive"] and "node:__internal_head__" in node["Resources"]:
            return str(node["NodeID"])
    return ""


def _is_scaled() -> bool:
    """An autoscaler knows the kinds of its nodes by name; without one, each is of a kind of its own. There are two
    autoscalers in use, and each tells it elsewhere."""
    import ray
    from ray.autoscaler.v2.sdk import get_cluster_status
    from ray.experimental.internal_kv import _internal_kv_get

    status = get_cluster_status(ray.get_runtime_context().gcs_address)
    kinds = {node.node_id: node.ray_node_type_name for node in [*status.active_nodes, *status.idle_nodes]}
    if told := _internal_kv_get("__autoscaling_status"):
        kinds |= (json.loads(told).get("autoscaler_report") or {}).get("node_type_mapping") or {}
    return any(kind not in ("", f"node_{node}") for node, kind in kinds.items())


def _free() -> dict[str, dict[str, float]]:
    """What nobody has taken, by node."""
    from ray._private.state import available_resources_per_node

    return dict(available_resources_per_node())
