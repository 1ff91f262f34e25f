"""What loading a job in the test's own process would leave behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    path, threads = list(sys.path), torch.get_num_threads()
    yield
    sys.path[:] = path
    torch.set_num_threads(threads)
