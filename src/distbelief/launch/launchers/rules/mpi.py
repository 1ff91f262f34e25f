"""A place given by mpirun: Open MPI's variables, or those of MPICH's Hydra, which Intel MPI and others have too."""

from __future__ import annotations

from collections.abc import Mapping

from distbelief.errors import DistBeliefError
from distbelief.launch.launchers.rules import slurm
from distbelief.launch.launchers.rules.place import Place, number

_OPEN = "OMPI_COMM_WORLD_"
_START = "start it with mpirun: `mpirun -n 4 distbelief train job.py --on mpi`"


def place(environment: Mapping[str, str]) -> Place:
    """
    >>> place({"PMI_RANK": "3", "PMI_SIZE": "4", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}).hosts
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
        return slurm.place(environment, launcher="mpi")  # srun --mpi=pmi2 does what mpirun does elsewhere
    if by_hydra:
        index, count = _hydra_ranks(environment)
        local = _ranks(environment, "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
        return Place("mpi", "", index, count, *local)
    if "SLURM_STEP_ID" in environment:
        return slurm.place(environment, launcher="mpi")
    raise DistBeliefError("--on mpi, but no mpirun has started this process", hint=_START)


def _ranks(environment: Mapping[str, str], rank: str, size: str) -> tuple[int, int]:
    return number(environment, rank), number(environment, size)


def _hydra_ranks(environment: Mapping[str, str]) -> tuple[int, int]:
    return _ranks(environment, "PMI_RANK", "PMI_SIZE")


def _open_job(environment: Mapping[str, str]) -> str:
    """The job's number comes from a process number and returns one day; where mpirun listens makes it one of a kind."""
    names = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "OMPI_MCA_orte_hnp_uri")
    return " ".join(environment[name] for name in names if name in environment)
