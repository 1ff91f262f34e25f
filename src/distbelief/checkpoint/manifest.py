"""The manifest: the content of a checkpoint, as strict JSON with a checksum over itself.

    FOLDER/step-000000120/manifest.json
    FOLDER/step-000000120/part-00001-of-00002.safetensors

The last key, `checksum`, covers every byte before it. `checksum` and `format_version` keep their place and meaning in
every version of the format, so a reader can tell damage from another version. This module reads and writes no files.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from datetime import datetime
from math import prod
from typing import Any

import msgspec

from distbelief.checkpoint.faults import CheckpointDamaged, CheckpointForeign, CheckpointFormat
from distbelief.checkpoint.rules import boxes
from distbelief.checkpoint.rules.boxes import Box, Stretch, coverage_fault

OLDEST_FORMAT = 1
"""Format with stretches of tensors only. It is still written when it suffices, so that older programs can read it."""
NEWEST_FORMAT = 2
"""Format with stretches and boxes of tensors."""
MANIFEST = "manifest.json"

# torch's name of a type -> (safetensors' name, bytes per element)
DTYPES = {
    "float64": ("F64", 8),
    "float32": ("F32", 4),
    "float16": ("F16", 2),
    "bfloat16": ("BF16", 2),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "int64": ("I64", 8),
    "int32": ("I32", 4),
    "int16": ("I16", 2),
    "int8": ("I8", 1),
    "uint64": ("U64", 8),
    "uint32": ("U32", 4),
    "uint16": ("U16", 2),
    "uint8": ("U8", 1),
    "bool": ("BOOL", 1),
}

RUN = "run_id"
"""In the facts about the job: which run has saved the checkpoint. Checkpoints of earlier versions do not have it."""

_MARK = b',"checksum":"sha256:'
_PART_NAME = re.compile(r"part-(\d{5,})-of-(\d{5,})\.safetensors", re.ASCII)
_STEP_NAME = re.compile(r"step-(\d{9,})", re.ASCII)
_DAMAGED_HINT = "restore it from a copy, or delete this checkpoint; resuming takes the newest one that is sound"


class PartEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A piece of one tensor in a part: a stretch in row-major order, or a box."""

    tensor: str
    dtype: str
    shape: tuple[int, ...]
    """The shape of the whole tensor."""
    first: int
    count: int
    box: Box | None = None
    """None: the piece is a stretch. Otherwise `first` is the index of the box's first element in the whole tensor."""

    @classmethod
    def of_box(cls, tensor: str, dtype: str, shape: Sequence[int], box: Box) -> PartEntry:
        """The entry of a box. A box that is a single stretch becomes a stretch. `seal` ignores entries of empty boxes.

        >>> PartEntry.of_box("w", "float32", (4, 6), ((0, 4), (2, 4))).key
        'w[0:4,2:4]'
        >>> PartEntry.of_box("w", "float32", (4, 6), ((2, 4), (0, 6))).key
        'w[12:24]'
        """
        if not boxes.is_box_of(shape, box):
            raise ValueError(f"tensor '{tensor}' of shape {tuple(shape)} has no box {boxes.shown(box)}")
        count = boxes.volume(box)
        is_stretch = not prod(shape) or (count > 0 and boxes.stretch_of(shape, box) is not None)
        first = boxes.first_of(shape, box) if count else 0
        return cls(tensor, dtype, tuple(shape), first, count, None if is_stretch else box)

    @property
    def empty(self) -> bool:
        """Whether the box has no elements although the tensor has some; such a box is not written."""
        return self.box is not None and not self.count and prod(self.shape) > 0

    @property
    def whole(self) -> bool:
        return self.count == prod(self.shape)

    @property
    def key(self) -> str:
        """The entry's name inside the part. A whole tensor keeps its own name, so the file is readable on its own."""
        if self.whole:
            return self.tensor
        return f"{self.tensor}{boxes.shown(self.box or ((self.first, self.first + self.count),))}"

    @property
    def stored_shape(self) -> tuple[int, ...]:
        if self.whole:
            return self.shape
        return (self.count,) if self.box is None else boxes.sizes(self.box)

    @property
    def size_bytes(self) -> int:
        return self.count * DTYPES[self.dtype][1]


class PartRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The description of a written part, from the part's writer to the member that seals the checkpoint."""

    file: str
    size_bytes: int
    sha256: str
    entries: tuple[PartEntry, ...]


class PartFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    file: str
    size_bytes: int
    sha256: str


class TensorRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    dtype: str
    shape: tuple[int, ...]
    stretches: tuple[Stretch, ...]


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """The caller's facts about a step. The caller makes the content of each JSON object."""

    job: dict[str, Any] = {}
    data: dict[str, Any] = {}
    random: dict[str, Any] = {}
    versions: dict[str, Any] = {}
    metrics: dict[str, float | None] = {}


