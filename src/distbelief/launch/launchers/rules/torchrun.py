"""A place given by torchrun, or by whoever sets the variables of torch's `env://`, as Kubernetes operators do."""

from __future__ import annotations

from collections.abc import Mapping

from distbelief.errors import DistBeliefError
from distbelief.launch.launchers.rules.place import Place, number


def place(environment: Mapping[str, str]) -> Place:
    """Without LOCAL_RANK and LOCAL_WORLD_SIZE, as operators leave it, each process has a host to itself."""
    if "RANK" not in environment:
        raise DistBeliefError(
            "--on torchrun, but the variable RANK is not set",
            hint="start it with torchrun: `torchrun --nproc_per_node 2 -m distbelief train job.py --on torchrun`",
        )
    index, count = number(environment, "RANK"), number(environment, "WORLD_SIZE")
    local_names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    local = (0, 1)
    if any(name in environment for name in local_names):
        local = (number(environment, local_names[0]), number(environment, local_names[1]))
    host, port = environment.get("MASTER_ADDR", ""), number(environment, "MASTER_PORT")
    if not host or not 0 < port < 1 << 16:
        raise DistBeliefError(
            f"MASTER_ADDR={host!r} and MASTER_PORT={port} are no place to meet",
            hint="torchrun sets them; with several hosts give it --rdzv_endpoint or --master_addr and --master_port",
        )
    meeting = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    of_the_launch = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    job = " ".join([meeting, *(environment.get(name, "") for name in of_the_launch)])
    taken = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place("torchrun", job, index, count, *local, meeting=meeting, meeting_is_taken=taken)
