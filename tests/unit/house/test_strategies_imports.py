"""What all strategies share imports no strategy's folder. A strategy imports another one only to build on it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.house.tree import PACKAGE, Tree

TREE = Tree(PACKAGE)
STRATEGIES = "distbelief.strategies"
MAY_IMPORT: dict[str, set[str]] = {
    "dataparallel": set(),
    "mesh": set(),
    # Its members are replicas of dataparallel that exchange differences of parameters every few steps.
    "localsgd": {"dataparallel"},
    # Its workers prepare, agree on and compress a model as dataparallel's do; servers apply the step.
    "ps": {"dataparallel"},
    # Its vectors lie on the parameter servers of ps, and its workers prepare a model as dataparallel's do.
    "sandblaster": {"dataparallel", "ps"},
}
"""Strategy -> the strategies that it builds on. dataparallel is the default strategy, so three others vary it."""
SHARED = (
    f"{STRATEGIES}.base",
    f"{STRATEGIES}.rules",
    f"{STRATEGIES}.tables",
    f"{STRATEGIES}.flatmodel",
    f"{STRATEGIES}.purity",
    # Tools for the models of every strategy.
    "distbelief.exporting",
    "distbelief.verification.plain",
)


def is_inside(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def strategies_in(tree: Tree, package: str) -> Iterator[tuple[str, str]]:
    """(importing module, strategy) for each import of a strategy's module, and each string that names one."""
    for name, module in tree.modules.items():
        if not is_inside(name, package):
            continue
        strings = {
            node.value
            for node in ast.walk(module.tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        for other in sorted(tree.imports[name] | strings):
            for strategy in MAY_IMPORT:
                if is_inside(other, f"{STRATEGIES}.{strategy}"):
                    yield name, strategy


@pytest.mark.parametrize("package", SHARED)
def test_what_strategies_share_imports_no_concrete_strategy(package: str) -> None:
    assert any(is_inside(name, package) for name in TREE.modules)
    assert list(strategies_in(TREE, package)) == []


@pytest.mark.parametrize("strategy", sorted(MAY_IMPORT))
def test_a_strategy_imports_only_strategies_that_it_builds_on(strategy: str) -> None:
    found = {other for _, other in strategies_in(TREE, f"{STRATEGIES}.{strategy}")} - {strategy}
    assert found == MAY_IMPORT[strategy], "MAY_IMPORT lists more than is needed, or an import is not allowed"


def test_tables_are_below_flatmodel() -> None:
    tables = [name for name in TREE.modules if is_inside(name, f"{STRATEGIES}.tables")]
    assert not [
        (name, other) for name in tables for other in TREE.imports[name] if is_inside(other, f"{STRATEGIES}.flatmodel")
    ]


def test_every_folder_is_shared_or_a_strategy() -> None:
    folders = {path.name for path in (PACKAGE / "strategies").iterdir() if (path / "__init__.py").exists()}
    shared = {package.rpartition(".")[2] for package in SHARED if package.startswith(STRATEGIES)} - {"base"}
    assert folders == shared | MAY_IMPORT.keys()


def test_an_import_of_a_concrete_strategy_would_be_found(tmp_path: Path) -> None:
    bad = {
        "strategies/ps/tables/rows.py": "",
        "strategies/flatmodel/one.py": "from distbelief.strategies.ps.tables import rows",
        "strategies/flatmodel/two.py": "def later():\n    import distbelief.strategies.ps.tables.rows",
        "strategies/flatmodel/three.py": "HOME = 'distbelief.strategies.ps.tables.rows'",
        "strategies/flatmodel/four.py": "from distbelief.strategies.flatmodel import one",
    }
    for path, text in bad.items():
        file = tmp_path / "distbelief" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    found = strategies_in(Tree(tmp_path / "distbelief"), f"{STRATEGIES}.flatmodel")
    assert sorted(found) == [(f"{STRATEGIES}.flatmodel.{name}", "ps") for name in ("one", "three", "two")]
