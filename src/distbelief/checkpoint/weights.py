"""Weights as a file and as a hash: parameters and buffers, by name."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import safetensors.torch
import torch


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


def save_weights(model: torch.nn.Module, path: Path) -> None:
    """Write what `load_state_dict` expects as a safetensors file: whole or not at all."""
    kept = model.state_dict().keys()  # without buffers that are not persistent
    copies = {name: t.cpu().contiguous().clone() for name, t in named_tensors(model).items() if name in kept}
    draft = path.with_name(f".{path.name}.draft")
    safetensors.torch.save_file(copies, draft)
    with draft.open("rb") as file:
        os.fsync(file.fileno())
    draft.rename(path)
