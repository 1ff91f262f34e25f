"""A parameter server without its sockets: messages come in with who sent them, and letters to others go out.

Replication is `holding.py`'s, what a change does is the store's. Here questions are answered, and wait where the answer
is not there yet. A question about values is answered when every server that counts has them too: then the worker may
overwrite what it has pushed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from distbelief.control.messages import ServerMap
from distbelief.errors import DistBeliefError
from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import (
    RUN,
    Acknowledged,
    NotPrimary,
    OrderedQuestion,
    Push,
    Question,
    Update,
)
from distbelief.strategies.ps.protocol.peers import ChangeAcknowledged, ForwardedChange, SliceCopySent
from distbelief.strategies.ps.rules import replication as h
from distbelief.strategies.ps.rules.applied import AppliedChanges
from distbelief.strategies.ps.server.stores import Change, SliceStore

ToClient = tuple[bytes, Framed]
"""The identity of a client's socket, and what it is told."""
ToServer = tuple[int, Framed]
REACHED = 4
"""Versions of which it is known which change led to them."""


@dataclass
class Outgoing:
    """What is to be sent."""

    clients: list[ToClient] = field(default_factory=list)
    servers: list[ToServer] = field(default_factory=list)
    copied: list[tuple[int, int, int]] = field(default_factory=list)
    """(slice, recruit, version of the map): for the coordinator."""

    def add(self, more: Outgoing) -> None:
        self.clients += more.clients
        self.servers += more.servers
        self.copied += more.copied


@dataclass
class _Held:
    holding: h.ReplicatedSlice
    store: SliceStore
    segment: str
    """The name of the shared memory in which its values are; empty: nobody else can map them."""
    questions: list[tuple[bytes, Question]] = field(default_factory=list)
    askers: dict[h.Name, bytes] = field(default_factory=dict)
    """Change -> who waits for the answer."""
    reached: dict[int, int] = field(default_factory=dict)
    """Version -> the number of the change that led to it, for the last versions."""


Make = Callable[[int, bool], tuple[SliceStore, str]]
"""(slice, whether it is to have the first state of this life) -> the store, and the name of its memory."""


