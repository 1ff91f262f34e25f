"""What all tests share: the time it takes until the first one runs."""

from __future__ import annotations

import gc
from collections.abc import Generator

import pytest


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
