"""A real run with all its listening sockets under attack: what it was before, and what it is after."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import psutil

from distbelief.control import messages as m
from distbelief.coordinator.client import whereabouts
from tests.fuzz.attacks import Attacker
from tests.support.runs.watched import of_kinds

JOB = Path(__file__).parents[1] / "e2e" / "jobs" / "small.py"
MARK = "DISTBELIEF_TEST_RUN"
PATIENCE_S = 120.0
TOO_LARGE = 3 << 20


@dataclass(frozen=True)
class Measure:
    rss_mb: dict[str, float]
    """By process, as it is called in the run."""
    connections: int


class Siege:
    """A run that goes slowly for as long as it is under siege, and does not do its last step before that is over."""

    def __init__(self, folder: Path, strategy: str, listen: str = "127.0.0.1", steps: int = 60, seed: int = 1) -> None:
        self.run_dir = folder / "run"
        self._brake = folder / "brake"
        self._brake.touch()
        self._mark = uuid.uuid4().hex
        self._random = Random(seed)
        self.sent: dict[str, int] = {}
        self._locked: dict[str, bool] = {}
        options = ["--workers", "2", "--strategy", strategy, "--listen", listen, "--run-dir", "run"]
        settings = ["--set", f"steps={steps}", "--set", "brake_s=0.25", "--set", f"hold_step={steps - 1}"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "distbelief.cli.main", "train", str(JOB), *settings, *options, "--json"],
            cwd=folder,
            env={**os.environ, MARK: self._mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._wait(lambda: self.steps() >= 2)
        known = json.loads((self.run_dir / "coordinator.json").read_text())
        self.pid: int = known["pid"]
        self.coordinator, authority = whereabouts(self.run_dir)
        self.attacker = Attacker(authority, self._random)

    # --- what it is --------------------------------------------------------------------------------------------------

    def steps(self) -> int:
        path = self.run_dir / "metrics.jsonl"
        return path.read_text().count('"kind":"step"') if path.exists() else 0

    def _wait(self, condition: Any) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self._process.poll() is None, f"it has ended: {self._process.communicate()}"
            assert time.monotonic() < deadline, "it never happened"
            time.sleep(0.05)

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self._mark:
                    found.append(process)
            except psutil.Error:
                continue
        return sorted(found, key=lambda one: one.pid)

    def journal(self, kind: str) -> list[dict[str, Any]]:
        return list(of_kinds(self.run_dir / "journal.jsonl", kind))

    def workers(self) -> set[int]:
        return {member["pid"] for member in self.journal("generation")[-1]["members"]}

    def fenced(self) -> set[int]:
        """The processes that were flooded, or waited for a processor, until they seemed to be frozen, and so were
        killed by the coordinator."""
        workers, servers = (
            {entry[what] for entry in self.journal(kind)}
            for kind, what in (("fenced", "worker"), ("server_fenced", "server"))
        )
        members = [member for one in self.journal("generation") for member in one["members"]]
        serving = [server for one in self.journal("servers") for server in one["servers"]]
        return {one["pid"] for one in members if one["worker"] in workers} | {
            one["pid"] for one in serving if one["number"] in servers
        }

    def doors(self) -> list[tuple[str, int]]:
        """Every address at which a process of the run listens. (Workers listen with gloo's own sockets alone.)"""
        found, workers = set(), self.workers()
        for process in self.processes():
            if process.pid not in workers:
                all_of_them = process.net_connections("tcp")
                found |= {(c.laddr.ip, c.laddr.port) for c in all_of_them if c.status == psutil.CONN_LISTEN}
        return sorted(found)

    def measure(self) -> Measure:
        workers = self.workers()
        rss, connections = {}, 0
        for one in self.processes():
            role = "coordinator" if one.pid == self.pid else "worker" if one.pid in workers else "process"
            rss[f"{role} {one.pid}"] = round(one.memory_info().rss / 2**20, 1)
            connections += len(one.net_connections("tcp"))
        return Measure(rss, connections)

    # --- what is done to it ------------------------------------------------------------------------------------------

    def attack(self, frames: int) -> None:
        """So many frames, spread over all doors and all kinds of attack."""
        authority, enemy = self.attacker.authority, self.attacker
        assert self._process.poll() is None, f"it has ended: {self._process.communicate()}"
        doors = self.doors()
        each = max(frames // (len(doors) + 1), 20)
        for host, port in doors:
            address = f"tcp://{host}:{port}"
            coordinator = address == self.coordinator
            self._count("raw bytes", enemy.raw(host, port, each // 10))
            self._count("strangers", enemy.strangers(address, each // 10))
            door = self._key(address, coordinator)
            self._count("unsigned", enemy.unsigned(address, door, each // 4))
            self._count("members", enemy.member(address, door, each // 4, servers=not coordinator))
            self._count("too large", enemy.too_large(address, door, TOO_LARGE) if coordinator else 0)
        door = authority.coordinator_key
        self._count("in another's name", enemy.claims(self.coordinator, door, each // 2))
        same = m.encode(m.ScaleRequested(2))
        self._count("replayed", enemy.replayed(self.coordinator, door, authority.owner().signer(), same, each // 2))
        self._count("guests", enemy.join_socket(self.run_dir, min(each // 50, 500)))

    def _key(self, address: str, coordinator: bool) -> bytes:
        """With which a door opens; on loopback those of servers have no lock."""
        authority = self.attacker.authority
        if coordinator:
            return authority.coordinator_key
        if address not in self._locked:
            key = authority.server(0).servers_key
            self._locked[address] = any(self.attacker.unsigned(address, key, 1) for _ in range(3))
        return authority.server(0).servers_key if self._locked[address] else b""

    def _count(self, kind: str, sent: int) -> None:
        self.sent[kind] = self.sent.get(kind, 0) + sent

    def result(self) -> dict[str, Any]:
        """Lift the siege, and let the run end."""
        self._brake.unlink()
        stdout, stderr = self._process.communicate(timeout=PATIENCE_S)
        assert self._process.returncode == 0, stderr
        found: dict[str, Any] = json.loads(stdout.splitlines()[-1])
        return found

    def refused(self) -> dict[str, int]:
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        told = [entry["counts"] for line in lines if (entry := json.loads(line))["kind"] == "refused"]
        return dict(told[-1]) if told else {}

    def has_refused(self, reason: str, count: int) -> None:
        """Wait until the coordinator says so: it does now and then."""
        self._wait(lambda: self.refused().get(reason, 0) >= count)

    def close(self) -> None:
        self.attacker.close()
        for process in self.processes():
            process.kill()
        self._process.wait()
