"""Which place a launcher gave this process, from the variables that it left: one file per launcher. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from distbelief.launch.launchers.rules import mpi, slurm, tfconfig, torchrun
from distbelief.launch.launchers.rules.place import Place

Environment = Mapping[str, str]

SOURCES: dict[str, Callable[[Environment], Place | None]] = {
    "mpi": mpi.place,
    "slurm": slurm.place,
    "torchrun": torchrun.place,
    "tf_config": tfconfig.place,
}
"""By the name that `--on` takes. None: this process has nothing to do in a run of ours."""

__all__ = ["SOURCES", "Environment", "Place"]
