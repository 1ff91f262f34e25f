"""Real runs in real processes. Every run is checked to leave nothing behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.runs.command import (
    Outcome,
    Run,
    left_in_shared_memory,
)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start `distbelief ARGUMENTS` in an empty folder; after the test nothing of it may be left."""
    shared_memory = set(os.listdir("/dev/shm"))
    runs: list[Run] = []

    def begin(*arguments: object, prefix: Sequence[str] = ()) -> Run:
        runs.append(Run(tmp_path, *arguments, prefix=prefix))
        return runs[-1]

    yield begin
    try:
        for run in runs:
            assert run.leftovers() == []
        assert left_in_shared_memory(shared_memory) == set()
    finally:
        for run in runs:
            run.kill()


@pytest.fixture
def distbelief(start: Callable[..., Run]) -> Callable[..., Outcome]:
    """Run `distbelief ARGUMENTS` to its end."""
    return lambda *arguments: start(*arguments).wait()


@pytest.fixture
def wait_until() -> Callable[[Callable[[], object]], None]:
    def wait(condition: Callable[[], object], limit_s: float = 300) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, "it never happened"
            time.sleep(0.02)

    return wait
