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
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from distbelief.errors import DistBeliefError, RunInterrupted
from distbelief.launch.invitation import Invitation
from distbelief.launch.launch import LOOPBACK_ONLY, Launch
from distbelief.launch.launchers.failednotice import still_missing, turn_away
from distbelief.launch.launchers.hydra import launch_named_by
from distbelief.launch.launchers.onehost import House, Lodger
from distbelief.launch.launchers.rules import SOURCES, Environment, Place
from distbelief.launch.launchers.rules.asked import Asked
from distbelief.launch.rendezvous import mpi
from distbelief.launch.rendezvous.address import Address, Board
from distbelief.launch.rendezvous.folder import Folder
from distbelief.launch.rendezvous.interface import Meeting, Word, invited
from distbelief.launch.signals import shelter

LINGER_S = 5.0
"""A launcher ends all processes when one has failed: the first one, which says why, is to be the first to end."""
FAREWELL_S = 60.0
"""How long hosts that have not come yet are told, when they come, that there is no run any more."""
INTERRUPTED_S = 5.0
"""Likewise when somebody wants it to end now."""

Say = Callable[[str], None]


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
    from distbelief.launch.invited import serve_host

    servers = None if not place.servers else -1 if place.servers_here else 0
    status = serve_host(word.invitation, place.workers_here, place.host, servers=servers, say=lambda text: None)
    if status:
        time.sleep(LINGER_S)
    return status


# --- the process that leads ------------------------------------------------------------------------------------------


class Leading:
    """What the first process's run has of its launcher."""

    def __init__(self, asked: Asked, place: Place, meeting: Meeting | None, say: Say) -> None:
        self.on = asked.on
        self.run_dir = run_folder(asked, place)
        self.workers = place.workers
        self._listen = asked.listen
        self._place = place
        self._meeting = meeting
        self._say = say
        self._since = time.time()
        self._invitation: Invitation | None = None

    def arrange(self, launch: Launch) -> Launch:
        place, meeting = self._place, self._meeting
        return launch.placed(
            on=self.on,
            shelters=place.is_signalled_as_one,
            local_workers=place.workers_here,
            room=place.workers_here,
            local_servers=place.first_servers(launch.strategy.servers),
            host=place.host,
            is_open=meeting is not None,
            listen=self._listen or (meeting.listen() if meeting else LOOPBACK_ONLY),
            key_file=str(meeting.key_file() or "") if meeting else "",
        )

    def announce(self, invitation: Invitation) -> None:
        if self._meeting:
            self._meeting.tell(invited(invitation))
            self._invitation = invitation

    def end(self, status: int, error: DistBeliefError | None = None) -> None:
        """Whoever of the others has not come yet hears of it."""
        if self._meeting is None:
            return
        with contextlib.suppress(DistBeliefError):  # what was wrong before is what matters
            invitation = self._invitation or self._meeting.known()
            if status and invitation:
                self._turn_away(invitation, error)
            elif self._invitation is None:
                self._meeting.tell(Word(over=status))
        self._meeting.close()

    def _turn_away(self, invitation: Invitation, error: DistBeliefError | None) -> None:
        missing = still_missing(self._place, self.run_dir, self._since)
        if missing.is_nobody:
            return
        reason = error.message if error else "the process that led it has failed"
        patience_s = INTERRUPTED_S if isinstance(error, RunInterrupted) else FAREWELL_S
        self._say(f"{reason}; waiting up to {patience_s:.0f} s to tell {missing.in_words}")
        turn_away(invitation, missing, reason, patience_s)


@contextlib.contextmanager
def leading(asked: Asked, place: Place, say: Say = print) -> Iterator[Leading]:
    """Whatever happens inside, the other processes hear of it and end."""
    status, failure = 1, None
    house = House(place)
    try:
        os.sched_setaffinity(0, house.cores)
        lead = Leading(asked, place, _meeting(asked, place), say)
        try:
            yield lead
            status = 0
        except DistBeliefError as error:
            status, failure = error.exit_code, error
            raise
        finally:
            lead.end(status, failure)
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