class Manifest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    format_version: int
    step: int
    created: datetime
    job: dict[str, Any]
    data: dict[str, Any]
    random: dict[str, Any]
    versions: dict[str, Any]
    metrics: dict[str, float | None]
    """None stands for a value that is not finite, because JSON cannot express it."""
    parts: tuple[PartFile, ...]
    tensors: tuple[TensorRecord, ...]

    def entries_of(self, part: int) -> list[PartEntry]:
        return [
            PartEntry(t.name, t.dtype, t.shape, stretch.first, stretch.count, stretch.box)
            for t in self.tensors
            for stretch in t.stretches
            if stretch.part == part
        ]


def check_run(manifest: Manifest, folder: object, run_id: str) -> None:
    """Raises CheckpointForeign if another run has saved this checkpoint. An empty `run_id` matches every run."""
    saved_by = str(manifest.job.get(RUN, ""))
    if run_id and saved_by and saved_by != run_id:
        raise CheckpointForeign(
            f"the checkpoint of step {manifest.step} in {folder} was saved by another run",
            hint="give each run a folder of its own (--checkpoints)",
        )


def format_of(tensors: Iterable[TensorRecord]) -> int:
    """The oldest format that can describe the places of these tensors."""
    has_boxes = any(stretch.box is not None for t in tensors for stretch in t.stretches)
    return NEWEST_FORMAT if has_boxes else OLDEST_FORMAT


class _Version(msgspec.Struct):
    format_version: int


def step_name(step: int) -> str:
    """
    >>> step_name(120)
    'step-000000120'
    """
    return f"step-{step:09d}"


def step_of(name: str) -> int | None:
    match = _STEP_NAME.fullmatch(name)
    return int(match[1]) if match and step_name(int(match[1])) == name else None


def part_name(part: int, parts: int) -> str:
    """
    >>> part_name(1, 3)
    'part-00001-of-00003.safetensors'
    """
    return f"part-{part:05d}-of-{parts:05d}.safetensors"


def part_number(name: str) -> tuple[int, int] | None:
    match = _PART_NAME.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else None


def encode(manifest: Manifest) -> bytes:
    body = msgspec.json.encode(manifest, enc_hook=_plain)[:-1]
    return body + _MARK + hashlib.sha256(body).hexdigest().encode() + b'"}'


def _plain(value: object) -> str:
    """Converts instances of `str` subclasses, such as `torch.__version__`, to plain values."""
    if isinstance(value, str):
        return str.__str__(value)
    raise TypeError(f"a checkpoint's facts are plain JSON: {type(value).__name__} is not")


def decode(data: bytes, url: str, step: int) -> Manifest:
    """Decode a manifest and check all of it; `url` is for error messages."""
    body, mark, tail = data.rpartition(_MARK)
    if not mark or not tail.endswith(b'"}'):
        raise CheckpointDamaged(f"{url} is torn: it does not end with its checksum", hint=_DAMAGED_HINT)
    if tail[:-2] != hashlib.sha256(body).hexdigest().encode():
        raise CheckpointDamaged(f"{url} is damaged: its checksum differs", hint=_DAMAGED_HINT)
    body += b"}"
    try:
        _check_version(msgspec.json.decode(body, type=_Version).format_version, url)
        manifest = msgspec.json.decode(body, type=Manifest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CheckpointDamaged(f"{url} is not a manifest: {error}", hint=_DAMAGED_HINT) from error
    fault = f"it is of step {manifest.step}" if manifest.step != step else _fault(manifest)
    if fault:
        raise CheckpointDamaged(f"{url} is refused: {fault}", hint=_DAMAGED_HINT)
    return manifest


def _check_version(found: int, url: str) -> None:
    read = f"this version reads formats {OLDEST_FORMAT} to {NEWEST_FORMAT}"
    if found < OLDEST_FORMAT:
        raise CheckpointFormat(
            f"{url} is in the older checkpoint format {found}; {read}",
            hint="load it with the version of distbelief that wrote it (`versions` in the manifest) and save it anew",
        )
    if found > NEWEST_FORMAT:
        raise CheckpointFormat(
            f"{url} is in the newer checkpoint format {found}; {read}",
            hint="upgrade distbelief to the version that wrote it (`versions` in the manifest), or a later one",
        )


def _fault(manifest: Manifest) -> str:
    """The fault of a manifest whose JSON is valid, or an empty string."""
    parts = len(manifest.parts)
    for number, part in enumerate(manifest.parts, start=1):
        if part.file != part_name(number, parts):  # also keeps every path inside the folder
            return f"it names the file {part.file!r} where {part_name(number, parts)} belongs"
    if len({t.name for t in manifest.tensors}) < len(manifest.tensors):
        return "it names a tensor twice"
    for t in manifest.tensors:
        if t.dtype not in DTYPES:
            return f"tensor '{t.name}' has the unknown type {t.dtype!r}"
        if any(not 1 <= stretch.part <= parts for stretch in t.stretches):
            return f"tensor '{t.name}' lies in a part that is not listed"
        if fault := coverage_fault(t.name, t.shape, t.stretches):
            return fault
    if format_of(manifest.tensors) > manifest.format_version:
        return f"it has boxes of tensors, which format {manifest.format_version} does not allow"
    return ""
