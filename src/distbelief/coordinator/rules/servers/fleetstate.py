"""The parameter servers of a run as the coordinator knows them: values, without a rule in them (fleet.py has those)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from distbelief.control.messages import ServerMap
from distbelief.coordinator.rules.servers.roles import Placement


@dataclass(frozen=True)
class ServerProcess:
    """One that was ready and has not ended."""

    number: int
    host: str
    pid: int
    address: str
    heard_at: float
    longest_gap_s: float = 0.0
    """Between two signs of life: one that is deep in a large update is silent for a while."""
    fenced: bool = False
    """It was frozen and is being killed."""
    leaving: bool = False

    @property
    def name(self) -> str:
        return f"server {self.number} (pid {self.pid} on {self.host})"


@dataclass(frozen=True)
class Fleet:
    """Never changed in place."""

    target: int = 0
    """How many servers there should be; 0: the strategy has none."""
    next_server: int = 0
    hired: Mapping[int, float] = field(default_factory=dict)
    """Servers that are to be started and are not ready -> when an agent was last asked to."""
    placed: Mapping[int, str] = field(default_factory=dict)
    """Those of them that an agent was asked for -> its host; empty: that of the launching process."""
    there: Mapping[int, ServerProcess] = field(default_factory=dict)
    gone: frozenset[int] = frozenset()
    """Numbers of those that have ended, so that each end counts once."""
    slices: tuple[int, ...] = ()
    """The size of each, in bytes."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What the servers compute with: all must be alike."""
    placement: Placement | None = None
    version: int = 0
    """Of the last map: later ones have higher numbers, also when there is none for a while."""
    life: int = 0
    """How often all slices have begun: once, and again after each loss of some."""
    sealed: int = 0
    """The newest checkpoint then."""
    deaths: int = 0
    """Since a step was last committed."""
    kills: int = 0
    """Servers that died in the run."""
    lost_at: Mapping[int, float] = field(default_factory=dict)
    """Servers that were lost and no step was applied since -> when."""
    pauses: tuple[float, ...] = ()
    """Seconds from each loss to the next step."""
    paces: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    """Worker -> n_push and n_fetch, where it has chosen others than 1 and 1."""

    @property
    def complete(self) -> bool:
        """Whether training can begin."""
        return len(self.there) >= self.target

    def aiming_at(self, target: int, dropped: Collection[int]) -> Fleet:
        """With another number that is wanted, and without some that were on their way."""
        hired = {server: at for server, at in self.hired.items() if server not in dropped}
        return replace(self, target=target, hired=hired, gone=self.gone | set(dropped))

    def map(self) -> ServerMap | None:
        if self.placement is None:
            return None
        known = self.placement.map
        return ServerMap(
            known.version,
            self.life,
            list(known.primaries),
            list(known.backups),
            list(self.placement.recruits),
            {number: one.address for number, one in self.there.items()},
            self.sealed,
        )
