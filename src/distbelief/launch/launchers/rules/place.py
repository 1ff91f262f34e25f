"""The place of a process among the processes of a launcher, and the user's requests to the launcher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from distbelief.errors import DistBeliefError


@dataclass(frozen=True)
class Place:
    """
    >>> place = Place("mpi", "job 7", index=2, count=4, local_index=0, local_count=2)
    >>> place.leads, place.hosts, place.is_alone, place.workers_here
    (False, True, False, 2)
    >>> place.with_workers(8).workers_here
    4
    """

    launcher: str
    job: str
    """Names this launch: the same text in all of its processes, another one in every other launch."""
    index: int
    count: int
    local_index: int
    """The index among the processes of this launch on the same host."""
    local_count: int
    host: str = ""
    """The launcher's name of this host; empty: unknown."""
    peers: tuple[str, ...] = ()
    """Names of all hosts, where the launcher tells them."""
    address: str = ""
    """HOST:PORT of the rendezvous with the first process; empty: the launcher names none."""
    address_is_taken: bool = False
    """Whether the launcher itself listens at that address."""
    workers: int = -1
    """The number of workers of the run; by default one per process."""
    workers_here: int = -1
    servers: int = 0
    """Processes that the launcher means for parameter servers; 0: it names none."""
    servers_here: int = 0

    def __post_init__(self) -> None:
        if self.workers < 0:
            object.__setattr__(self, "workers", self.count)
        if self.workers_here < 0:
            object.__setattr__(self, "workers_here", self.local_count)
        if not 0 <= self.index < self.count:
            raise self._nonsense(f"process {self.index} of {self.count}, which cannot be")
        if not 0 <= self.local_index < self.local_count:
            raise self._nonsense(f"process {self.local_index} of {self.local_count} on its host, which cannot be")
        if self.local_count > self.count or self.local_index > self.index:
            raise self._nonsense(
                f"process {self.index} of {self.count} in all, but {self.local_index} of {self.local_count} on its host"
            )
        if self.index == 0 and self.local_index:
            raise self._nonsense(f"the first process of all, but number {self.local_index} on its host")

    @property
    def leads(self) -> bool:
        return self.index == 0

    @property
    def hosts(self) -> bool:
        """Whether this process runs the agent of its host; the other processes of the host only wait for the end."""
        return self.local_index == 0

    @property
    def is_alone(self) -> bool:
        """Whether the whole launch is on this host."""
        return self.local_count == self.count

    @property
    def is_signalled_as_one(self) -> bool:
        """Whether the launcher sends its signals to all processes on all hosts; then the first process decides."""
        return self.launcher in ("mpi", "slurm")

    def with_workers(self, total: int | None) -> Place:
        """The place with `total` workers in all, evenly spread over the processes. None: unchanged."""
        if total is None or total == self.workers:
            return self
        if self.workers == 0 or total % self.workers:
            raise DistBeliefError(
                f"{total} workers cannot be spread evenly over {self.workers} processes that {self.launcher} started",
                hint=f"leave --workers out, which is one worker per process, or give a multiple of {self.workers}",
            )
        return replace(self, workers=total, workers_here=self.workers_here * (total // self.workers))

    def first_servers(self, wanted: int) -> int:
        """The number of the wanted parameter servers that this host starts; -1: the run decides."""
        return -(-wanted * self.servers_here // self.servers) if self.servers else -1

    def _nonsense(self, what: str) -> DistBeliefError:
        return DistBeliefError(
            f"by the variables of {self.launcher} this is {what}",
            hint="variables of another launcher, or left over in the shell? start it with the launcher that --on names",
        )


def is_number(text: str) -> bool:
    """Whether the text can be a count, an index or a port."""
    return text.isdecimal() and len(text) < 10


def number(environment: Mapping[str, str], name: str) -> int:
    """The value of a variable that must hold a whole number."""
    text = environment.get(name)
    if text is None:
        raise DistBeliefError(
            f"the variable {name} is not set", hint="was this process started by the launcher that --on names?"
        )
    if not is_number(text.strip()):
        raise DistBeliefError(f"{name}={text!r} is no number", hint=f"the launcher sets {name}; leave it alone")
    return int(text.strip())  # `int` does not take all that is white space to `strip`


@dataclass(frozen=True)
class LauncherRequest:
    """The user's request: `--on`, and the options that decide where the run is."""

    on: str
    name: str
    """The job's name."""
    workers: int | None = None
    run_dir: Path | None = None
    listen: str = ""
    """The address for the coordinator; empty: the rendezvous decides."""
    key_file: str = ""
