"""The stage that forks members (it lies with the contract tests), and a worker's number of threads, for tests of this
folder."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "contract"))

from forked_stage import stage

__all__ = ["stage"]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As a worker has it; several threads that wait for each other on a busy machine take many times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
