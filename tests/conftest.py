"""Fixtures for tests of any folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stage import stage

__all__ = ["one_thread", "stage"]


@pytest.fixture
def one_thread() -> Iterator[None]:
    """As a worker has it; several threads that wait for each other on a busy machine take many times as long."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
