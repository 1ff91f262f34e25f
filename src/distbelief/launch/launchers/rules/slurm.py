"""A place given by srun. The variables of the step count, which may be smaller than the job that it runs in."""

from __future__ import annotations

import re
from collections.abc import Mapping

from distbelief.errors import DistBeliefError
from distbelief.launch.launchers.rules.nodelist import MOST_HOSTS, hosts_in
from distbelief.launch.launchers.rules.place import Place, number

_COUNTS = re.compile(r"(\d{1,9})(?:\(x(\d{1,9})\))?")


def place(environment: Mapping[str, str], launcher: str = "slurm") -> Place:
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
    count = number(environment, _step(environment, "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"))
    nodes = hosts_in(environment[_step(environment, "SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")])
    tasks = tasks_per_node(environment[_step(environment, "SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")])
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


def _step(environment: Mapping[str, str], of_step: str, of_job: str) -> str:
    """The name that is there, the step's if it can be."""
    for name in (of_step, of_job):
        if name in environment:
            return name
    raise DistBeliefError(f"neither {of_step} nor {of_job} is set", hint="was this process started by srun?")
