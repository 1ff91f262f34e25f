"""The examples in the docstrings are true."""

from __future__ import annotations

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["order", "sources", "idx", "parcel", "reading", "readers"])
def test_docstrings(name: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(f"distbelief.data.{name}"))
    assert tried > 0
    assert failed == 0
