"""The tree stays as it was put: no cycle, no crowded folder, few files that only one other file uses."""

from __future__ import annotations

import pytest

from tests.support.house.figures import figures
from tests.support.house.tree import ROOT
from tests.support.house.words import PHRASES, parts_of

FOUND = figures(ROOT)
MOST = {
    "modules imported by one module only": 80,
    "folders with more than 25 files": 0,
    "isinstance on concrete strategies, replicas and exchanges outside strategies/": 0,
    "import cycles": 0,
    "refused terms in names": 0,
    "refused phrases in prose": 0,
}
"""A figure may fall, never rise."""


@pytest.mark.parametrize("what", sorted(MOST))
def test_the_tree_is_within_its_limits(what: str) -> None:
    assert len(FOUND[what]) <= MOST[what], "\n".join(FOUND[what])


def test_refused_terms_are_found_inside_of_names() -> None:
    assert parts_of("TheMeetingPlace") == ["the", "meeting", "place"]
    assert parts_of("_old_badge2") == ["old", "badge2"]
    assert parts_of("HTTPServer") == ["http", "server"]
    assert PHRASES
