"""Figures of the source tree, for before and after: `python -m tests.support.house.figures [--root CHECKOUT] [--list]`.

`--root` measures another checkout with the same script. `--list` names what is counted. Which files a step and a death
pass through is measured by running them: `python -m tests.support.house.way`.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.support.house.tree import ROOT, Tree
from tests.support.house.words import refused_names, refused_phrases

SHORT = 60
"""Lines; files of at most 3 lines (an empty `__init__.py`) do not count."""


def figures(root: Path) -> dict[str, list[str]]:
    """What is counted -> the items."""
    tree = Tree(root / "src" / "distbelief")
    return {
        "files": [name for name, module in tree.modules.items()],
        f"files under {SHORT} lines": [name for name, one in tree.modules.items() if 3 < one.lines < SHORT],
        "modules imported by one module only": [name for name, by in tree.importers.items() if len(by) == 1],
        "folders with more than 25 files": [f"{folder}: {count}" for folder, count in tree.crowded().items()],
        "isinstance on concrete strategies, replicas and exchanges outside strategies/": tree.isinstance_checks(),
        "import cycles": [" ".join(group) for group in tree.cycles()],
        "refused terms in names": list(refused_names(tree)),
        "refused phrases in prose": list(refused_phrases(tree, root)),
    }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=ROOT)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(arguments)
    found = figures(options.root.resolve())
    if options.json:
        print(json.dumps({what: items if options.list else len(items) for what, items in found.items()}, indent=1))
        return
    for what, items in found.items():
        print(f"{len(items):6}  {what}")
        if options.list and what != "files":
            print(*(f"          {item}" for item in items), sep="\n")


if __name__ == "__main__":
    main(sys.argv[1:])
