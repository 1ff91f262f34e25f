"""The peers' ways to save: torch.save, and torch.distributed.checkpoint.async_save with its settings.

async_save copies the state ("staging") and writes the copy in the background, synced. By default the copy goes to new
memory each time, which is slow. Pinned memory and copies that do not block need a GPU; all other settings are here.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

State = dict[str, Any]
Done = Callable[[], None]
"""To be called when the checkpoint is whole on disk."""
FILE = "checkpoint.pt"


class Saver(Protocol):
    def save(self, state: State, path: Path, done: Done) -> float | None:
        """Begin a save, after the end of the one before. Returns how long it took without waiting for the disk, where
        it waits for the disk."""

    def before_update(self) -> None:
        """Wait until the parameters may change."""

    def close(self) -> None:
        """Wait for the last save."""

    @staticmethod
    def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None: ...


class Synchronous:
    """The first process writes, the others wait. Durable when it returns, under its name only when it is whole."""

    def save(self, state: State, path: Path, done: Done) -> float | None:
        began = time.perf_counter()
        written_s = 0.0
        if dist.get_rank() == 0:
            draft = path.with_name(f".{path.name}")
            draft.mkdir()
            torch.save(state, draft / FILE)
            written_s = time.perf_counter() - began
            _sync(draft / FILE)
            _sync(draft)
            draft.rename(path)
            _sync(path.parent)
        dist.barrier()
        done()
        return written_s

    def before_update(self) -> None:
        pass

    def close(self) -> None:
        pass

    @staticmethod
    def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        state = torch.load(path / FILE, weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])


class Asynchronous:
    """async_save as its documentation shows it."""

    kind: ClassVar[AsyncCheckpointerType] = AsyncCheckpointerType.THREAD
    options: ClassVar[StagingOptions | None] = None
    """Of a stager that is kept; None: a new one for every save, as async_save does by itself."""

    def __init__(self) -> None:
        # Its collectives run beside those of training, so they need a group of their own.
        self._group = dist.new_group(backend="gloo")
        self._stager = DefaultStager(self.options) if self.options else None
        self._staged: Future[Any] | None = None
        self._written = threading.Event()
        self._written.set()

    def save(self, state: State, path: Path, done: Done) -> float | None:
        self._written.wait()
        self._written.clear()
        answer = dcp.async_save(
            state,
            checkpoint_id=path,
            process_group=self._group,
            async_checkpointer_type=self.kind,
            async_stager=self._stager,
        )
        if isinstance(answer, AsyncSaveResponse):
            self._staged, answer = answer.staging_completion, answer.upload_completion
        answer.add_done_callback(lambda written: self._note(written, done))
        return None

    def _note(self, written: Future[Any], done: Done) -> None:
        if error := written.exception():
            traceback.print_exception(error)
            os._exit(1)
        done()
        self._written.set()

    def before_update(self) -> None:
        if self._staged:
            self._staged.result()
            self._staged = None

    def close(self) -> None:
        self._written.wait()
        if self._stager:
            self._stager.close()

    @staticmethod
    def load(path: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """It loads in place, so the optimizer must have its state first: a step that changes nothing makes it."""
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
        rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        optimizer.step()
        optimizer.zero_grad()
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=path)


class Kept(Asynchronous):
    """The copy's memory is kept from save to save."""

    options = StagingOptions(False, False, False, False)


class Overlapped(Asynchronous):
    """Memory kept, and copied in a thread while the next forward and backward pass run. (Its documentation asks for a
    GPU; without one it does the same, with plain copies.)"""

    options = StagingOptions(False, False, True, False)


class AnotherProcess(Asynchronous):
    """Memory kept and shared with a process that writes, so that Python's lock is free for training."""

    kind = AsyncCheckpointerType.PROCESS
    options = StagingOptions(False, True, False, False)


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


SYNCHRONOUS = "torch.save"
SAVERS: dict[str, type[Saver]] = {
    SYNCHRONOUS: Synchronous,
    "async_save": Asynchronous,
    "async_save:kept": Kept,
    "async_save:overlapped": Overlapped,
    "async_save:process": AnotherProcess,
}
