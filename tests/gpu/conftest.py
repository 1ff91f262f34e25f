"""Tests for a machine with a CUDA device, torch and our core dependencies: `make test-gpu`. Not collected elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.runs.gpu import JOB, Command

collect_ignore_glob = [] if torch.cuda.is_available() else ["test_*.py"]


@pytest.fixture
def start() -> Any:
    started: list[Command] = []

    def begin(*words: str) -> Command:
        started.append(Command(*words))
        return started[-1]

    yield begin
    for one in started:
        one.end()


@pytest.fixture
def train(start: Callable[..., Command], tmp_path: Path) -> Callable[..., Command]:
    """Train the small job on a CUDA device, or as told."""

    def begin(name: str, workers: int = 1, *options: str, device: str = "cuda") -> Command:
        run_dir = str(tmp_path / name)
        given = ["--workers", str(workers), "--device", device, "--run-dir", run_dir, "--json", *options]
        return start("train", str(JOB), *given)

    return begin
