"""The place that a launcher gave this process, from the environment variables that the launcher set. Pure.

One function per launcher: mpirun (Open MPI, or MPICH's Hydra, whose variables Intel MPI sets too), srun, torchrun, and
TF_CONFIG. A launcher is found by the name that `--on` takes in `BY_LAUNCHER`, at the end.
"""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from distbelief.errors import DistBeliefError
from distbelief.launch.launchers.rules.place import Place, is_number, number

Environment = Mapping[str, str]


# --- mpirun -----------------------------------------------------------------------------------------------------------


_OPEN = "OMPI_COMM_WORLD_"
_START = "start it with mpirun: `mpirun -n 4 distbelief train job.py --on mpi`"


def from_mpi(environment: Environment) -> Place:
    """
    >>> from_mpi({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}).hosts
    False
    """
    by_open = _OPEN + "RANK" in environment
    by_hydra = "PMI_RANK" in environment
    if by_open and by_hydra and _ranks(environment, _OPEN + "RANK", _OPEN + "SIZE") != _hydra_ranks(environment):
        raise DistBeliefError(
            "Open MPI and MPICH have both started this process, and disagree about its rank", hint="use one of them"
        )
    if by_open:
        index, count = _ranks(environment, _OPEN + "RANK", _OPEN + "SIZE")
        local = _ranks(environment, _OPEN + "LOCAL_RANK", _OPEN + "LOCAL_SIZE")
        return Place("mpi", _open_job(environment), index, count, *local)
    if by_hydra and "MPI_LOCALRANKID" not in environment and "SLURM_LOCALID" in environment:
        return from_slurm(environment, launcher="mpi")  # srun --mpi=pmi2 does what mpirun does elsewhere
    if by_hydra:
        index, count = _hydra_ranks(environment)
        local = _ranks(environment, "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
        return Place("mpi", "", index, count, *local)
    if "SLURM_STEP_ID" in environment:
        return from_slurm(environment, launcher="mpi")
    raise DistBeliefError("--on mpi, but no mpirun has started this process", hint=_START)


def _ranks(environment: Environment, rank: str, size: str) -> tuple[int, int]:
    return number(environment, rank), number(environment, size)


def _hydra_ranks(environment: Environment) -> tuple[int, int]:
    return _ranks(environment, "PMI_RANK", "PMI_SIZE")


def _open_job(environment: Environment) -> str:
    """The job's number comes from a process number, which can occur again; the address of mpirun makes it unique."""
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri")
    return " ".join(environment[name] for name in names if name in environment)


_SAYS = ("--control-port", "--upstream-host", "--upstream-port")


def launch_named_by(command: Sequence[str]) -> str:
    """The name of the launch from the command line of a parent process; empty: the process is not Hydra's.

    >>> launch_named_by(["/usr/bin/hydra_pmi_proxy", "--control-port", "node1:42285", "--proxy-id", "3"])
    'node1:42285'
    """
    if not command or "hydra" not in command[0].rpartition("/")[2]:
        return ""
    return " ".join(value for name, value in itertools.pairwise(command) if name in _SAYS)


# --- srun -------------------------------------------------------------------------------------------------------------


_COUNTS = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?")


def from_slurm(environment: Environment, launcher: str = "slurm") -> Place:
    if "SLURM_JOB_ID" not in environment:
        raise DistBeliefError(
            "--on slurm, but this is no Slurm job",
            hint="`distbelief slurm job.py --nodes 2 > run.sbatch` writes a job for sbatch",
        )
    if "SLURM_STEP_ID" not in environment:
        raise DistBeliefError(
            "--on slurm in a batch script or shell of the job: here is one process, and srun has not started any",
            hint="put srun in front: `srun distbelief train job.py --on slurm`",
        )
    index, node = number(environment, "SLURM_PROCID"), number(environment, "SLURM_NODEID")
    count = number(environment, _step_or_job(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))
    nodes = hosts_in(environment[_step_or_job(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")])
    tasks = tasks_per_node(environment[_step_or_job(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")])
    if len(tasks) != len(nodes) or sum(tasks) != count or node >= len(nodes):
        raise DistBeliefError(
            f"Slurm's variables contradict each other: {count} tasks, {len(nodes)} nodes, tasks per node {tasks}, "
            f"this is node {node}",
            hint="variables of another job in the shell? start it with srun from a clean one",
        )
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
    return Place(
        launcher,
        "slurm " + ".".join(environment.get(name, "0") for name in names),
        index,
        count,
        number(environment, "SLURM_LOCALID"),
        tasks[node],
        host=nodes[node],
        peers=tuple(nodes),
    )


def tasks_per_node(text: str) -> list[int]:
    """
    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    found: list[int] = []
    for part in text.split(","):
        match = _COUNTS.fullmatch(part.strip())
        if match is None or int(match[2] or 1) > MOST_HOSTS:
            raise DistBeliefError(f"SLURM_TASKS_PER_NODE={text!r} cannot be read", hint="it looks like 2(x3),1")
        found += [int(match[1])] * int(match[2] or 1)
    return found


def _step_or_job(environment: Environment, of_step: str, of_job: str) -> str:
    """The name of the variable that is set: the step's if possible, else the job's."""
    for name in (of_step, of_job):
        if name in environment:
            return name
    raise DistBeliefError(f"neither {of_step} nor {of_job} is set", hint="was this process started by srun?")


# --- Slurm's short form of a list of hosts ----------------------------------------------------------------------------


MOST_HOSTS = 100_000  # a larger number is a typing error, and would fill the memory
_PARTS = re.compile(r"(?:[^\[\],\s]+|\[[^\[\]]*\])+")
_PIECES = re.compile(r"\[([^\[\]]*)\]|([^\[\]]+)")
_RANGE = re.compile(r"(\d{1,9})(?:-(\d{1,9}))?")


def hosts_in(text: str) -> list[str]:
    """The hosts in order, with the leading zeros of their numbers.

    >>> hosts_in("node[01-03,7],gpu2"), hosts_in("r[1-2]n[0-1]")
    (['node01', 'node02', 'node03', 'node7', 'gpu2'], ['r1n0', 'r1n1', 'r2n0', 'r2n1'])
    """
    parts = _PARTS.findall(text)
    if not parts or ",".join(parts) != text.strip():
        raise _unreadable(text)
    hosts: list[str] = []
    for part in parts:
        choices = [_numbers(inside, text) if not name else [name] for inside, name in _PIECES.findall(part)]
        if len(hosts) + math.prod(len(choice) for choice in choices) > MOST_HOSTS:
            raise _unreadable(text)
        hosts += ["".join(pieces) for pieces in itertools.product(*choices)]
    return hosts


def _numbers(inside: str, text: str) -> list[str]:
    numbers: list[str] = []
    for part in inside.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            raise _unreadable(text)
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < first + MOST_HOSTS:
            raise _unreadable(text)
        numbers += [str(value).zfill(len(match[1])) for value in range(first, last + 1)]
    return numbers


def _unreadable(text: str) -> DistBeliefError:
    return DistBeliefError(f"the list of nodes {text!r} cannot be read", hint="it looks like node[01-03,7],gpu2")


# --- torchrun ---------------------------------------------------------------------------------------------------------


def from_torchrun(environment: Environment) -> Place:
    """Without LOCAL_RANK and LOCAL_WORLD_SIZE, which Kubernetes operators do not set, each process has its own host."""
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
            f"MASTER_ADDR={host!r} and MASTER_PORT={port} are no address of the first process",
            hint="torchrun sets them; with several hosts give it --rdzv_endpoint or --master_addr and --master_port",
        )
    address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    of_the_launch = ("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT")
    job = " ".join([address, *(environment.get(name, "") for name in of_the_launch)])
    taken = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return Place("torchrun", job, index, count, *local, address=address, address_is_taken=taken)


# --- TF_CONFIG --------------------------------------------------------------------------------------------------------


_KINDS = ("chief", "worker", "ps")
_OLD_CHIEF = "master"  # what TensorFlow 1 called it


def from_tf_config(environment: Environment) -> Place | None:
    """None: this is an evaluator, which has nothing to do, since the run itself evaluates.

    >>> cluster = '"cluster": {"worker": ["a:2222", "b:2222"], "ps": ["b:2223"]}'
    >>> found = from_tf_config({"TF_CONFIG": '{%s, "task": {"type": "worker", "index": 1}}' % cluster})
    >>> found.address, found.index, found.local_count, found.workers_here, found.servers_here
    ('a:2222', 1, 2, 1, 1)
    """
    description = _parsed(environment.get("TF_CONFIG"))
    tasks = _tasks(description)
    kind, index = _own_task(description)
    if kind == "evaluator":
        return None
    if (kind, index) not in tasks:
        raise _unusable(f"it says that this is {kind} {index}, but there is none in its cluster")
    order = list(tasks)
    here = [task for task in order if _host(tasks[task]) == _host(tasks[kind, index])]
    return Place(
        "tf_config",
        json.dumps(description["cluster"], sort_keys=True),
        order.index((kind, index)),
        len(order),
        here.index((kind, index)),
        len(here),
        host=_host(tasks[kind, index]),
        peers=tuple(dict.fromkeys(_host(address) for address in tasks.values())),
        address=tasks[order[0]],
        workers=sum(kind != "ps" for kind, _ in order),
        workers_here=sum(kind != "ps" for kind, _ in here),
        servers_here=sum(kind == "ps" for kind, _ in here),
        servers=sum(kind == "ps" for kind, _ in order),
    )


def _parsed(text: str | None) -> dict[str, Any]:
    if text is None:
        raise DistBeliefError(
            "--on tf_config, but the variable TF_CONFIG is not set",
            hint='it looks like {"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}',
        )
    try:
        description = json.loads(text)
    except ValueError as error:
        raise _unusable(f"it is no JSON: {error}") from None
    if not isinstance(description, dict) or not isinstance(description.get("cluster"), dict):
        raise _unusable("there is no cluster in it")
    return description


def _tasks(description: dict[str, Any]) -> dict[tuple[str, int], str]:
    """(type, index) -> HOST:PORT of every task that takes part; the leading task is the first."""
    cluster = {_KINDS[0] if kind == _OLD_CHIEF else kind: found for kind, found in description["cluster"].items()}
    unknown = sorted(set(cluster) - {*_KINDS, "evaluator"})
    if unknown:
        raise _unusable(f"it has tasks of type {unknown[0]!r}; known are chief, worker, ps and evaluator")
    tasks: dict[tuple[str, int], str] = {}
    for kind in _KINDS:
        found = cluster.get(kind, [])
        addresses = dict(enumerate(found)) if isinstance(found, list) else found
        if not isinstance(addresses, dict) or not all(_is_address(address) for address in addresses.values()):
            raise _unusable(f"the {kind} tasks are no list of addresses such as host:2222")
        if not all(is_number(str(number)) for number in addresses):
            raise _unusable(f"the {kind} tasks are not numbered")
        tasks |= {(kind, int(number)): addresses[number] for number in sorted(addresses, key=int)}
    if not any(kind != "ps" for kind, _ in tasks):
        raise _unusable("it has no chief and no worker")
    if sum(kind == "chief" for kind, _ in tasks) > 1:
        raise _unusable("it has more than one chief")
    twice = [address for address in tasks.values() if list(tasks.values()).count(address) > 1]
    if twice:
        raise _unusable(f"two tasks have the address {twice[0]}")
    return tasks


def _own_task(description: dict[str, Any]) -> tuple[str, int]:
    task = description.get("task")
    kind, index = (task.get("type"), task.get("index", 0)) if isinstance(task, dict) else (None, None)
    if not isinstance(kind, str) or not is_number(str(index)):
        raise _unusable("it does not say which task this is (type and index)")
    return (_KINDS[0] if kind == _OLD_CHIEF else kind), int(str(index))


def _is_address(text: object) -> bool:
    if not isinstance(text, str):
        return False
    host, _, port = text.rpartition(":")
    return bool(host) and is_number(port) and 0 < int(port) < 1 << 16


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _unusable(what: str) -> DistBeliefError:
    return DistBeliefError(
        f"TF_CONFIG cannot be used: {what}",
        hint='it looks like {"cluster": {"worker": ["a:2222", "b:2222"]}, "task": {"type": "worker", "index": 0}}',
    )


# --- all of them ------------------------------------------------------------------------------------------------------

BY_LAUNCHER: dict[str, Callable[[Environment], Place | None]] = {
    "mpi": from_mpi,
    "slurm": from_slurm,
    "torchrun": from_torchrun,
    "tf_config": from_tf_config,
}
"""By the name that `--on` takes. A function returns None if this process has nothing to do in the run."""
