"""A safetensors file of weights, read lazily: from a path or URL, by name, whole tensors or boxes of them.

It has no checksum. What can be checked is its header, which must account for every byte of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod

import torch

from distbelief.checkpoint.boxes import Box
from distbelief.checkpoint.faults import CheckpointDamaged
from distbelief.checkpoint.filling import Extent, Filling
from distbelief.checkpoint.headers import LENGTH_BYTES, begins, decode_header
from distbelief.checkpoint.lazy import LazyTensors, Outline, Wanted
from distbelief.checkpoint.partreading import pour, read_header
from distbelief.checkpoint.storage import Folder, Where, folder_at, size_of
from distbelief.checkpoint.weights import KINDS
from distbelief.errors import DistBeliefError

_TYPES: dict[str, torch.dtype] = {kind: getattr(torch, name) for name, kind in KINDS.items()}


class WeightsFile(LazyTensors):
    def __init__(self, folder: Folder, name: str, outlines: Mapping[str, Outline], first: Mapping[str, int]) -> None:
        """`first`: where in the file each tensor's bytes begin."""
        super().__init__(outlines)
        self._folder = folder
        self._name = name
        self._first = first

    def read(self, wanted: Sequence[Wanted]) -> list[torch.Tensor]:
        return [self._read_box(name, box) for name, box in wanted]

    def _read_box(self, name: str, box: Box) -> torch.Tensor:
        into = self.blank(name, box)
        if into.numel():
            shape = self.outlines[name][1]
            filling = Filling(Extent.of(shape, 0, prod(shape), None), box, into)
            with _said_of(self._folder.url_of(self._name)):
                pour(self._folder, self._name, self._first[name], filling.spans(), filling)
        return into


def open_weights(where: Where) -> WeightsFile:
    """
    >>> import fsspec, safetensors.torch
    >>> fsspec.filesystem("memory").pipe("/file/w.safetensors", safetensors.torch.save({"w": torch.eye(3)}))
    >>> weights = open_weights("memory://file/w.safetensors")
    >>> weights.outlines, weights.read_box("w", ((1, 3), (1, 2)))
    ({'w': (torch.float32, (3, 3))}, tensor([[1.],
            [0.]]))
    """
    url = folder_at(where).url
    parent, _, name = url.rpartition("/")
    folder = folder_at(parent or "/")
    size_bytes = size_of(folder, name)
    if size_bytes is None:
        raise DistBeliefError(f"there is no {url}", hint="give a safetensors file")
    with _said_of(url):
        header = read_header(folder, name, size_bytes)
    order, fault = decode_header(header, max(0, size_bytes - LENGTH_BYTES - len(header)))
    outlines: dict[str, Outline] = {}
    for tensor in order:
        if tensor.kind not in _TYPES:
            raise DistBeliefError(f"{url}: tensor '{tensor.key}' is of the type {tensor.kind}, which is not known here")
        dtype = _TYPES[tensor.kind]
        outlines[tensor.key] = dtype, tensor.shape
        if any(size < 0 for size in tensor.shape) or prod(tensor.shape) * dtype.itemsize != tensor.size_bytes:
            fault = f"'{tensor.key}' has {tensor.size_bytes} bytes, which is not right for its type and shape"
    if fault:
        raise _damaged(url, fault)
    if not outlines:
        raise DistBeliefError(f"{url} holds no tensors")
    return WeightsFile(folder, name, outlines, begins(order, LENGTH_BYTES + len(header)))


@contextmanager
def _said_of(url: str) -> Iterator[None]:
    """This is no checkpoint: there is no older one to take instead."""
    try:
        yield
    except CheckpointDamaged as error:
        raise _damaged(url, error.message.removeprefix(f"{url} ")) from error


def _damaged(url: str, fault: str) -> DistBeliefError:
    return DistBeliefError(f"{url} is damaged, or no safetensors file: {fault}", hint="restore it from a copy")
