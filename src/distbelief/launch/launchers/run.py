"""Runs on processes that a launcher has started: mpirun, srun, torchrun, or a program that sets TF_CONFIG.

The first process leads the run. On every host one process runs the agent, with as many workers as the launcher has
started processes there; the other processes only lend their cores and wait. Workers are therefore not the launcher's
ranks: the run replaces a worker that dies, and the launcher does not notice.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

from distbelief.control.credentials import KeyAuthority
from distbelief.errors import DistBeliefError, RunInterrupted
from distbelief.launch.launch import LOOPBACK_ONLY, Launch
from distbelief.launch.launchers.failednotice import still_missing, turn_away
from distbelief.launch.launchers.rules.place import LauncherRequest, Place
from distbelief.launch.launchers.rules.variables import BY_LAUNCHER, Environment, launch_named_by
from distbelief.launch.launchers.samehost import HelpingProcess, HostingProcess
from distbelief.launch.pollloop import block_signals
from distbelief.launch.rendezvous import (
    KnownAddress,
    LauncherStore,
    MpiBroadcast,
    Notice,
    Rendezvous,
    SharedFolder,
    mpi4py_is_installed,
)
from distbelief.steadyclock import CLOCK

LINGER_S = 5.0
"""A launcher ends all processes when one has failed. The first process prints the reason, so the others end later."""
NOTICE_S = 60.0
"""Seconds for which the first process waits for missing hosts, to tell them that the run has failed."""
INTERRUPTED_S = 5.0
"""The same after Ctrl-C or SIGTERM."""

Say = Callable[[str], None]


def find_place(asked: LauncherRequest, environment: Environment) -> Place | None:
    """The place of this process. None: it has nothing to do."""
    place = BY_LAUNCHER[asked.on](environment)
    if place is None:
        return None
    if not place.job:
        place = replace(place, job=_job_of_hydra())
    return place.with_workers(asked.workers)


def run_folder(asked: LauncherRequest, place: Place) -> Path:
    """The run directory: all processes must find the same one."""
    tag = hashlib.blake2b(place.job.encode(), digest_size=4).hexdigest()
    return asked.run_dir or Path("runs") / f"{asked.name}-{place.launcher}-{tag}"


# --- the processes that do not lead ----------------------------------------------------------------------------------


def follow(asked: LauncherRequest, place: Place) -> int:
    """Take part until the run ends. Returns the exit status. Only the first process prints."""
    if place.is_signalled_as_one or not place.hosts:
        block_signals()
    return _host(asked, place) if place.hosts else _help(place)


def _help(place: Place) -> int:
    helper = HelpingProcess(place)
    if _uses_mpi(place):  # all processes of the launch take part
        MpiBroadcast(place).wait()
    return helper.wait()


def _host(asked: LauncherRequest, place: Place) -> int:
    status = 1
    hosting = HostingProcess(place)
    try:
        os.sched_setaffinity(0, hosting.cores)
        status = _take_part(asked, place)
    finally:
        hosting.tell(status)
    return status


def _take_part(asked: LauncherRequest, place: Place) -> int:
    rendezvous = _rendezvous(asked, place)
    assert rendezvous is not None  # only the first process can be without other hosts
    found = rendezvous.wait()
    if isinstance(found, int):
        return found
    from distbelief.launch.joining import serve_host

    servers = None if not place.servers else -1 if place.servers_here else 0
    try:
        status = serve_host(found, place.workers_here, place.host, servers=servers, say=lambda text: None)
    except RunInterrupted:
        raise
    except DistBeliefError:  # the first process shows it too, before the launcher ends all
        time.sleep(LINGER_S)
        raise
    if status:
        time.sleep(LINGER_S)
    return status


# --- the process that leads ------------------------------------------------------------------------------------------


class Leading:
    """The engine (engines.py) of the first process: it knows the launcher's other processes."""

    def __init__(self, asked: LauncherRequest, place: Place, rendezvous: Rendezvous | None, say: Say) -> None:
        self.on = asked.on
        self.run_dir = run_folder(asked, place)
        self.workers = place.workers
        self._listen = asked.listen
        self._place = place
        self._rendezvous = rendezvous
        self._say = say
        self._since = CLOCK.now()
        self._led: tuple[str, KeyAuthority] | None = None
        """Where the coordinator listens, and the authority of the run; after it has begun."""

    def arrange(self, launch: Launch) -> Launch:
        place, rendezvous = self._place, self._rendezvous
        return launch.placed(
            on=self.on,
            blocks_signals=place.is_signalled_as_one,
            local_workers=place.workers_here,
            room=place.workers_here,
            local_servers=place.first_servers(launch.strategy.servers),
            host=place.host,
            is_open=rendezvous is not None,
            listen=self._listen or (rendezvous.listen() if rendezvous else LOOPBACK_ONLY),
            key_file=str(rendezvous.key_file() or "") if rendezvous else "",
        )

    def announce(self, address: str, authority: KeyAuthority) -> None:
        if self._rendezvous:
            self._rendezvous.tell(Notice(address, authority.run))
            self._led = address, authority

    def end(self, status: int, error: DistBeliefError | None = None) -> None:
        """Tell the processes that have not come yet that the run is over."""
        if self._rendezvous is None:
            return
        with contextlib.suppress(DistBeliefError):  # the first error is the one to report
            known = self._led or self._rendezvous.known()
            if status and known:
                self._turn_away(*known, error)
            elif self._led is None:
                self._rendezvous.tell(Notice(over=status))
        self._rendezvous.close()

    def _turn_away(self, address: str, authority: KeyAuthority, error: DistBeliefError | None) -> None:
        missing = still_missing(self._place, self.run_dir, self._since)
        if missing.is_empty:
            return
        reason = error.message if error else "the leading process has failed"
        patience_s = INTERRUPTED_S if isinstance(error, RunInterrupted) else NOTICE_S
        self._say(f"{reason}; waiting up to {patience_s:.0f} s to tell {missing.in_words}")
        turn_away(address, authority, missing, reason, patience_s)


@contextlib.contextmanager
def leading(asked: LauncherRequest, place: Place, say: Say = print) -> Iterator[Leading]:
    """While this process leads the run. At the end, also after an exception, the other processes are told and end."""
    status, failure = 1, None
    hosting = HostingProcess(place)
    try:
        os.sched_setaffinity(0, hosting.cores)
        lead = Leading(asked, place, _rendezvous(asked, place), say)
        try:
            yield lead
            status = 0
        except DistBeliefError as error:
            status, failure = error.exit_code, error
            raise
        finally:
            lead.end(status, failure)
    finally:
        hosting.tell(status)


def _rendezvous(asked: LauncherRequest, place: Place) -> Rendezvous | None:
    """The rendezvous of this launch's hosts. None: the launch is on one host."""
    if place.is_alone:
        return None
    key = Path(asked.key_file) if asked.key_file else None
    if place.address:
        if key is None:
            raise DistBeliefError(
                f"{place.launcher} started this run on several hosts: they need a key to trust each other",
                hint="`distbelief keys new FILE`, copy the file to every host, and give --key FILE",
            )
        if place.address_is_taken:
            return LauncherStore(place.address, place.job, key)
        return KnownAddress(place.address, key)
    if _uses_mpi(place):
        return MpiBroadcast(place, key)
    return SharedFolder(run_folder(asked, place), place.job, place.peers, key)


def _uses_mpi(place: Place) -> bool:
    return place.launcher == "mpi" and not place.is_alone and mpi4py_is_installed()


def _job_of_hydra() -> str:
    """The name of the launch by the command line of Hydra's process, which is an ancestor of ours on each host."""
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
