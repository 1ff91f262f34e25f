"""States to save, how to spread one over parts, and trials in a process of their own."""

from __future__ import annotations

import ctypes
import multiprocessing
import multiprocessing.process
import os
import subprocess
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from distbelief.checkpoint.manifest import Facts, Manifest
from distbelief.checkpoint.parts import Slice
from distbelief.checkpoint.saving import seal, write_part
from distbelief.checkpoint.storage import Where
from distbelief.errors import DistBeliefError

FACTS = Facts(
    job={"name": "digits", "shards": 8, "global_batch": 64, "samples": 1797, "seed": 7},
    data={"step": 120},
    random={"torch": [1, 2, 3]},
    versions={"torch": torch.__version__},
    metrics={"accuracy": 0.5},
)
_CLONE_NEWNS = 0x00020000


def state(seed: int = 0, elements: int = 1000) -> dict[str, torch.Tensor]:
    """Every type that a model or an optimizer may hold; empty and scalar tensors; one that is not contiguous."""
    made = torch.Generator().manual_seed(seed)
    real = torch.randn(elements, generator=made, dtype=torch.float64)
    return {
        "bool": real > 0,
        "bfloat16": real.bfloat16(),
        "empty": torch.empty(0, 3),
        "float16": real.half().view(2, -1),
        "float32": real.float().view(2, -1, 2),
        "float64": real,
        "int64": torch.randint(-(2**62), 2**62, (elements,), generator=made),
        "scalar": torch.tensor(1.5 + seed),
        "scalar.step": torch.tensor(seed, dtype=torch.int64),
        "transposed": real.float().view(4, -1).t(),
        "uint8": torch.randint(0, 256, (elements, 1), generator=made, dtype=torch.uint8),
    }


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and torch.equal(a[k], b[k]) for k in a
    )


def cut(tensors: dict[str, torch.Tensor], parts: int) -> list[list[Slice]]:
    """The state as `parts` lists of slices: each tensor in that many pieces, as far as it goes."""
    spread: list[list[Slice]] = [[] for _ in range(parts)]
    for name, tensor in tensors.items():
        flat = tensor.reshape(-1)
        cuts = [flat.numel() * k // parts for k in range(parts + 1)]
        if not flat.numel():
            spread[0].append(Slice.whole(name, tensor))
        for k in range(parts):
            if cuts[k] < cuts[k + 1]:
                spread[k].append(Slice(name, flat[cuts[k] : cuts[k + 1]], tuple(tensor.shape), cuts[k]))
    return spread


def save(
    folder: Where, step: int, tensors: dict[str, torch.Tensor] | None = None, parts: int = 2, facts: Facts = FACTS
) -> Manifest:
    pieces = cut(state(step) if tensors is None else tensors, parts)
    records = [write_part(folder, step, k, parts, slices) for k, slices in enumerate(pieces, start=1)]
    return seal(folder, step, facts, records)


def files(folder: Path, step: int) -> list[str]:
    return sorted(path.name for path in (folder / f"step-{step:09d}").iterdir())


def in_child(trial: Callable[[], Any]) -> Any:
    """Do it in a forked process, so that limits, rights and mounts end with it. A DistBeliefError comes back."""
    receiving, sending = multiprocessing.Pipe(duplex=False)
    child = forked(lambda: _answer(sending, trial))
    sending.close()
    try:
        kind, value = receiving.recv()
    finally:
        child.join()
    if kind == "skip":
        pytest.skip(value)
    assert kind == "done", value
    return value


def forked(task: Callable[[], None]) -> multiprocessing.process.BaseProcess:
    def alone() -> None:
        torch.set_num_threads(1)  # the threads of the parent's pool are not there, and waiting for them has no end
        task()

    child = multiprocessing.get_context("fork").Process(target=alone, daemon=True)
    child.start()
    return child


def _answer(sending: Connection, trial: Callable[[], Any]) -> None:
    try:
        sending.send(("done", trial()))
    except DistBeliefError as error:
        sending.send(("done", (type(error).__name__, error.message, error.hint)))
    except pytest.skip.Exception as error:
        sending.send(("skip", str(error)))
    except BaseException:
        sending.send(("failed", traceback.format_exc()))


def mount_small_disk(path: Path, size: str) -> None:
    """A disk of its own that only this process sees and that is gone with it. Skips where that is not permitted."""
    path.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNS) != 0:
        pytest.skip(f"mounting is not permitted here: unshare: {os.strerror(ctypes.get_errno())}")
    for command in (
        ["mount", "--make-rprivate", "/"],
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"mounting is not permitted here: {done.stderr.strip()}")
