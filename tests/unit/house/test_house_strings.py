"""Names of modules that stand in strings: lazy tables, warm imports, `python -m` targets, profiling instruments."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator

import pytest

from tests.support.house.tree import PACKAGE, ROOT, Tree

TREE = Tree(PACKAGE)
_DOTTED = re.compile(r"distbelief(\.\w+)+(:\w+)?")
_NOT_MODULES = {"distbelief.json"}  # a key in typer's context


def strings() -> Iterator[tuple[str, str]]:
    for name, module in TREE.modules.items():
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
                yield name, node.value


@pytest.mark.parametrize(("where", "named"), sorted(set(strings())))
def test_a_module_named_in_a_string_is_there(where: str, named: str) -> None:
    if named in _NOT_MODULES:
        return
    module, _, attribute = named.partition(":")
    nearest = TREE.nearest(module)
    rest = [*module[len(nearest) :].split(".")[1:], *([attribute] if attribute else [])]
    if nearest == "distbelief" and rest:
        pytest.fail(f"{where} names {named}, which is nowhere")
    found = importlib.import_module(nearest)
    for part in rest:
        found = getattr(found, part)


def commands() -> Iterator[tuple[str, str]]:
    """(file, target) of each `-m distbelief...` in sources, tests, benchmarks and the Makefile."""
    files = [path for folder in ("src", "tests", "bench") for path in (ROOT / folder).rglob("*.py")]
    for path in [*files, ROOT / "Makefile", ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        text = path.read_text(errors="ignore")
        for match in re.finditer(r"""-m["']?,?\s+f?["']?((?:distbelief|tests|bench)(?:\.\w+)*)""", text):
            yield str(path.relative_to(ROOT)), match[1]


@pytest.mark.parametrize(("where", "target"), sorted(set(commands())))
def test_what_is_started_with_python_m_can_be_started(where: str, target: str) -> None:
    base = ROOT / "src" if target.startswith("distbelief") else ROOT
    module = base.joinpath(*target.split("."))
    if module.is_dir():
        assert (module / "__main__.py").exists(), f"{where} starts {target}"
    else:
        text = module.with_suffix(".py").read_text()
        assert 'if __name__ == "__main__":' in text, f"{where} starts {target}, which does nothing"
