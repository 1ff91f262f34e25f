"""A parameter server without its sockets: messages come in with their senders, and messages to others go out.

Replication is decided in rules/replication.py, and a store knows what a change does. A node connects the two: it makes
the slices that the map gives to this server, passes changes on, and answers questions. A question waits until its store
can answer it. A question about values is answered only when every server that counts has them, too: after that the
worker may overwrite what it has pushed.
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
    ChangeAcknowledged,
    ForwardedChange,
    NotPrimary,
    OrderedQuestion,
    Push,
    Question,
    SliceCopySent,
    Update,
)
from distbelief.strategies.ps.rules import replication
from distbelief.strategies.ps.rules.applied import AppliedChanges
from distbelief.strategies.ps.server.stores import Change, SliceStore

ToClient = tuple[bytes, Framed]
"""(identity of the client's socket, message)"""
ToServer = tuple[int, Framed]
REACHED = 4
"""Versions for which a node remembers the change that led to them."""


@dataclass
class Outgoing:
    """Messages to be sent."""

    clients: list[ToClient] = field(default_factory=list)
    servers: list[ToServer] = field(default_factory=list)
    copied: list[tuple[int, int, int]] = field(default_factory=list)
    """(slice, recruit, version of the map): complete copies, for the coordinator."""

    def add(self, more: Outgoing) -> None:
        self.clients += more.clients
        self.servers += more.servers
        self.copied += more.copied


@dataclass
class _OwnSlice:
    slice: replication.ReplicatedSlice
    store: SliceStore
    segment: str
    """The name of the shared memory that has its values; empty: workers cannot map them."""
    questions: list[tuple[bytes, Question]] = field(default_factory=list)
    askers: dict[replication.Name, bytes] = field(default_factory=dict)
    """Change -> the identity of the client that waits for the acknowledgement."""
    reached: dict[int, int] = field(default_factory=dict)
    """Version -> the number of the change that led to it, for the last versions."""


Make = Callable[[int, bool], tuple[SliceStore, str]]
"""(slice, whether it gets the first state of this life) -> (its store, the name of its shared memory)"""


class ServerNode:
    def __init__(self, me: int, make: Make) -> None:
        self._me = me
        self._make = make
        self._held: dict[int, _OwnSlice] = {}
        self._map: ServerMap | None = None

    @property
    def version(self) -> int:
        return self._map.version if self._map else 0

    def learn(self, known: ServerMap) -> Outgoing:
        """A map, perhaps a newer one."""
        out = Outgoing()
        if self._map and known.version <= self._map.version:
            return out
        if self._map and known.life > self._map.life:
            self._held.clear()  # all slices begin anew from a checkpoint
        began = self._map is None or known.life > self._map.life
        self._map = known
        for number, (primary, backup, recruit) in enumerate(
            zip(known.primaries, known.backups, known.recruits, strict=True)
        ):
            roles = replication.Roles(known.version, primary, backup, recruit)
            if self._me not in (primary, backup, recruit):
                if number in self._held:
                    self._perform(number, self._held[number].slice.learn(roles), out)
                    self._refuse_all(number, out)
                    del self._held[number]
            elif number in self._held:
                self._perform(number, self._held[number].slice.learn(roles), out)
                if not self._held[number].slice.is_primary:
                    self._refuse_all(number, out)
            else:
                self._add_slice(number, roles, began, out)
            if number in self._held:
                self._answer(number, out)
        return out

    def _add_slice(self, number: int, roles: replication.Roles, began: bool, out: Outgoing) -> None:
        first = began and self._me in (roles.primary, roles.backup)
        store, segment = self._make(number, first)
        # A slice that comes here later gets a copy: it does not even have the first state.
        replicated = replication.ReplicatedSlice(
            self._me, store, roles, last=replication.NO_CHANGE if first else (-1, -1)
        )
        self._held[number] = _OwnSlice(replicated, store, segment)
        self._perform(number, replicated.begin(), out)

    def receive(self, framed: Framed, sender: bytes = b"") -> Outgoing:
        """A message of a client (with the identity of its socket) or of another server."""
        out, message = Outgoing(), framed.message
        match message:
            case ForwardedChange() | SliceCopySent() | ChangeAcknowledged():
                self._from_peer(message, framed.payload, out)
            case Push():
                held = self._held.get(message.slice)
                life = self._map.life if self._map else 0
                if 0 < message.life < life:
                    return out  # its sender will learn from its next map that all slices have begun anew
                if held is None or not held.slice.is_primary or message.life > life:
                    out.clients.append((sender, Framed(NotPrimary(message.slice, self.version))))
                    return out
                content = message.content
                name = (message.client, message.sequence)
                if isinstance(content, Update):
                    name = (RUN, content.update)
                held.askers[name] = sender
                self._changed(message.slice, held.slice.change(name, Change(content, framed.payload)), out)
            case Question():
                held = self._held.get(message.slice)
                if held is None or not held.slice.is_primary:
                    out.clients.append((sender, Framed(NotPrimary(message.slice, self.version))))
                    return out
                if (sender, message) not in held.questions:  # clients ask again when an answer takes long
                    held.questions.append((sender, message))
                self._answer(message.slice, out)
            case _:
                raise DistBeliefError(f"a server does not take the message {type(message).__name__}")
        return out

    def remind(self) -> Outgoing:
        """For a timer: see `ReplicatedSlice.remind`."""
        out = Outgoing()
        for number, held in self._held.items():
            self._perform(number, held.slice.remind(), out)
        return out

    # --- replication -------------------------------------------------------------------------------------------------

    def _from_peer(
        self, message: ForwardedChange[Any] | SliceCopySent | ChangeAcknowledged, payload: Any, out: Outgoing
    ) -> None:
        held = self._held.get(message.slice)
        if held is None or self._map is None or message.life != self._map.life:
            return  # one of the two servers will get a newer map, and the primary asks again
        match message:
            case ForwardedChange():
                change = Change(message.content, payload) if message.content is not None else None
                forward = replication.Forward(
                    self._me, message.term, message.before, message.position, message.name, change
                )
                outputs = held.slice.forwarded(message.server, forward)
            case SliceCopySent():
                state = (message.about, torch.frombuffer(bytearray(payload), dtype=torch.uint8))
                copy = replication.SendCopy(self._me, message.term, message.position, message.applied, state)
                outputs = held.slice.copied(message.server, copy)
            case ChangeAcknowledged():
                acknowledged = replication.Acknowledge(
                    self._me, message.term, message.position, message.version, message.differs
                )
                outputs = held.slice.acknowledged(message.server, acknowledged)
        self._changed(message.slice, outputs, out)

    def _changed(self, number: int, outputs: list[replication.Output], out: Outgoing) -> None:
        held = self._held[number]
        version = held.store.version
        if version not in held.reached:
            held.reached[version] = held.slice.last[1]
            while len(held.reached) > REACHED:
                del held.reached[next(iter(held.reached))]
        self._perform(number, outputs, out)
        self._answer(number, out)

    def _perform(self, number: int, outputs: list[replication.Output], out: Outgoing) -> None:
        held = self._held[number]
        assert self._map is not None
        life = self._map.life
        for one in outputs:
            match one:
                case replication.Forward():
                    change = one.content
                    if change and not held.slice.waits_for(
                        one.to
                    ):  # the worker may overwrite the segment before the follower reads it
                        change = held.store.with_bytes(change)
                    content = change.content if change else None
                    header = ForwardedChange(
                        self._me, life, number, one.term, one.before, one.position, one.name, content
                    )
                    out.servers.append((one.to, Framed(header, change.payload if change else None)))
                case replication.SendCopy():
                    about, content = one.state
                    sent = SliceCopySent(self._me, life, number, one.term, one.position, one.applied, about)
                    out.servers.append((one.to, Framed(sent, content.numpy())))
                case replication.Acknowledge():
                    acknowledged = ChangeAcknowledged(
                        self._me, life, number, one.term, one.position, one.version, one.differs
                    )
                    out.servers.append((one.to, Framed(acknowledged)))
                case replication.AnswerClient():
                    client = held.askers.pop(one.name, None)
                    if client is not None:
                        source, sequence = one.name
                        run = source if source == RUN else -1
                        given = held.store.given(source)
                        out.clients.append((client, Framed(Acknowledged(number, sequence, run, given))))
                case replication.RefuseClient():
                    client = held.askers.pop(one.name, None)
                    if client is not None:
                        out.clients.append((client, Framed(NotPrimary(number, one.version))))
                case replication.ReportCopied():
                    out.copied.append((number, one.server, self.version))

    def _refuse_all(self, number: int, out: Outgoing) -> None:
        held = self._held[number]
        for client, _ in held.questions:
            out.clients.append((client, Framed(NotPrimary(number, self.version))))
        held.questions.clear()

    # --- questions ------------------------------------------------------------------------------------------------

    def _answer(self, number: int, out: Outgoing) -> None:
        """Answer the questions that can be answered now."""
        held = self._held[number]
        if not held.slice.is_primary:
            return
        reached = held.slice.everywhere
        caught_up = reached >= held.slice.last[1]
        everywhere = reached >= held.reached.get(held.store.version, 0)
        left = []
        for client, question in held.questions:
            framed = None
            if _has_own(held.slice.applied, question):
                framed = held.store.reply(question, held.segment, everywhere, caught_up)
            if framed is None:
                left.append((client, question))
            else:
                out.clients.append((client, framed))
        held.questions = left


def _has_own(applied: AppliedChanges, question: Question) -> bool:
    """Whether the slice has the changes that the client asks for. A lost change is sent again, and the question waits
    for it."""
    if isinstance(question, OrderedQuestion):
        return applied.all_below(question.client) >= question.after
    return True
