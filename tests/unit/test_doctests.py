"""The examples in the docstrings are true."""

from __future__ import annotations

import doctest
import importlib
from pathlib import Path

import pytest

import distbelief

SOURCE = Path(distbelief.__file__).parent
EXAMPLES = [
    ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts)
    for file in sorted(SOURCE.rglob("*.py"))
    if ">>> " in file.read_text()
]


@pytest.mark.parametrize("name", EXAMPLES)
def test_docstrings(name: str) -> None:
    failed, tried = doctest.testmod(importlib.import_module(name.removesuffix(".__init__")))
    assert tried > 0
    assert failed == 0
