"""Runs on processes that a launcher has started: mpirun, srun, torchrun, or whoever sets TF_CONFIG.

The first process leads the run. On every host one process runs the agent, with as many workers as the launcher has
started processes there; the others only lend their cores and wait. So members are nobody's ranks: one that dies is
replaced, and the launcher does not notice.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from distbelief.engines.allocation import SOURCES, Environment, Place
from distbelief.engines.allocation.asked import Asked
from distbelief.engines.allocation.hydra import launch_named_by
from distbelief.engines.house import House, Lodger
from distbelief.engines.invitation import Invitation
from distbelief.engines.launch import LOOPBACK_ONLY, Launch
from distbelief.engines.meeting import mpi
from distbelief.engines.meeting.address import Address, Board
from distbelief.engines.meeting.folder import Folder
from distbelief.engines.meeting.interface import Meeting, Word, invited
from distbelief.engines.signals import shelter
from distbelief.errors import DistBeliefError
from distbelief.strategies import servers_of

LINGER_S = 5.0
"""A launcher ends all processes when one has failed: the first one, which says why, is to be the first to end."""


def find_place(asked: Asked, environment: Environment) -> Place | None:
    """Ours. None: there is nothing to do for this process."""
    place = SOURCES[asked.on](environment)
    if place is None:
        return None
    if not place.job:
        place = replace(place, job=_job_of_hydra())
    return place.with_workers(asked.workers)


def run_folder(asked: Asked, place: Place) -> Path:
    """The run directory: all processes must find the same one."""
    tag = hashlib.blake2b(place.job.encode(), digest_size=4).hexdigest()
    return asked.run_dir or Path("runs") / f"{asked.name}-{place.launcher}-{tag}"


# --- the processes that do not lead ----------------------------------------------------------------------------------


def follow(asked: Asked, place: Place) -> int:
    """Take part until the run ends. Returns the exit status. What there is to say the first process says."""
    if place.is_signalled_as_one or not place.hosts:
        shelter()
    return _host(asked, place) if place.hosts else _lodge(place)


def _lodge(place: Place) -> int:
    lodger = Lodger(place)
    if _meets_by_mpi(place):  # in which all processes take part
        mpi.Mpi(place).wait()
    return lodger.wait()


def _host(asked: Asked, place: Place) -> int:
    status = 1
    house = House(place)
    try:
        os.sched_setaffinity(0, house.cores)
        status = _take_part(asked, place)
    finally:
        house.tell(status)
    return status


def _take_part(asked: Asked, place: Place) -> int:
    meeting = _meeting(asked, place)
    assert meeting is not None  # only the first process can be without other hosts
    word = meeting.wait()
    meeting.close()
    if word.invitation is None:
        return word.over
    from distbelief.engines.invited import serve_host

    servers = None if not place.servers else -1 if place.servers_here else 0
    status = serve_host(word.invitation, place.workers_here, place.host, servers=servers, say=lambda text: None)
    if status:
        time.sleep(LINGER_S)
    return status


# --- the process that leads ------------------------------------------------------------------------------------------


class Leading:
    """What the first process's run has of its launcher."""

    def __init__(self, asked: Asked, place: Place, meeting: Meeting | None) -> None:
        self.on = asked.on
        self.run_dir = run_folder(asked, place)
        self.workers = place.workers
        self._listen = asked.listen
        self._place = place
        self._meeting = meeting
        self._told = False

    def arrange(self, launch: Launch) -> Launch:
        place, meeting = self._place, self._meeting
        return replace(
            launch,
            on=self.on,
            shelters=place.is_signalled_as_one,
            local_workers=place.workers_here,
            room=place.workers_here,
            local_servers=place.first_servers(servers_of(launch.strategy)),
            host=place.host,
            is_open=meeting is not None,
            listen=self._listen or (meeting.listen() if meeting else LOOPBACK_ONLY),
            key_file=str(meeting.key_file() or "") if meeting else "",
        )

    def announce(self, invitation: Invitation) -> None:
        if self._meeting:
            self._meeting.tell(invited(invitation))
            self._told = True

    def end(self, status: int) -> None:
        if self._meeting and not self._told:
            with contextlib.suppress(DistBeliefError):  # what was wrong before is what matters
                self._meeting.tell(Word(over=status))
        if self._meeting:
            self._meeting.close()


@contextlib.contextmanager
def leading(asked: Asked, place: Place) -> Iterator[Leading]:
    """Whatever happens inside, the other processes hear of it and end."""
    status = 1
    house = House(place)
    try:
        os.sched_setaffinity(0, house.cores)
        lead = Leading(asked, place, _meeting(asked, place))
        try:
            yield lead
            status = 0
        except DistBeliefError as error:
            status = error.exit_code
            raise
        finally:
            lead.end(status)
    finally:
        house.tell(status)


def _meeting(asked: Asked, place: Place) -> Meeting | None:
    """How this launch's hosts meet; None: there is only one."""
    if place.is_alone:
        return None
    if place.meeting:
        if not asked.key_file:
            raise DistBeliefError(
                f"{place.launcher} started this run on several hosts: they need a key to trust each other",
                hint="`distbelief keys new FILE`, copy the file to every host, and give --key FILE",
            )
        if place.meeting_is_taken:
            return Board(place.meeting, place.job, Path(asked.key_file))
        return Address(place.meeting, Path(asked.key_file))
    if _meets_by_mpi(place):
        return mpi.Mpi(place)
    return Folder(run_folder(asked, place), place.job, place.peers)


def _meets_by_mpi(place: Place) -> bool:
    return place.launcher == "mpi" and not place.is_alone and mpi.is_installed()


def _job_of_hydra() -> str:
    """MPICH's mpirun has a process on each host, above ours, that knows."""
    pid = os.getppid()
    while pid > 1:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            above = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1]
        except OSError:
            break
        if found := launch_named_by(command):
            return found
        pid = int(above)
    raise DistBeliefError(
        "this process cannot find the mpirun that has started it", hint="use Open MPI, Slurm or torchrun instead"
    )
