"""The control plane's words: what members tell the coordinator (events) and what it tells them (commands).

Every message is a typed, tagged msgspec struct; bytes that do not decode to one of them are dropped by the receiver.
Events are in the past tense, commands imperative. No tensor and no pickle ever travels here.
"""

from __future__ import annotations

import msgspec

from distbelief.control.commands import *  # noqa: F403
from distbelief.control.commands import Command
from distbelief.control.decoding import Decoder
from distbelief.control.events import *  # noqa: F403
from distbelief.control.events import Event
from distbelief.control.reports import *  # noqa: F403

SECRET_BYTES = 32
STATUS_UNKNOWN = -1000
"""In place of an exit status: it is dead, and of what will be known later."""
RUN_ENDS = "the run ends"
"""Why a worker gives up what it does: the one reason for which nothing is worth finishing."""
PROFILE_FOLDER = "profile"
"""In the run directory: what workers record of some steps. It is there where a profile was asked for."""
EXIT_REPORTED = 3
"""A worker ends with this status when it has said why in a WorkerFailed, which may still be on its way."""

_encoder = msgspec.msgpack.Encoder()
_events = Decoder[Event](Event)
_commands = Decoder[Command](Command)


def encode(message: Event | Command) -> bytes:
    return _encoder.encode(message)


def decode_event(data: bytes) -> Event:
    """Raises msgspec.MsgspecError for anything that is not an event."""
    return _events.decode(data)


def decode_command(data: bytes) -> Command:
    return _commands.decode(data)
