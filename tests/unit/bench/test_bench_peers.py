"""The systems of other people, as they are declared: nothing of theirs is installed or started here."""

from __future__ import annotations

import ast
import json
import re
import sys
import time
from pathlib import Path

import pytest

from bench.compare import launchers, together
from bench.compare.peers import PEERS
from bench.compare.system import Start, System
from bench.running import BENCH, free_ports
from bench.workloads import WORKLOADS

PINNED = re.compile(r"[\w.-]+(\[\w+\])?==[\w.]+")


def start_of(system: System, folder: Path, workers: int = 2) -> Start:
    (folder / launchers.NAME).write_text("QmSomebody")
    return Start("/environment/bin/python", BENCH / "drivers" / system.driver, folder, workers, free_ports)


@pytest.mark.parametrize("peer", PEERS, ids=lambda peer: peer.name)
class TestDeclared:
    def test_what_a_reader_and_the_program_need(self, peer: System) -> None:
        assert peer.kind == "peer"
        assert all(PINNED.fullmatch(one) for one in peer.requirements)
        assert peer.requirements
        assert peer.check.startswith("import ")
        assert len(peer.note) > 20
        assert set(peer.workloads) <= set(WORKLOADS)

    def test_its_driver_is_a_users_program(self, peer: System) -> None:
        """It imports its system and what all share, and nothing of ours that would do the work for it."""
        tree = ast.parse((BENCH / "drivers" / peer.driver).read_text())
        assert ast.get_docstring(tree)
        modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        modules += [name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names]
        assert not [module for module in modules if module.split(".")[0] == "distbelief"]
        assert {module for module in modules if module.split(".")[0] == "bench"} <= {"bench", "bench.task"}
        assert peer.check.removeprefix("import ").split(".")[0] in {module.split(".")[0] for module in modules}

    def test_its_commands_name_driver_and_loopback_only(self, peer: System, tmp_path: Path) -> None:
        start = start_of(peer, tmp_path)
        commands = peer.commands(start)
        words = [word for command in commands for word in command]
        assert str(start.driver) in words
        assert not [word for word in words if re.search(r"0\.0\.0\.0|\[::\]", word)]
        assert [word for word in words if word.startswith("/environment/bin/")]


def test_names_are_unique() -> None:
    assert len({peer.name for peer in PEERS}) == len(PEERS)


def test_every_task_of_a_tensorflow_cluster_is_started(tmp_path: Path) -> None:
    (servers,) = [peer for peer in PEERS if peer.name == "tf_servers"]
    configs = [
        json.loads(word.removeprefix("TF_CONFIG="))
        for command in servers.commands(start_of(servers, tmp_path, workers=3))
        for word in command
        if word.startswith("TF_CONFIG=")
    ]
    assert [(one["task"]["type"], one["task"]["index"]) for one in configs] == [
        ("chief", 0), ("ps", 0), ("worker", 0), ("worker", 1), ("worker", 2),
    ]  # fmt: skip
    assert len({json.dumps(one["cluster"]) for one in configs}) == 1


def test_deepspeed_compiles_once(tmp_path: Path) -> None:
    (deepspeed,) = [peer for peer in PEERS if peer.name == "deepspeed"]
    python = tmp_path / "bin" / "python"
    start = Start(str(python), BENCH / "drivers" / deepspeed.driver, tmp_path, 2, free_ports)
    assert deepspeed.setup
    assert len(deepspeed.setup(start)) == 1
    compiled = tmp_path / "torch_extensions" / launchers.DEEPSPEED_OPERATION / f"{launchers.DEEPSPEED_OPERATION}.so"
    compiled.parent.mkdir(parents=True)
    compiled.touch()
    assert deepspeed.setup(start) == []


class TestTogether:
    def test_all_must_end_well(self) -> None:
        assert together.run([["true"], ["sleep", "0.1"]]) == 0

    def test_one_that_fails_ends_the_others(self) -> None:
        began = time.monotonic()
        assert together.run([["sleep", "60"], [sys.executable, "-c", "raise SystemExit(3)"]]) == 3
        assert time.monotonic() - began < 50

    def test_one_that_is_killed_is_a_failure(self) -> None:
        assert together.run([["sh", "-c", "kill -9 $$"], ["true"]]) != 0
