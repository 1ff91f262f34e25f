"""IDX files, the format of MNIST and its relatives, as tensors in memory.

An IDX file has two zero bytes, a byte for the element type, a byte for the number of dimensions, each dimension as a
big-endian 32-bit number, then the elements, big-endian, last dimension fastest. Compression is detected from the
content, not the name. This module knows nothing of models or particular data sets.
"""

from __future__ import annotations

import gzip
import os
import zlib
from math import prod
from typing import Any, overload

import fsspec
import numpy as np
import numpy.typing as npt
import torch

from distbelief.errors import JobError

Path = str | os.PathLike[str]

_ELEMENT_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_GZIP_MAGIC = b"\x1f\x8b"


@overload
def idx(images: Path, labels: None = None, *, normalize: bool = True) -> torch.Tensor: ...


@overload
def idx(images: Path, labels: Path, *, normalize: bool = True) -> tuple[torch.Tensor, torch.Tensor]: ...


def idx(
    images: Path, labels: Path | None = None, *, normalize: bool = True
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Read an IDX file, and optionally its file of labels; gzipped or not, from a path or a URL.

    With `normalize`, bytes become float32 between 0 and 1, and images without a channel dimension get one (N×H×W
    becomes N×1×H×W). Integer labels become int64, which torch's losses need.

    >>> import tempfile
    >>> file = tempfile.NamedTemporaryFile()
    >>> _ = file.write(bytes([0, 0, 8, 3,  0, 0, 0, 1,  0, 0, 0, 1,  0, 0, 0, 2,  0, 255])); file.flush()
    >>> idx(file.name)
    tensor([[[[0., 1.]]]])
    """
    image_array = _read(images)
    pixels = torch.from_numpy(image_array)
    if normalize and pixels.dtype == torch.uint8:
        pixels = pixels.to(torch.float32).div_(255)
        pixels = pixels.unsqueeze(1) if pixels.dim() == 3 else pixels
    if labels is None:
        return pixels
    label_array = _read(labels)
    if label_array.shape[0] != image_array.shape[0]:
        raise JobError(f"{images} has {image_array.shape[0]} images but {labels} has {label_array.shape[0]} labels")
    answers = torch.from_numpy(label_array)
    return pixels, answers if answers.is_floating_point() else answers.to(torch.int64)


def _read(path: Path) -> npt.NDArray[Any]:
    name = os.fspath(path)
    raw = _bytes_of(name)
    if raw[:2] == _GZIP_MAGIC:
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise JobError(f"{name} is damaged: its gzip data cannot be unpacked ({error})") from error
    return _parse(name, raw)


def _parse(name: str, raw: bytes) -> npt.NDArray[Any]:
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in _ELEMENT_TYPES or raw[3] == 0:
        begins = " ".join(f"{byte:02x}" for byte in raw[:4]) or "nothing"
        raise JobError(
            f"{name} is not an IDX file: it begins with {begins}",
            hint="an IDX file begins with 00 00, the element type (08, 09, 0b, 0c, 0d or 0e) and the number of "
            "dimensions",
        )
    element = np.dtype(_ELEMENT_TYPES[raw[2]])
    data_start = 4 + 4 * raw[3]
    if len(raw) < data_start:
        raise JobError(f"{name} is truncated: its header takes {data_start} bytes, the file has {len(raw)}")
    shape = tuple(int(size) for size in np.frombuffer(raw, ">u4", raw[3], 4))
    expected = data_start + prod(shape) * element.itemsize
    if len(raw) != expected:
        what = "truncated" if len(raw) < expected else "damaged (too long)"
        described = "×".join(map(str, shape))
        raise JobError(f"{name} is {what}: {described} elements take {expected} bytes, the file has {len(raw)}")
    elements = np.frombuffer(raw, element, prod(shape), data_start)
    return elements.astype(element.newbyteorder("=")).reshape(shape)


def _bytes_of(name: str) -> bytes:
    """The file's content; if the file does not exist, that of the same name with .gz."""
    try:
        return _contents(name)
    except FileNotFoundError:
        pass
    try:
        return _contents(name + ".gz")
    except FileNotFoundError as error:
        raise JobError(f"there is no file {name} (nor {name}.gz)") from error


def _contents(name: str) -> bytes:
    try:
        if "://" not in name or os.path.exists(name):
            # fsspec interprets some characters ("::", "~"); a local path must be taken literally
            with open(name, "rb") as local:
                return local.read()
        with fsspec.open(name, "rb") as remote:
            return bytes(remote.read())
    except FileNotFoundError:
        raise
    except (OSError, ValueError, ImportError) as error:
        raise JobError(f"cannot read {name}: {error}") from error
