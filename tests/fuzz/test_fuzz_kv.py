"""A small dose at the key-value service."""

from __future__ import annotations

from tests.fuzz.__main__ import GROWTH_MB
from tests.fuzz.kvsiege import besiege


def test_a_service_under_siege() -> None:
    sent, grown = besiege(900)
    assert min(sent.values()) > 0
    assert max(grown.values()) < GROWTH_MB
