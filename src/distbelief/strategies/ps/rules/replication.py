"""Replication of one slice, on one server: which changes it applies, in which order, and when it answers the client.

The primary numbers the changes and forwards each to its followers: the backup, and a recruit (a server that gets a copy
in order to become the backup). All apply the same changes in the same order, so all have the same bits. The primary
answers a change when every follower that counts has it.

Every forwarded change names the change before it. A follower whose last change is another one (it is new, it missed a
message, or it was primary itself and went on alone) says so, and the primary sends it a copy of the whole slice. So
lost messages, restarts and handed-over slices need no special case.

No sockets and no clock: events come in as calls, and messages go out as values. Only the store knows what a change is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from distbelief.strategies.ps.rules.applied import AppliedChanges

Name = tuple[int, int]
"""(source, sequence) of a change."""
Position = tuple[int, int]
"""(term, number since the slice began) of a change. The term is the version of the map that chose the primary."""
NO_CHANGE: Position = (0, 0)


class Store(Protocol):
    """Holds the values. The same contents in the same order give the same bits."""

    def apply(self, content: Any) -> None: ...

    def state(self) -> Any:
        """A copy, which later changes do not change."""

    def load(self, state: Any) -> None: ...


@dataclass(frozen=True)
class Roles:
    """The servers of the slice, by the map of this version. -1: none."""

    version: int
    primary: int
    backup: int = -1
    recruit: int = -1


# --- what goes out ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forward:
    """Asks the follower to apply the change if its last change is `before`. With `name` None it applies nothing and
    reports its last change."""

    to: int
    term: int
    before: Position
    position: Position
    name: Name | None = None
    content: Any = None


@dataclass(frozen=True)
class SendCopy:
    """To a follower: the whole slice."""

    to: int
    term: int
    position: Position
    applied: AppliedChanges
    state: Any


@dataclass(frozen=True)
class Acknowledge:
    """To the primary: the follower's last change. `differs`: the forwarded change does not follow it."""

    to: int
    term: int
    """The term of the answered message: the primary ignores acknowledgements of its earlier terms."""
    position: Position
    version: int
    """The version of the sender's map. By an earlier map it may have had a copy that it has dropped since."""
    differs: bool = False


@dataclass(frozen=True)
class AnswerClient:
    """To the client: the change is on all servers that count."""

    name: Name


@dataclass(frozen=True)
class RefuseClient:
    """To the client: this server is not the primary, by the map of this version."""

    name: Name
    version: int


@dataclass(frozen=True)
class ReportCopied:
    """To the maker of maps (the coordinator, in a run): the recruit has every change that was ever answered."""

    server: int


Output = Forward | SendCopy | Acknowledge | AnswerClient | RefuseClient | ReportCopied


@dataclass
class _Follower:
    acknowledged: Position | None = None
    """The last change that it has acknowledged; None: none yet that fits."""
    counts: bool = False
    """Answers to clients wait for this follower."""
    barrier: int = 0
    """A recruit is complete when it has all changes up to this one: later answers wait for it."""
    reported: bool = False
    since: int = 0
    """The version of the map that first named this follower."""


