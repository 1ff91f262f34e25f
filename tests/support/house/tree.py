"""The source tree as data: modules, their syntax trees, imports and prose. It executes nothing of it."""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "src" / "distbelief"


@dataclass(frozen=True)
class Module:
    name: str
    path: Path
    text: str
    tree: ast.Module = field(repr=False)

    @property
    def lines(self) -> int:
        return len(self.text.splitlines())

    def docstrings(self) -> Iterator[tuple[int, str]]:
        """(line, text) of each string that documents something: those of modules, classes and functions, and the bare
        strings below attributes."""
        for node in ast.walk(self.tree):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                yield node.lineno, node.value.value

    def comments(self) -> Iterator[tuple[int, str]]:
        for token in tokenize.generate_tokens(io.StringIO(self.text).readline):
            if token.type == tokenize.COMMENT:
                yield token.start[0], token.string.lstrip("# ")

    def definitions(self) -> Iterator[tuple[int, str]]:
        """(line, name) of each class and function."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.lineno, node.name

    def variables(self) -> Iterator[tuple[int, str]]:
        """(line, name) of each assigned variable and attribute, and of each parameter."""
        for node in ast.walk(self.tree):
            if isinstance(node, ast.arg):
                yield node.lineno, node.arg
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.lineno, node.id
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                yield node.lineno, node.attr


@dataclass(frozen=True)
class Tree:
    """A package and all its modules."""

    package: Path

    @cached_property
    def modules(self) -> dict[str, Module]:
        found = {}
        for path in sorted(self.package.rglob("*.py")):
            text = path.read_text()
            parts = (self.package.name, *path.relative_to(self.package).with_suffix("").parts)
            name = ".".join(parts).removesuffix(".__init__")
            found[name] = Module(name, path, text, ast.parse(text))
        return found

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        """Module -> the modules of this package that it imports anywhere in its text, also inside functions and for
        type checking alone."""
        return {name: set(self._imported(module)) for name, module in self.modules.items()}

    def _imported(self, module: Module) -> Iterator[str]:
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
            else:
                continue
            for name in names:
                known = self.nearest(name)
                if known not in ("", self.package.name, module.name):
                    yield known

    def nearest(self, name: str) -> str:
        """The longest prefix of a dotted name that is a module."""
        while name and name not in self.modules:
            name = name.rpartition(".")[0]
        return name

    @cached_property
    def importers(self) -> dict[str, set[str]]:
        found: dict[str, set[str]] = {name: set() for name in self.modules}
        for name, imported in self.imports.items():
            for one in imported:
                found[one].add(name)
        return found

    def cycles(self) -> list[list[str]]:
        """Groups of modules that import each other (Tarjan's strongly connected components of more than one)."""
        index: dict[str, int] = {}
        low: dict[str, int] = {}
        stack: list[str] = []
        found = []

        def visit(name: str) -> None:
            index[name] = low[name] = len(index)
            stack.append(name)
            for other in sorted(self.imports[name]):
                if other not in index:
                    visit(other)
                    low[name] = min(low[name], low[other])
                elif other in stack:
                    low[name] = min(low[name], index[other])
            if low[name] == index[name]:
                group = stack[stack.index(name) :]
                del stack[stack.index(name) :]
                if len(group) > 1:
                    found.append(sorted(group))

        for name in self.modules:
            if name not in index:
                visit(name)
        return sorted(found)

    def crowded(self, most: int = 25) -> dict[str, int]:
        """Folders with more files than that, `__init__.py` not counted."""
        counts: dict[str, int] = {}
        for module in self.modules.values():
            if module.path.name != "__init__.py":
                folder = str(module.path.parent.relative_to(self.package))
                counts[folder] = counts.get(folder, 0) + 1
        return {folder: count for folder, count in counts.items() if count > most}

    @staticmethod
    def _is_concrete(module: str, name: str) -> bool:
        """Whether a class belongs to one strategy, or is one way to exchange. Interfaces and messages are neither."""
        room, *inside = module.split(".")[1:] or [""]
        if room == "strategies":
            return bool(inside) and inside[-1] not in ("base", "messages", "degrees", "embedding")
        return room in ("transport", "comm", "compression") and name.endswith(
            ("Exchange", "Group", "OnDevice", "Slots", "Tiles", "Parts", "Alone")
        )

    def isinstance_checks(self) -> list[str]:
        """`isinstance` on a class of a concrete strategy, replica or exchange outside strategies/, as path:line."""
        found = []
        for module in self.modules.values():
            inside = module.path.relative_to(self.package)
            if inside.parts[0] == "strategies":
                continue
            concrete = {
                alias.asname or alias.name
                for node in ast.walk(module.tree)
                if isinstance(node, ast.ImportFrom) and not node.level
                for alias in node.names
                if self._is_concrete(node.module or "", alias.name)
            }
            found += [
                f"{inside}:{node.lineno}"
                for node in ast.walk(module.tree)
                if isinstance(node, ast.Call)
                and getattr(node.func, "id", "") == "isinstance"
                and len(node.args) == 2
                and any(getattr(part, "id", "") in concrete for part in ast.walk(node.args[1]))
            ]
        return found
