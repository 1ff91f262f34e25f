"""The tree stays as it was put: no cycle, no crowded folder, few files that only one other file uses."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.house.figures import figures
from tests.support.house.tree import ROOT, Tree
from tests.support.house.words import PHRASES, parts_of, refused_names

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


def test_refused_terms_are_found_in_all_kinds_of_names(tmp_path: Path) -> None:
    (package := tmp_path / "src" / "letters").mkdir(parents=True)
    (package / "a.py").write_text(
        "class Warden:\n    guest_count: int\n\n    def f(self, old_badge):\n        self.house = 1\n"
        "        for letter in ():\n            lettering = letter\n"
    )
    found = {line.split()[1] for line in refused_names(Tree(package))}
    assert found == {"Warden", "guest_count", "old_badge", "house", "letter"}, "and lettering is none of them"


def test_refused_terms_are_found_inside_of_names() -> None:
    assert parts_of("TheMeetingPlace") == ["the", "meeting", "place"]
    assert parts_of("_old_badge2") == ["old", "badge2"]
    assert parts_of("HTTPServer") == ["http", "server"]
    assert PHRASES
