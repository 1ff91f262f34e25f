"""Selects a worker's device and configures torch to give the same bits on every execution."""

from __future__ import annotations

import os

import torch
from torch.utils import deterministic

from distbelief.errors import JobError, NotEnoughMemory


def named_device(name: str) -> torch.device:
    """
    >>> named_device("cuda")
    device(type='cuda')
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise JobError(f"unknown device '{name}'", hint="a device is cpu, cuda or cuda:0") from error
    if device.type not in ("cpu", "cuda"):
        raise JobError(f"workers cannot compute on '{name}'", hint="a device is cpu, cuda or cuda:0")
    return device


def open_device(device: torch.device, place: int, exact: bool) -> torch.device:
    """Open the process's device. For `cuda` without a number the workers of a host take its accelerators in turn;
    `place` is this worker's index on its host."""
    if device.type == "cpu":
        return device
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before cuBLAS is first used; for equal bits
    if not torch.cuda.is_available():
        why = "this torch was built without CUDA" if torch.version.cuda is None else "torch sees no CUDA device here"
        raise JobError(
            f"there is no '{device}': {why}", hint="`distbelief doctor` looks at drivers; or use --device cpu"
        )
    count = torch.cuda.device_count()
    index = place % count if device.index is None else device.index
    if index >= count:
        raise JobError(f"there is no '{device}' here: the devices are cuda:0 to cuda:{count - 1}")
    torch.cuda.set_device(index)
    if exact:
        _be_deterministic()
    return torch.device("cuda", index)


def _be_deterministic() -> None:
    """Allow deterministic kernels only. Any other kernel raises an error that names it."""
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False  # benchmarking chooses kernels by measured time
    # These two implementations of attention refuse deterministic mode, or are not deterministic.
    torch.backends.cuda.enable_cudnn_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # no code here reads uninitialised memory


def identity(device: torch.device) -> str:
    """A unique identifier of the accelerator; empty for a host's processor."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""


def describe(device: torch.device) -> dict[str, str]:
    """The device facts that must be equal on all members for equal bits."""
    if device.type != "cuda":
        return {}
    return {
        "GPU": torch.cuda.get_device_name(device),
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
    }


def require_device_memory(device: torch.device, what: str, size_bytes: int) -> None:
    """Raise NotEnoughMemory, before anything is allocated, if the device has less free memory."""
    if device.type != "cuda":
        return
    free_bytes, _ = torch.cuda.mem_get_info(device)
    if size_bytes > free_bytes:
        raise NotEnoughMemory(
            f"not enough memory on {device} for {what}: {size_bytes / 2**30:.2f} GiB are needed, "
            f"{free_bytes / 2**30:.2f} GiB are free",
            hint="use fewer workers per device, a smaller model, or an optimizer with less state",
        )
