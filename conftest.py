"""What all tests share: where child processes find `tests.support`, and the time until the first test runs."""

from __future__ import annotations

import gc
import os
from collections.abc import Generator
from pathlib import Path

import pytest

ROOT = str(Path(__file__).parent)
# Child processes of tests import `tests.support` too, whatever folder they work in.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
pytest.register_assert_rewrite("tests.support")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collecting imports torch and all that is tested, none of which is ever garbage: the collector, which would walk
    through it time and again, waits until it is there, and leaves it alone from then on."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
