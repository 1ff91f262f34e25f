"""Chooses the transport of a generation by its name, and says what each transport requires. Opens no connection.

| name | members are | each member's state |
|---|---|---|
| shm | on one host | shared by all, in the host's memory |
| slots | on one host | its own, on its accelerator; shared memory carries gradients only |
| gloo | on any hosts | its own |
| nccl | on any hosts, each with a GPU that no other has | its own |

A user chooses shm, gloo, nccl, or auto. slots follows from shm where the state is on accelerators.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

Wished = Literal["auto", "shm", "gloo", "nccl"]

FOR_PARTS: str = "gloo"
"""The transport of members that hold parts of a divided model and send each other tensors."""
INSTEAD = 'use transport "auto" or "gloo"'
"""The hint where the wished transport is impossible."""


def choose(wished: str, hosts: Sequence[str], gpus: Sequence[str], on_accelerators: bool) -> tuple[str, str]:
    """(transport, why it is impossible). `hosts`: the members' hosts, each once. `gpus`: each member's GPU, or "".

    A run never changes between shm and slots, because a new member would look for the state in the wrong place.

    >>> choose("auto", ["a"], ["", ""], False), choose("auto", ["a"], ["gpu 0", "gpu 0"], True)
    (('shm', ''), ('slots', ''))
    >>> choose("auto", ["a", "b"], ["gpu 0", "gpu 1"], True)
    ('nccl', '')
    """
    each_its_own = len(gpus) > 1 and all(gpus) and len(set(gpus)) == len(gpus)
    if wished == "auto":
        wished = "nccl" if each_its_own else "shm" if len(hosts) == 1 else "gloo"
    if shares_memory(wished) and len(hosts) > 1:
        return wished, f"shared memory was asked for, but the workers are on {len(hosts)} hosts: {', '.join(hosts)}"
    if needs_gpus(wished) and len(gpus) > 1 and not each_its_own:
        return wished, "NCCL was asked for, and it wants a GPU for each worker: here some share one, or have none"
    return ("slots" if wished == "shm" and on_accelerators else wished), ""


def shares_memory(transport: str) -> bool:
    """Whether all members are on one host and write into the same memory. If so, a member that does not answer must be
    killed before the others go on."""
    return transport in ("shm", "slots")


def shares_state(transport: str) -> bool:
    """Whether all members train one state in their host's memory, so that none can compute on an accelerator."""
    return transport == "shm"


def needs_gpus(transport: str) -> bool:
    """Whether every member must have a GPU that no other member has."""
    return transport == "nccl"
