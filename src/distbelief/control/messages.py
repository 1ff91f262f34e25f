"""The messages of the control plane: events to the coordinator, commands from it, and how they are encoded.

Every message is a typed, tagged msgspec struct. A receiver drops bytes that decode to none of them. No tensor and no
pickle ever travels here.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from distbelief.control.commands import *  # noqa: F403
from distbelief.control.commands import Command
from distbelief.control.events import *  # noqa: F403
from distbelief.control.events import Event
from distbelief.control.fitting import fitted
from distbelief.errors import DistBeliefError

SECRET_BYTES = 32
STATUS_UNKNOWN = -1000
"""In place of an exit status: the process is dead, and its status is not known yet."""
STATUS_NOT_STARTED = -1001
"""In place of an exit status: the host could not start the process."""
RUN_ENDS = "the run ends"
"""The reason for an abort after which no started step needs to be finished."""
LEADER_GONE = "the process that started the run is gone"
"""The reason of an EndRun after which the run may be resumed at once: agents of other hosts wait for that."""
PROFILE_FOLDER = "profile"
"""A folder of the run directory with recordings of some steps. It exists only if a profile was asked for."""
EXIT_REPORTED = 3
"""A worker's exit status after it has reported the cause in a WorkerFailed, which may still be on its way."""

MAX_EVENT_BYTES = 2 << 20
"""The longest event that the coordinator takes."""

T = TypeVar("T")


class MessageTooLong(DistBeliefError):
    """The sender has not sent a message, because its receiver would drop it."""


class Decoder(Generic[T]):
    """Decodes untrusted bytes: the result is a message, or one kind of error.

    msgspec alone raises further errors for text that is no UTF-8 and for endless nesting.
    """

    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)

    def decode(self, data: Any) -> T:
        """Raises msgspec.MsgspecError for bytes that are no `T`.

        >>> Decoder[str](str).decode(msgspec.msgpack.encode("here"))
        'here'
        """
        try:
            message: T = self._decoder.decode(data)
        except (UnicodeDecodeError, RecursionError) as error:
            raise msgspec.DecodeError(f"no message: {type(error).__name__}") from None
        return message


_encoder = msgspec.msgpack.Encoder()
_events = Decoder[Event](Event)
_commands = Decoder[Command](Command)


def encode(message: Event | Command) -> bytes:
    """The message's bytes. The texts of an event that is too long, or that has text which is no Unicode, are cut, with
    a mark. Raises MessageTooLong if that does not suffice: the coordinator would drop the event."""
    try:
        data = _encoder.encode(message)
    except UnicodeEncodeError:
        message = fitted(message)
        data = _encoder.encode(message)
    if len(data) > MAX_EVENT_BYTES and isinstance(message, Event):
        data = _encoder.encode(fitted(message))
        if len(data) > MAX_EVENT_BYTES:
            raise MessageTooLong(
                f"a message {type(message).__name__} of {len(data) / 1e6:.1f} MB is longer than the coordinator takes "
                f"({MAX_EVENT_BYTES / 1e6:.1f} MB)"
            )
    return data


def decode_event(data: bytes) -> Event:
    """Raises msgspec.MsgspecError for bytes that are no event."""
    return _events.decode(data)


def decode_command(data: bytes) -> Command:
    """Raises msgspec.MsgspecError for bytes that are no command."""
    return _commands.decode(data)
