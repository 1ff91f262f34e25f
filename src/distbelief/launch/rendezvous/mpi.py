"""Meeting by MPI itself, where mpi4py is installed: the first process broadcasts its word to all.

MPI is over as soon as the word is heard: what comes then is no MPI program, and mpirun does not mind its deaths.
"""

from __future__ import annotations

import importlib.util
import os
import time
from typing import Any

import msgspec

from distbelief.control.addresses import tcp
from distbelief.errors import DistBeliefError
from distbelief.launch.launchers.rules import Place
from distbelief.launch.rendezvous.interface import Word
from distbelief.launch.rendezvous.ownaddress import address_for

_BYTES = 1024
_LOOK_S = 0.05


def is_installed() -> bool:
    return importlib.util.find_spec("mpi4py") is not None


class Mpi:
    """All processes of the launch make one, and either `tell` or `wait`, once."""

    def __init__(self, place: Place) -> None:
        import mpi4py

        if "OMPI_COMM_WORLD_RANK" in os.environ:  # where several libraries are installed, that of this mpirun
            os.environ.setdefault("MPI4PY_MPIABI", "openmpi")
        mpi4py.rc.initialize = False
        mpi4py.rc.finalize = False
        try:
            from mpi4py import MPI
        except (ImportError, RuntimeError) as error:
            raise DistBeliefError(
                f"mpi4py cannot find the MPI library: {error}",
                hint="install it on every host, or uninstall mpi4py: without it the hosts meet in the run directory",
            ) from error
        self._mpi: Any = MPI
        MPI.Init()
        world = MPI.COMM_WORLD
        if (world.Get_rank(), world.Get_size()) != (place.index, place.count):
            raise DistBeliefError(
                f"mpi4py takes this for process {world.Get_rank()} of {world.Get_size()}, mpirun for {place.index} of "
                f"{place.count}: it uses another MPI library",
                hint="install mpi4py for the library of this mpirun, or uninstall it",
            )

    def listen(self) -> str:
        return tcp(address_for([]))

    def key_file(self) -> None:
        return None

    def known(self) -> None:
        return None

    def tell(self, word: Word) -> None:
        self._broadcast(msgspec.json.encode(word))

    def wait(self) -> Word:
        return msgspec.json.decode(self._broadcast(b""), type=Word)

    def _broadcast(self, content: bytes) -> bytes:
        buffer = bytearray(content.ljust(_BYTES))
        request = self._mpi.COMM_WORLD.Ibcast([buffer, self._mpi.BYTE], root=0)
        while not request.Test():  # a plain one would keep a core busy
            time.sleep(_LOOK_S)
        self._mpi.Finalize()  # mpirun takes whoever ends without it for dead, and ends all others
        return bytes(buffer).strip()

    def close(self) -> None:
        pass
