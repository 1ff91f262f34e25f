"""Shared machinery asks the strategy what it needs. It names no strategy, and no exchange or replica of a feature, in
code or in prose. Outside of the package transport, its code names no transport."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[3] / "src" / "distbelief"
FOLDERS = ("worker", "control", "coordinator", "transport")
FEATURES = ("dataparallel", "localsgd", "mesh", "ps", "sandblaster")
WORDS = re.compile(r"allreduce|local_?sgd|sandblaster|\bps:|n_push|n_fetch|outer\s+steps?\b|mesh", re.IGNORECASE)
"""Words of single strategies, refused in code, docstrings, comments and texts."""
TRANSPORTS = ("shm", "slots", "gloo", "nccl")
"""Refused as whole strings: `transport/rules/choice.py` answers questions about a transport."""
MODULES = tuple(f"distbelief.strategies.{feature}." for feature in FEATURES)


@lru_cache
def names_of_features() -> frozenset[str]:
    """The classes of the features: values, prepared models, replicas, exchanges."""
    found = set()
    for feature in FEATURES:
        for path in (SOURCE / "strategies" / feature).rglob("*.py"):
            found |= {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ClassDef)}
    suffixes = ("Replica", "Exchange", "SGD", "Reduce", "Server", "Slices")
    values = {"Sandblaster", "Meshed", "Pipeline", "Tensor", "Sharded", "Hybrid"}
    return frozenset({name for name in found if name.endswith(suffixes)} | values)


def modules() -> list[Path]:
    return [path for folder in FOLDERS for path in (SOURCE / folder).rglob("*.py")]


def faults(content: str, refused: frozenset[str]) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.ImportFrom):
            parts = (node.module or "").split(".")
            if parts[:2] == ["distbelief", "strategies"] and len(parts) > 2 and parts[2] in FEATURES:
                found.append(f"line {node.lineno}: imports {node.module}")
            found += [f"line {node.lineno}: imports {one.name}" for one in node.names if one.name in refused]
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith(MODULES):
            found.append(f"line {node.lineno}: names {node.value}")
        if isinstance(node, ast.Name) and node.id in refused:
            found.append(f"line {node.lineno}: names {node.id}")
    return found


def words_of_features(content: str) -> list[str]:
    """Words of single strategies. A docstring may break a line within `outer step`."""
    lines = [(content.count("\n", 0, found.start()) + 1, found[0]) for found in WORDS.finditer(content)]
    return [f"line {number}: {word}" for number, word in lines]


def named_transports(content: str) -> list[str]:
    constants = [node for node in ast.walk(ast.parse(content)) if isinstance(node, ast.Constant)]
    return [f"line {node.lineno}: {node.value!r}" for node in constants if node.value in TRANSPORTS]


@pytest.mark.parametrize("module", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_machinery_names_no_feature(module: Path) -> None:
    assert faults(module.read_text(), names_of_features()) == []


@pytest.mark.parametrize("module", modules(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_machinery_has_no_words_of_a_feature(module: Path) -> None:
    content = module.read_text()
    assert words_of_features(content) == []
    if not module.is_relative_to(SOURCE / "transport"):
        assert named_transports(content) == []


def test_a_word_of_a_feature_would_be_found() -> None:
    bad = '# not in a mesh\nraise JobError(\'use ps:async\')\nsteps: int\n"""the last outer\nstep"""\nn_push = 1\n'
    assert words_of_features(bad) == ["line 1: mesh", "line 2: ps:", "line 4: outer\nstep", "line 6: n_push"]
    assert named_transports("if one.transport in ('shm', other): print('over gloo')") == ["line 1: 'shm'"]


def test_a_name_of_a_feature_would_be_found() -> None:
    bad = "from distbelief.strategies.ps.worker.exchange import ServerExchange\nisinstance(one, ServerExchange)"
    assert len(faults(bad, names_of_features())) == 3
    assert len(faults("table = 'distbelief.strategies.mesh.run.runner'", frozenset())) == 1
    assert faults("from distbelief.strategies.flatmodel.compute import move", names_of_features()) == []


TEXTS = (
    "allreduce:inexact:gloo", "ps:async:n_push=4", "ps:sync", "sandblaster", "local_sgd:8", "pipeline:4", "tensor:2",
    "sharded", "dp2.tp2.pp2",
)  # fmt: skip


@pytest.mark.parametrize(
    "code",
    [
        "import distbelief.cli.main",
        "import distbelief.coordinator.__main__",
        f"from distbelief.strategies import parse; [(parse(t).wish, parse(t).learning) for t in {TEXTS}]",
    ],
)
def test_no_torch_is_imported(code: str) -> None:
    code = f"import sys; {code}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("arguments", [["distbelief.cli.main", "--help"], ["distbelief.coordinator", "--help"]])
def test_help_imports_no_torch(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, "-X", "importtime", "-m", *arguments], capture_output=True, text=True)
    assert not [line for line in done.stderr.splitlines() if line.rpartition("|")[2].strip() == "torch"]


@pytest.mark.parametrize("text", TEXTS)
def test_the_modules_of_both_sides_are_there(text: str) -> None:
    """A strategy names them in strings."""
    import importlib

    from distbelief.strategies import parse

    strategy = parse(text)
    assert callable(importlib.import_module(strategy.on_workers).prepare)
    assert bool(strategy.servers) == bool(strategy.on_servers)
    if strategy.on_servers:
        assert callable(importlib.import_module(strategy.on_servers).serve)
