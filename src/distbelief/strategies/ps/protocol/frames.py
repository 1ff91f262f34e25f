"""Messages and their payloads as the frames of one ZeroMQ message, and the decoders that read them.

    | signature | a list of messages (msgpack) | payload of the first message that has one | of the second | …

A server's replies carry no signature: they go back over the connection on which the question came. On one host payloads
stay in shared memory, and a message names the segment instead. No pickle.

msgspec decodes a tagged union only if it knows every type when the decoder is made. A `MessageSet` lists them: each
feature whose slices lie on servers has one (`RUN_MESSAGES` here for the strategy `ps`; `sandblaster` and `kv` in their
own folders) and hands it to its `ServerClient` and, as `Slices.messages`, to its `ServerSockets`. Messages of another
feature do not decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Union

import msgspec
import zmq

import distbelief.strategies.ps.protocol.messages as m
import distbelief.strategies.ps.tables.messages as t
from distbelief.control.messages import Decoder
from distbelief.control.signatures import SERVER, WORKER, Sender, Signer
from distbelief.errors import DistBeliefError
from distbelief.strategies.ps.protocol.messages import ChangeAcknowledged, ForwardedChange, Header, SliceCopySent

_encoder = msgspec.msgpack.Encoder()


@dataclass(frozen=True)
class Framed:
    """A message and its payload.

    The payload is a view, not a copy: the bytes must not change before the message is sent. Where a slice sends values
    that may change meanwhile, a comment there says why that does no harm."""

    message: Any
    payload: Any = None


def pack(several: Sequence[Framed], signer: Signer | None = None) -> list[Any]:
    """The frames of one ZeroMQ message."""
    header = _encoder.encode([framed.message for framed in several])
    signature = [] if signer is None else [signer.sign(header)]
    return [*signature, header, *(framed.payload for framed in several if framed.payload is not None)]


def attach_payloads(messages: Sequence[Header], frames: Sequence[zmq.Frame]) -> list[Framed]:
    """Every message with its payload, if it has one."""
    left = list(frames)
    found = []
    for message in messages:
        payload = None
        if message.has_payload:
            if not left:
                raise DistBeliefError(f"a {type(message).__name__} came without its bytes")
            payload = left.pop(0).buffer
        found.append(Framed(message, payload))
    return found


class MessageSet:
    """The messages between the clients and the servers of one feature."""

    def __init__(
        self,
        contents: Sequence[type[m.Content]],
        questions: Sequence[type[m.Question]],
        replies: Sequence[type[m.Reply]],
        given: type[m.PushResult] = m.PushResult,
    ) -> None:
        """`contents`: what clients may push. `given`: what an acknowledgement brings along, if anything."""
        answer: Any = given
        content: Any = Union[tuple(contents)]  # noqa: UP007
        self.from_clients: Any = Union[(m.Push[content], *questions)]
        self.from_servers: Any = ForwardedChange[content] | SliceCopySent | ChangeAcknowledged
        self.to_clients: Any = Union[(m.Acknowledged[answer], m.NotPrimary, *replies)]

    # Decoders are made on first use: a client needs only the first one, a server only the second.

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
    """Whether the authenticated sender may send the message: clients and servers may only send in their own name."""
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
"""The messages of the strategy `ps`."""
