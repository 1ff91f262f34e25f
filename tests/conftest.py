"""Fixtures for tests of any folder."""

from __future__ import annotations

from tests.support.stage import stage

__all__ = ["stage"]
