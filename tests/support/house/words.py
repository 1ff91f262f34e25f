"""Terms that this code base no longer uses, and the plain term for each. docs/glossary.md explains the plain ones."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from tests.support.house.tree import ROOT, Tree

NAMES = {
    "aside": "undo log",
    "badge": "credential",
    "badges": "credentials",
    "birth": "deferred initialisation",
    "doorkeeper": "connection limit",
    "farewell": "notice of failure",
    "guest": "manually started worker",
    "guests": "manually started workers",
    "house": "processes of one host",
    "letter": "frame",
    "letters": "frames",
    "meetingplace": "rendezvous server",
    "meeting": "rendezvous",
    "meetings": "rendezvous",
    "seals": "signatures",
    "stranger": "unauthenticated connection",
    "strangers": "unauthenticated connections",
    "warden": "supervisor",
}
"""Parts of names of modules, classes, functions, parameters, variables and attributes (`CardsAndBadges` has the part
badges), and what to write."""

WHOLE_NAMES = {"words": "futex flags (shared memory) or messages", "part": "which part: of a checkpoint, of a model"}
"""Refused as the whole name of a module or class."""

PHRASES = {
    r"whoever": "name who: the worker, the caller, the process",
    r"so many\b(?! that\b)": "n, or at most n",
    r"the one (that|who|which)": "the noun",
    r"those (that|who|which)": "the noun",
    r"as it is there": "name the state",
    r"what there is": "name it",
    r"meeting ?places?": "rendezvous",
    r"doorkeepers?": "connection limit",
    r"wardens?": "supervisor",
    r"badges?": "credentials",
    r"the seals?\b": "the signature",
    r"letters? (to|from|of) (a|the) (server|client)s?": "frames",
    r"words in shared memory": "futex flags",
    r"farewells?": "notice of failure",
}
"""Phrases of prose: docstrings, comments and documents."""


def parts_of(name: str) -> list[str]:
    """The lower-case parts of a name.

    >>> parts_of("ConnectionLimit"), parts_of("_undo_log")
    (['connection', 'limit'], ['undo', 'log'])
    """
    spaced = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name)
    return [part.lower() for part in spaced.split("_") if part]


def refused_names(tree: Tree) -> Iterator[str]:
    """Modules, classes, functions, parameters, variables and attributes with a refused name, as `path:line: name (what
    to write)`."""
    for module in tree.modules.values():
        where = module.path.relative_to(tree.package.parent.parent)
        stems = [(1, module.path.parent.name if module.path.name == "__init__.py" else module.path.stem)]
        definitions = [*stems, *module.definitions()]
        for line, name in [*definitions, *module.variables()]:
            for part in parts_of(name):
                if part in NAMES:
                    yield f"{where}:{line}: {name} ({NAMES[part]})"
        for line, name in definitions:
            if name.lower() in WHOLE_NAMES and (name[0].isupper() or line == 1):
                yield f"{where}:{line}: {name} ({WHOLE_NAMES[name.lower()]})"


_PHRASES = re.compile("|".join(rf"\b(?:{phrase})" for phrase in PHRASES), re.IGNORECASE)


def documents(root: Path = ROOT) -> list[Path]:
    """The pages for people. The change log and the log of failed attempts tell of the past in its own terms."""
    pages = [root / "README.md", root / "CONTRIBUTING.md", *sorted((root / "docs").rglob("*.md"))]
    return [page for page in pages if page.name not in ("log.md", "glossary.md")]


def refused_phrases(tree: Tree, root: Path = ROOT) -> Iterator[str]:
    """Refused phrases in docstrings, comments and documents, as `path:line: phrase`."""
    for module in tree.modules.values():
        where = module.path.relative_to(root)
        for line, text in [*module.docstrings(), *module.comments()]:
            for match in _PHRASES.finditer(re.sub(r"\s+", " ", text)):
                yield f"{where}:{line}: {match[0]}"
    for page in documents(root):
        for number, line_text in enumerate(page.read_text().splitlines(), 1):
            for match in _PHRASES.finditer(line_text):
                yield f"{page.relative_to(root)}:{number}: {match[0]}"