class ServerNode:
    def __init__(self, me: int, make: Make) -> None:
        self._me = me
        self._make = make
        self._held: dict[int, _Held] = {}
        self._map: ServerMap | None = None

    @property
    def version(self) -> int:
        return self._map.version if self._map else 0

    def learn(self, known: ServerMap) -> Outgoing:
        """A map, perhaps a new one."""
        out = Outgoing()
        if self._map and known.version <= self._map.version:
            return out
        if self._map and known.life > self._map.life:
            self._held.clear()  # all slices begin anew
        began = self._map is None or known.life > self._map.life
        self._map = known
        for number, (primary, backup, recruit) in enumerate(
            zip(known.primaries, known.backups, known.recruits, strict=True)
        ):
            roles = h.Roles(known.version, primary, backup, recruit)
            if self._me not in (primary, backup, recruit):
                if number in self._held:
                    self._perform(number, self._held[number].holding.learn(roles), out)
                    self._refuse_all(number, out)
                    del self._held[number]
            elif number in self._held:
                self._perform(number, self._held[number].holding.learn(roles), out)
                if not self._held[number].holding.is_primary:
                    self._refuse_all(number, out)
            else:
                self._take_up(number, roles, began, out)
            if number in self._held:
                self._answer(number, out)
        return out

    def _take_up(self, number: int, roles: h.Roles, began: bool, out: Outgoing) -> None:
        first = began and self._me in (roles.primary, roles.backup)
        store, segment = self._make(number, first)
        # One that comes later has nothing, not even what all had at first.
        holding = h.ReplicatedSlice(self._me, store, roles, last=h.NO_CHANGE if first else (-1, -1))
        self._held[number] = _Held(holding, store, segment)
        self._perform(number, holding.begin(), out)

    def receive(self, letter: Framed, sender: bytes = b"") -> Outgoing:
        """A message of a client (with the identity of its socket) or of another server."""
        out, message = Outgoing(), letter.message
        match message:
            case ForwardedChange() | SliceCopySent() | ChangeAcknowledged():
                self._from_peer(message, letter.payload, out)
            case Push():
                held = self._held.get(message.slice)
                life = self._map.life if self._map else 0
                if 0 < message.life < life:
                    return out  # its sender will hear that all has begun anew
                if held is None or not held.holding.is_primary or message.life > life:
                    out.clients.append((sender, Framed(NotPrimary(message.slice, self.version))))
                    return out
                content = message.content
                name = (message.client, message.sequence)
                if isinstance(content, Update):
                    name = (RUN, content.update)
                held.askers[name] = sender
                self._changed(message.slice, held.holding.change(name, Change(content, letter.payload)), out)
            case Question():
                held = self._held.get(message.slice)
                if held is None or not held.holding.is_primary:
                    out.clients.append((sender, Framed(NotPrimary(message.slice, self.version))))
                    return out
                if (sender, message) not in held.questions:  # it comes again when the answer is long in coming
                    held.questions.append((sender, message))
                self._answer(message.slice, out)
            case _:
                raise DistBeliefError(f"a server is not told {type(message).__name__}")
        return out

    def remind(self) -> Outgoing:
        """Ask followers that are behind where they are. For a timer."""
        out = Outgoing()
        for number, held in self._held.items():
            self._perform(number, held.holding.remind(), out)
        return out

    # --- replication -------------------------------------------------------------------------------------------------

    def _from_peer(
        self, message: ForwardedChange[Any] | SliceCopySent | ChangeAcknowledged, payload: Any, out: Outgoing
    ) -> None:
        held = self._held.get(message.slice)
        if held is None or self._map is None or message.life != self._map.life:
            return  # it, or we, will hear of a newer map, and ask again
        match message:
            case ForwardedChange():
                change = Change(message.content, payload) if message.content is not None else None
                forward = h.Forward(self._me, message.term, message.before, message.tag, message.name, change)
                outputs = held.holding.forwarded(message.server, forward)
            case SliceCopySent():
                state = (message.about, torch.frombuffer(bytearray(payload), dtype=torch.uint8))
                copy = h.SendCopy(self._me, message.term, message.tag, message.applied, state)
                outputs = held.holding.copied(message.server, copy)
            case ChangeAcknowledged():
                took = h.Acknowledge(self._me, message.term, message.tag, message.version, message.differs)
                outputs = held.holding.took(message.server, took)
        self._changed(message.slice, outputs, out)

    def _changed(self, number: int, outputs: list[h.Output], out: Outgoing) -> None:
        held = self._held[number]
        version = held.store.version
        if version not in held.reached:
            held.reached[version] = held.holding.last[1]
            while len(held.reached) > REACHED:
                del held.reached[next(iter(held.reached))]
        self._perform(number, outputs, out)
        self._answer(number, out)

    def _perform(self, number: int, outputs: list[h.Output], out: Outgoing) -> None:
        held = self._held[number]
        assert self._map is not None
        life = self._map.life
        for one in outputs:
            match one:
                case h.Forward():
                    change = one.content
                    if change and not held.holding.waits_for(one.to):  # the worker may go on before it has been read
                        change = held.store.with_bytes(change)
                    content = change.content if change else None
                    header = ForwardedChange(self._me, life, number, one.term, one.before, one.tag, one.name, content)
                    out.servers.append((one.to, Framed(header, change.payload if change else None)))
                case h.SendCopy():
                    about, content = one.state
                    sent = SliceCopySent(self._me, life, number, one.term, one.tag, one.applied, about)
                    out.servers.append((one.to, Framed(sent, content.numpy())))
                case h.Acknowledge():
                    took = ChangeAcknowledged(self._me, life, number, one.term, one.tag, one.version, one.differs)
                    out.servers.append((one.to, Framed(took)))
                case h.AnswerClient():
                    client = held.askers.pop(one.name, None)
                    if client is not None:
                        source, sequence = one.name
                        run = source if source == RUN else -1
                        given = held.store.given(source)
                        out.clients.append((client, Framed(Acknowledged(number, sequence, run, given))))
                case h.RefuseClient():
                    client = held.askers.pop(one.name, None)
                    if client is not None:
                        out.clients.append((client, Framed(NotPrimary(number, one.version))))
                case h.ReportCopied():
                    out.copied.append((number, one.server, self.version))

    def _refuse_all(self, number: int, out: Outgoing) -> None:
        held = self._held[number]
        for client, _ in held.questions:
            out.clients.append((client, Framed(NotPrimary(number, self.version))))
        held.questions.clear()

    # --- questions ---------------------------------------------------------------------------------------------------

    def _answer(self, number: int, out: Outgoing) -> None:
        """Answer what can be answered now."""
        held = self._held[number]
        if not held.holding.is_primary:
            return
        reached = held.holding.everywhere
        caught_up = reached >= held.holding.last[1]
        everywhere = reached >= held.reached.get(held.store.version, 0)
        left = []
        for client, question in held.questions:
            letter = None
            if _has_own(held.holding.applied, question):
                letter = held.store.reply(question, held.segment, everywhere, caught_up)
            if letter is None:
                left.append((client, question))
            else:
                out.clients.append((client, letter))
        held.questions = left


def _has_own(applied: AppliedChanges, question: Question) -> bool:
    """Whether the slice has the changes that the asker wants to see: one of them may be lost, and come again."""
    if isinstance(question, OrderedQuestion):
        return applied.all_below(question.client) >= question.after
    return True
