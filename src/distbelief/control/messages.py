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

SECRET_BYTES = 32
STATUS_UNKNOWN = -1000
"""In place of an exit status: the process is dead, and its status is not known yet."""
STATUS_NOT_STARTED = -1001
"""In place of an exit status: the host could not start the process."""
RUN_ENDS = "the run ends"
"""The reason for an abort after which no started step needs to be finished."""
PROFILE_FOLDER = "profile"
"""A folder of the run directory with recordings of some steps. It exists only if a profile was asked for."""
EXIT_REPORTED = 3
"""A worker's exit status after it has reported the cause in a WorkerFailed, which may still be on its way."""

T = TypeVar("T")


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
    return _encoder.encode(message)


def decode_event(data: bytes) -> Event:
    """Raises msgspec.MsgspecError for bytes that are no event."""
    return _events.decode(data)


def decode_command(data: bytes) -> Command:
    """Raises msgspec.MsgspecError for bytes that are no command."""
    return _commands.decode(data)
