"""The set of messages that one kind of parameter server exchanges with its clients, as decoders.

msgspec decodes a tagged union only if it knows every type when the decoder is made. A `MessageSet` lists them: each
feature whose slices lie on servers has one (`RUN_MESSAGES` here for the strategy `ps`; `sandblaster` and `kv` in their
own folders) and hands it to its `ServerClient` and, as `Slices.messages`, to its `ServerEdge`. Messages of another
feature do not decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any, Union

import zmq

from distbelief.control.messages import Decoder
from distbelief.control.signatures import SERVER, WORKER, Sender
from distbelief.strategies.ps.protocol import messages as m
from distbelief.strategies.ps.protocol.frames import Framed, attach_payloads
from distbelief.strategies.ps.protocol.peers import ChangeAcknowledged, ForwardedChange, SliceCopySent
from distbelief.strategies.ps.tables import messages as t


class MessageSet:
    """`contents`: what may be pushed. `given`: what acknowledgements bring along, if anything."""

    def __init__(
        self,
        contents: Sequence[type[m.Content]],
        questions: Sequence[type[m.Question]],
        replies: Sequence[type[m.Reply]],
        given: type[m.PushResult] = m.PushResult,
    ) -> None:
        answer: Any = given
        content: Any = Union[tuple(contents)]  # noqa: UP007
        self.from_clients: Any = Union[(m.Push[content], *questions)]
        self.from_servers: Any = ForwardedChange[content] | SliceCopySent | ChangeAcknowledged
        self.to_clients: Any = Union[(m.Acknowledged[answer], m.NotPrimary, *replies)]

    # Decoders are made on first use: a client never needs that of servers, and a server never that of clients.

    @cached_property
    def _for_client(self) -> Decoder[list[m.Header]]:
        return Decoder(_list_of(self.to_clients))

    @cached_property
    def _for_server(self) -> Decoder[list[m.Header]]:
        return Decoder(_list_of(self.from_clients | self.from_servers))

    def unpack_for_client(self, frames: Sequence[zmq.Frame]) -> list[Framed]:
        """The messages in what came to a client. Raises msgspec.MsgspecError or DistBeliefError for anything else."""
        return attach_payloads(self._for_client.decode(frames[0].buffer), frames[1:])

    def unpack_for_server(self, frames: Sequence[zmq.Frame]) -> list[Framed]:
        """The messages in what came to a server. Raises msgspec.MsgspecError or DistBeliefError for anything else."""
        return attach_payloads(self._for_server.decode(frames[0].buffer), frames[1:])


def _list_of(kind: Any) -> Any:
    return list[kind]


def may_say(sender: Sender, message: m.Header) -> bool:
    """Whether the authenticated sender may send the message: clients and servers speak for themselves alone."""
    match message:
        case ForwardedChange() | SliceCopySent() | ChangeAcknowledged():
            return sender == (SERVER, message.server)
        case m.Push():
            speakers = {message.client, message.content.speaker} - {None}
            return sender.role == WORKER and speakers == {sender.number}
        case m.OrderedQuestion():
            return sender == (WORKER, message.client)
    return sender.role == WORKER


RUN_MESSAGES = MessageSet(
    contents=(
        m.PartialSum, m.RestartStep, m.ApplyStep, m.StepBegun, m.Note, m.Gradient,
        m.RequestLease, m.CompleteUpdate, m.Members, m.SetGate, m.OpenGate,
        t.ShardRowGradients, t.UpdateRowGradients,
    ),
    questions=(m.PullValues, m.MeasureStep, m.Inspect, m.ReadState, t.PullRows, t.ListRows, t.CountRows),
    replies=(m.PulledValues, m.StepMeasured, m.Inspected, m.SliceState, t.PulledRows, t.CountedRows),
    given=m.LeaseResult,
)  # fmt: skip
"""Of the strategy `ps`."""
