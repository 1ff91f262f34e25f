"""What the program knows of a system that it compares. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

Commands = list[list[str]]


@dataclass(frozen=True)
class Start:
    """One run that is to be started."""

    python: str
    """The interpreter of the system's environment."""
    driver: Path
    folder: Path
    """The task's."""
    workers: int
    ports: Callable[[int], list[int]]
    """So many free ports on 127.0.0.1."""


@dataclass(frozen=True)
class System:
    name: str
    """On the command line and in results."""
    title: str
    """In tables and figures."""
    driver: str
    """A file of bench/drivers: the user's code."""
    commands: Callable[[Start], Commands]
    """Processes that are started together. The run has ended when the first one has; the others are ended then."""
    ends_with_all: bool = False
    """The run has ended when all of them have."""
    kind: str = "peer"
    """ours, reference or peer"""
    requirements: tuple[str, ...] = ()
    """What pip installs into an environment of its own; nothing: the one that the program runs in is used."""
    environment: str = ""
    """The name of that environment, where it is not the system's: two systems of one package need it once."""
    shares_torch: bool = True
    """That environment sees the packages of the program's: torch costs no gigabytes again."""
    check: str = ""
    """Python that must run in the environment."""
    asynchronous: bool = False
    """Nobody waits for anybody: losses are not those of one process, they only fall alike."""
    workloads: tuple[str, ...] = ()
    """Nothing: all."""
    variables: Mapping[str, str] = field(default_factory=dict)
    setup: Callable[[Start], Commands] | None = None
    """Run to their ends before each run; not timed."""
    time_to_accuracy: bool = True
    first_step: bool = True
    """It has a launcher whose time to the first step can be compared."""
    has_daemons: bool = False
    """Its work is done by processes that are not our children: what others had of the machine cannot be told."""
    note: str = ""
    """What a reader should know of its settings."""

    def takes(self, workload: str) -> bool:
        return not self.workloads or workload in self.workloads
