"""Texts that fit into a message: of limited length, and readable for every receiver.

Users' texts have any length and any characters (an exception with 50 MB, a file name that is no UTF-8). A message must
not be lost because of one, so its sender cuts the text, and a mark in the text says so. Pure.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

MOST_MESSAGE = 2_000
MOST_DETAILS = 20_000
"""The longest message and traceback of a failure, in characters; the log of the process that failed has the whole."""
_MOST_CHARACTERS = 10_000
"""Of each text in a message that is too long as a whole."""

T = TypeVar("T")


def text_of(error: BaseException) -> str:
    """The text of an exception of any kind.

    >>> text_of(ValueError("no such class"))
    'no such class'
    """
    try:
        return str(error)
    except BaseException as other:
        return f"(its text cannot be shown: its __str__ raised {type(other).__name__})"


def readable(text: str) -> str:
    """The text with escapes in place of characters that cannot be encoded or would end a text early.

    >>> readable("caf\\u00e9 \\udcff \\0") == "caf\\u00e9 \\\\udcff \\\\x00"
    True
    """
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def cut(text: str, most: int, whole: str = "") -> str:
    """The text if it has at most `most` characters; else its beginning and its end, with a mark between them. `whole`:
    the file that has the whole text.

    >>> cut("abcdefghij", 4), cut("abcdefghij", 10)
    ('ab … 6 characters cut … ij', 'abcdefghij')
    >>> cut("x" * 3_200_000, 2, "logs/worker-1.log")
    'x … 3.2 MB cut; the whole is in logs/worker-1.log … x'
    """
    if len(text) <= most:
        return text
    missing = len(text) - most
    amount = f"{missing / 1e6:.1f} MB" if missing >= 100_000 else f"{missing:,} characters"
    mark = f" … {amount} cut{'; the whole is in ' if whole else ''}{whole} … "
    return text[: most - most // 2] + mark + text[len(text) - most // 2 :]


def fitted(message: T) -> T:
    """The same message, a msgspec struct, with every text readable and cut."""
    plain = msgspec.to_builtins(message, builtin_types=(bytes,))
    return msgspec.convert(_fitted(plain), type(message), builtin_types=(bytes,))


def _fitted(value: Any) -> Any:
    if isinstance(value, str):
        return cut(readable(value), _MOST_CHARACTERS)
    if isinstance(value, dict):
        return {_fitted(key): _fitted(part) for key, part in value.items()}
    return [_fitted(part) for part in value] if isinstance(value, list | tuple) else value
