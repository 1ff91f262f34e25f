"""Weights as a file and as a hash: parameters and buffers, by name."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch

from distbelief.checkpoint.drafts import write_whole
from distbelief.errors import DistBeliefError


def named_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter and buffer, in name order; a tied one under each of its names."""
    found = dict(model.named_parameters(remove_duplicate=False))
    found.update(model.named_buffers(remove_duplicate=False))  # type: ignore[arg-type]
    return {name: found[name].detach() for name in sorted(found)}


def weights_sha256(model: torch.nn.Module) -> str:
    """SHA-256 over names, types, shapes and bytes, in name order.

    >>> a, b = torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    >>> _ = b.load_state_dict(a.state_dict())
    >>> weights_sha256(a) == weights_sha256(b)
    True
    """
    digest = hashlib.sha256()
    for name, tensor in named_tensors(model).items():
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(_bytes(tensor).data)
    return digest.hexdigest()


def _bytes(tensor: torch.Tensor) -> npt.NDArray[np.uint8]:
    flat = tensor.cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy()


def persistent_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """What `load_state_dict` expects: without buffers that are not persistent."""
    kept = model.state_dict().keys()
    return {name: tensor for name, tensor in named_tensors(model).items() if name in kept}


def save_weights(model: torch.nn.Module, path: Path) -> None:
    """Write what `load_state_dict` expects as a safetensors file: whole or not at all."""
    save_tensors(persistent_tensors(model), path)


def save_tensors(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write a safetensors file, whole or not at all, and read it back before it counts."""
    copies = {name: t.cpu().contiguous().clone() for name, t in tensors.items()}  # tied ones must not share memory

    def write(draft: Path) -> None:
        safetensors.torch.save_file(copies, draft, metadata={"format": "pt"})

    def check(draft: Path) -> None:
        found = safetensors.torch.load_file(draft)
        if found.keys() != copies.keys() or not all(_same(found[name], copy) for name, copy in copies.items()):
            raise DistBeliefError(f"what was written for {path} reads back otherwise", hint="look at the disk")

    write_whole(path, write, check)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and np.array_equal(_bytes(one), _bytes(other))
