"""Every path and every name of code that documents, docstrings and comments mention is there."""

from __future__ import annotations

from tests.support.house.mentions import missing, missing_in
from tests.support.house.tree import ROOT


def test_what_is_mentioned_is_there() -> None:
    assert missing() == []


def test_what_is_not_there_is_found() -> None:
    page = ROOT / "docs" / "architecture.md"
    nothing = "_".join(("no", "such", "function"))  # a name that stands nowhere, not even here
    text = f"See `coordinator/rules/nowhere.py`, `job.py`, `{nothing}()`, `Job`, [a page](gone.md) and shards.py."
    assert [one.split(": ")[1] for one in missing_in(text, page)] == [
        "coordinator/rules/nowhere.py",
        f"{nothing}()",
        "gone.md",
    ]
