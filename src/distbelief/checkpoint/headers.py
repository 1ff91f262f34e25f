"""The header of a safetensors file.

safetensors' own functions want every tensor whole and in memory at once. The format is small enough to read and write
here: eight bytes with the length of a header, the header as JSON, then the tensors' bytes without gaps.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

METADATA = "__metadata__"
LENGTH_BYTES = 8
_ALIGN = 8


@dataclass(frozen=True)
class Placed:
    """A tensor in a file, in the order of their bytes."""

    key: str
    kind: str
    """safetensors' name of the type."""
    shape: tuple[int, ...]
    size_bytes: int


class _Place(msgspec.Struct, forbid_unknown_fields=True):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


def encode_header(tensors: Iterable[Placed]) -> bytes:
    """What the file begins with, the length included."""
    table: dict[str, Any] = {METADATA: {"format": "pt"}}
    begin = 0
    for tensor in tensors:
        table[tensor.key] = _Place(tensor.kind, tensor.shape, (begin, begin + tensor.size_bytes))
        begin += tensor.size_bytes
    text = msgspec.json.encode(table)
    text += b" " * (-len(text) % _ALIGN)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def begins(tensors: Iterable[Placed], first: int) -> dict[str, int]:
    """Where the bytes of each begin, if those of the first one begin there."""
    found = {}
    for tensor in tensors:
        found[tensor.key] = first
        first += tensor.size_bytes
    return found


def decode_header(text: bytes, data_bytes: int) -> tuple[list[Placed], str]:
    """The tensors in the order of their bytes, which are `data_bytes` together; or none, and what is wrong.

    Nothing is raised here: where there is a checksum, that is the better thing to say of a damaged header.
    """
    try:
        table = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        table.pop(METADATA, None)
        found = {key: msgspec.json.decode(raw, type=_Place) for key, raw in table.items()}
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return [], f"its header cannot be read ({error})"
    reached, order = 0, []
    for key, place in sorted(found.items(), key=lambda item: item[1].data_offsets):
        begin, end = place.data_offsets
        if begin != reached or end < begin:
            return [], f"'{key}' lies at other bytes"
        reached = end
        order.append(Placed(key, place.dtype, place.shape, end - begin))
    if reached != data_bytes:
        return [], f"it has {data_bytes} bytes of data where {reached} belong"
    return order, ""
