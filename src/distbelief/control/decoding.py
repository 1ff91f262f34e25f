"""Bytes of strangers to typed messages: a message, or one kind of error, whatever the bytes are.

msgspec itself also lets text that is no UTF-8 and nesting without end out as errors of their own.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")


class Decoder(Generic[T]):
    def __init__(self, kind: Any) -> None:
        self._decoder = msgspec.msgpack.Decoder(kind)

    def decode(self, data: Any) -> T:
        """Raises msgspec.MsgspecError for anything that is no `T`.

        >>> Decoder[str](str).decode(msgspec.msgpack.encode("here"))
        'here'
        """
        try:
            message: T = self._decoder.decode(data)
        except (UnicodeDecodeError, RecursionError) as error:
            raise msgspec.DecodeError(f"no message: {type(error).__name__}") from None
        return message
