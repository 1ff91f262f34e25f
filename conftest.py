"""What all tests share: the time it takes until the first one runs.

Collecting imports torch and all that is tested, none of which is ever garbage: the collector, which would walk through
it time and again, waits until it is there, and leaves it alone from then on.
"""

from __future__ import annotations

import gc


def pytest_configure() -> None:
    gc.disable()


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()