@dataclass
class ReplicatedSlice:
    """A slice on the server `me`, which is primary or follower."""

    me: int
    store: Store
    roles: Roles
    applied: AppliedChanges = field(default_factory=AppliedChanges)
    last: Position = NO_CHANGE
    _term: int = 0
    _followers: dict[int, _Follower] = field(default_factory=dict)
    _waiting: dict[Name, int] = field(default_factory=dict)
    """Changes that are not answered yet -> the number of the change that all followers must have first."""

    @property
    def is_primary(self) -> bool:
        return self.roles.primary == self.me

    def begin(self) -> list[Output]:
        """The first map: all servers of the slice have the same first state."""
        return self._lead(self.roles)

    def learn(self, roles: Roles) -> list[Output]:
        """A newer map."""
        if roles.version <= self.roles.version:
            return []
        was_primary, before, self.roles = self.is_primary, self.roles, roles
        if not self.is_primary:
            refused: list[Output] = [RefuseClient(name, roles.version) for name in self._waiting]
            self._waiting.clear()
            self._followers.clear()
            return refused
        if not was_primary:
            self._followers.clear()
        if roles.recruit != before.recruit:  # it may have dropped its copy in between
            self._followers.pop(roles.recruit, None)
        return self._lead(roles, promoted=not was_primary)

    def _lead(self, roles: Roles, promoted: bool = True) -> list[Output]:
        if not self.is_primary:
            return []
        if promoted:
            self._term = roles.version
        wanted = {roles.backup, roles.recruit} - {-1}
        self._followers = {server: one for server, one in self._followers.items() if server in wanted}
        out: list[Output] = []
        for server in sorted(wanted - self._followers.keys()):
            self._followers[server] = _Follower(counts=server == roles.backup, since=roles.version)
            out.append(Forward(server, self._term, self.last, self.last))
        if roles.backup in self._followers:
            self._followers[roles.backup].counts = True
        return out + list(self._answers())

    def change(self, name: Name, content: Any) -> list[Output]:
        """A client pushes a change, perhaps not for the first time."""
        if not self.is_primary:
            return [RefuseClient(name, self.roles.version)]
        out: list[Output] = []
        applied, is_new = self.applied.add(*name)
        if is_new:
            before, self.applied, self.last = self.last, applied, (self._term, self.last[1] + 1)
            self.store.apply(content)
            out += [Forward(to, self._term, before, self.last, name, content) for to in sorted(self._followers)]
        self._waiting[name] = self.last[1]
        return out + list(self._answers())

    def acknowledged(self, sender: int, message: Acknowledge) -> list[Output]:
        """A follower acknowledges."""
        follower = self._followers.get(sender)
        if not self.is_primary or follower is None or message.term != self._term:
            return []
        if message.version < follower.since:
            return []  # the timer asks it again
        if message.differs:
            follower.acknowledged = None
            return [SendCopy(sender, self._term, self.last, self.applied, self.store.state())]
        follower.acknowledged = max(message.position, follower.acknowledged or NO_CHANGE)
        out: list[Output] = []
        if not follower.counts:  # from now on answers wait for it; the barrier is above all earlier answers
            follower.counts, follower.barrier = True, self.last[1]
        if sender == self.roles.recruit and not follower.reported and follower.acknowledged[1] >= follower.barrier:
            follower.reported = True
            out.append(ReportCopied(sender))
        return out + list(self._answers())

    def forwarded(self, sender: int, message: Forward) -> list[Output]:
        """The primary forwards a change, or asks for the last change here."""
        if sender != self.roles.primary or self.is_primary:
            return []  # one of the two servers has an old map: the primary asks again
        if self.last != message.before:
            if self.last == message.position:  # it came twice
                return [Acknowledge(sender, message.term, self.last, self.roles.version)]
            return [Acknowledge(sender, message.term, self.last, self.roles.version, differs=True)]
        if message.name is not None:
            self.applied, _ = self.applied.add(*message.name)
            self.store.apply(message.content)
        self.last = message.position
        return [Acknowledge(sender, message.term, self.last, self.roles.version)]

    def copied(self, sender: int, message: SendCopy) -> list[Output]:
        if sender != self.roles.primary or self.is_primary:
            return []
        self.store.load(message.state)
        self.applied, self.last = message.applied, message.position
        return [Acknowledge(sender, message.term, self.last, self.roles.version)]

    def remind(self) -> list[Output]:
        """For a timer: ask followers that are behind for their last change, and report complete copies again. Messages
        may be lost, and the coordinator may have died with a report."""
        out: list[Output] = [
            Forward(server, self._term, self.last, self.last)
            for server, one in sorted(self._followers.items())
            if one.acknowledged != self.last
        ]
        recruit = self._followers.get(self.roles.recruit)
        return [*out, ReportCopied(self.roles.recruit)] if recruit and recruit.reported else out

    def waits_for(self, server: int) -> bool:
        """Whether answers to clients wait for this follower."""
        follower = self._followers.get(server)
        return follower is not None and follower.counts

    @property
    def everywhere(self) -> int:
        """The number of the last change that every follower that counts has acknowledged."""
        counted = [one.acknowledged[1] if one.acknowledged else -1 for one in self._followers.values() if one.counts]
        return min(counted, default=self.last[1])

    def _answers(self) -> Iterator[Output]:
        everywhere = self.everywhere
        for name in [name for name, number in self._waiting.items() if number <= everywhere]:
            del self._waiting[name]
            yield AnswerClient(name)
