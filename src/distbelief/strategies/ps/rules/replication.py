"""One server's copy of one slice: which changes it takes, in which order, and when a change may be answered.

The primary numbers changes and sends each to its followers (the backup, and a recruit that is to become one) as it
came; all apply the same changes in the same order, so all have the same bits. A change is answered when every
follower that counts has it. Every message to a follower names the change before it: one that has another last change
(it is new, missed something, or was primary itself and went on alone) says so, and gets a copy of the whole slice. So
no special case is needed for lost messages, restarts and handed-over slices.

No sockets and no clock: events come in as calls, messages go out as values. What a change is, the store knows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from distbelief.strategies.ps.rules.applied import AppliedChanges

Name = tuple[int, int]
"""(source, sequence) of a change."""
Position = tuple[int, int]
"""(version of the map in which its primary was made primary, number since the slice began)."""
NO_CHANGE: Position = (0, 0)


class Store(Protocol):
    """Where the values are. The same contents in the same order give the same bits."""

    def apply(self, content: Any) -> None: ...

    def state(self) -> Any:
        """A copy: later changes must not show in it."""

    def load(self, state: Any) -> None: ...


@dataclass(frozen=True)
class Roles:
    """Who has the slice, by a map of that version. -1: nobody."""

    version: int
    primary: int
    backup: int = -1
    recruit: int = -1


# --- what goes out ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forward:
    """To a follower: apply this, if your last change is `before`. Without a name: only say whether it is."""

    to: int
    term: int
    before: Position
    tag: Position
    name: Name | None = None
    content: Any = None


@dataclass(frozen=True)
class SendCopy:
    to: int
    term: int
    tag: Position
    applied: AppliedChanges
    state: Any


@dataclass(frozen=True)
class Acknowledge:
    """To the primary: this is my last change. `differs`: what was sent did not fit to it."""

    to: int
    term: int
    """That of the message that is answered: what was said to an earlier term of the same primary counts no more."""
    tag: Position
    version: int
    """Of the map that the sender goes by. By an earlier one it may have had a copy that it has dropped since."""
    differs: bool = False


@dataclass(frozen=True)
class AnswerClient:
    """To the client: the change counts, whoever dies."""

    name: Name


@dataclass(frozen=True)
class RefuseClient:
    """To the client: this server is not the primary, by a map of that version."""

    name: Name
    version: int


@dataclass(frozen=True)
class ReportCopied:
    """To whoever makes maps: the recruit has everything that was ever answered."""

    server: int


Output = Forward | SendCopy | Acknowledge | AnswerClient | RefuseClient | ReportCopied


@dataclass
class _Follower:
    took: Position | None = None
    """Its last change, as it said; None: it has said nothing that fits."""
    counts: bool = False
    """Answers wait for it."""
    barrier: int = 0
    """A recruit is complete when it has all changes up to this one: later ones wait for it."""
    reported: bool = False
    since: int = 0
    """The version of the map in which this primary saw it named."""


@dataclass
class ReplicatedSlice:
    """A slice on the server `me`."""

    me: int
    store: Store
    roles: Roles
    applied: AppliedChanges = field(default_factory=AppliedChanges)
    last: Position = NO_CHANGE
    _term: int = 0
    _followers: dict[int, _Follower] = field(default_factory=dict)
    _waiting: dict[Name, int] = field(default_factory=dict)
    """Changes that are not answered yet -> the number that must be everywhere first."""

    @property
    def is_primary(self) -> bool:
        return self.roles.primary == self.me

    def begin(self) -> list[Output]:
        """The first map: nobody has anything yet, so all have the same."""
        return self._take_up(self.roles)

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
        if roles.recruit != before.recruit:  # what it had, it may have dropped in between
            self._followers.pop(roles.recruit, None)
        return self._take_up(roles, promoted=not was_primary)

    def _take_up(self, roles: Roles, promoted: bool = True) -> list[Output]:
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
        """A client's push, perhaps not for the first time."""
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

    def took(self, sender: int, message: Acknowledge) -> list[Output]:
        """A follower says where it is."""
        follower = self._followers.get(sender)
        if not self.is_primary or follower is None or message.term != self._term:
            return []
        if message.version < follower.since:
            return []  # it is asked again
        if message.differs:
            follower.took = None
            return [SendCopy(sender, self._term, self.last, self.applied, self.store.state())]
        follower.took = max(message.tag, follower.took or NO_CHANGE)
        out: list[Output] = []
        if not follower.counts:  # from now on nothing is answered without it; what was, is below the barrier
            follower.counts, follower.barrier = True, self.last[1]
        if sender == self.roles.recruit and not follower.reported and follower.took[1] >= follower.barrier:
            follower.reported = True
            out.append(ReportCopied(sender))
        return out + list(self._answers())

    def forwarded(self, sender: int, message: Forward) -> list[Output]:
        """The primary sends a change, or asks where I am."""
        if sender != self.roles.primary or self.is_primary:
            return []  # one of us has an old map: it is asked again later
        if self.last != message.before:
            if self.last == message.tag:  # it came twice
                return [Acknowledge(sender, message.term, self.last, self.roles.version)]
            return [Acknowledge(sender, message.term, self.last, self.roles.version, differs=True)]
        if message.name is not None:
            self.applied, _ = self.applied.add(*message.name)
            self.store.apply(message.content)
        self.last = message.tag
        return [Acknowledge(sender, message.term, self.last, self.roles.version)]

    def copied(self, sender: int, message: SendCopy) -> list[Output]:
        if sender != self.roles.primary or self.is_primary:
            return []
        self.store.load(message.state)
        self.applied, self.last = message.applied, message.tag
        return [Acknowledge(sender, message.term, self.last, self.roles.version)]

    def remind(self) -> list[Output]:
        """Ask the followers that are behind where they are, and tell of copies again: a message may be lost, also with
        whoever makes maps. For a timer."""
        out: list[Output] = [
            Forward(server, self._term, self.last, self.last)
            for server, one in sorted(self._followers.items())
            if one.took != self.last
        ]
        recruit = self._followers.get(self.roles.recruit)
        return [*out, ReportCopied(self.roles.recruit)] if recruit and recruit.reported else out

    def waits_for(self, server: int) -> bool:
        """Whether nothing is answered before that follower has it."""
        follower = self._followers.get(server)
        return follower is not None and follower.counts

    @property
    def everywhere(self) -> int:
        """The number of the last change that every follower that counts has."""
        counted = [one.took[1] if one.took else -1 for one in self._followers.values() if one.counts]
        return min(counted, default=self.last[1])

    def _answers(self) -> Iterator[Output]:
        everywhere = self.everywhere
        for name in [name for name, number in self._waiting.items() if number <= everywhere]:
            del self._waiting[name]
            yield AnswerClient(name)
