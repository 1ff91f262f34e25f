"""Two hosts, each a network namespace of its own, and a slow cable between them; and a run that spans both."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

PATIENCE_S = 900.0


class Cable:
    """Host 1 is 10.78.0.1, host 2 is 10.78.0.2; each end sends so many megabits a second (a token bucket)."""

    def __init__(self, mbit: float) -> None:
        name = f"db{uuid.uuid4().hex[:6]}"
        self._spaces = [f"{name}h1", f"{name}h2"]
        for space in self._spaces:
            _run("ip", "netns", "add", space)
        first, second = self._spaces
        _run("ip", "link", "add", "eth0", "netns", first, "type", "veth", "peer", "name", "eth0", "netns", second)
        bucket = ["tbf", "rate", f"{mbit}mbit", "burst", "64kb", "latency", "200ms"]
        for host in (1, 2):
            for command in (
                ["ip", "link", "set", "lo", "up"],
                ["ip", "address", "add", f"10.78.0.{host}/24", "dev", "eth0"],
                ["ip", "link", "set", "eth0", "up"],
                ["tc", "qdisc", "add", "dev", "eth0", "root", *bucket],
            ):
                _run(*self.inside(host), *command)

    def inside(self, host: int) -> list[str]:
        return ["ip", "netns", "exec", self._spaces[host - 1]]

    def sent_bytes(self) -> int:
        """What both ends have sent."""
        path = "/sys/class/net/eth0/statistics/tx_bytes"
        return sum(int(_run(*self.inside(host), "cat", path).strip()) for host in (1, 2))

    def __enter__(self) -> Cable:
        return self

    def __exit__(self, *_: object) -> None:
        for space in self._spaces:
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)


@dataclass(frozen=True)
class Trained:
    seconds_to_goal: float | None
    """From the first step of both hosts to the evaluation that reached the goal; None: none did."""
    steps_to_goal: int | None
    step_s: float
    """The median, with both hosts."""
    sent_bytes_per_step: float
    """On the cable, with everything that belongs to it: headers, rows, heartbeats."""
    wire_ratio: float | None
    accuracy: float


def train(cable: Cable, folder: Path, strategy: str, job: Sequence[str], goal: float) -> Trained:
    """One worker on each host."""
    brake, run_dir = folder / "brake", folder / "run"
    brake.touch()
    command = [sys.executable, "-m", "distbelief.cli.main"]
    options = ["--workers", "1", "--listen", "10.78.0.1", "--save-every", "never", "--strategy", strategy, "--json"]
    with open(folder / "log", "w") as log:
        host = subprocess.Popen(
            [*cable.inside(1), *command, "train", *job, *options, "--run-dir", "run", "--no-balance"],
            cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
        guest = None
        try:
            _until((run_dir / "parcel.bin").exists, host)
            join = [*cable.inside(2), *command, "worker", "--join", "run", "--host", "host2"]
            guest = subprocess.Popen(join, cwd=folder, stdout=log, stderr=log)
            _until(lambda: bool(_together(run_dir)), host)
            before, began = cable.sent_bytes(), len(_of(run_dir, "step"))
            brake.unlink()
            output, _ = host.communicate(timeout=PATIENCE_S)
            after = cable.sent_bytes()
            guest.wait(timeout=60)
        finally:
            for process in (host, guest):
                if process is not None and process.poll() is None:
                    process.kill()
    result = json.loads(output.strip().splitlines()[-1])
    return _figures(run_dir, result, (after - before) / (result["steps"] - began), goal)


def _figures(run_dir: Path, result: dict[str, Any], sent: float, goal: float) -> Trained:
    both = {entry["generation"] for entry in _of(run_dir, "generation", "journal.jsonl") if len(entry["members"]) == 2}
    times = [entry["at"] for entry in _of(run_dir, "step") if entry["generation"] in both]
    times = times[1:]  # the first one was slowed down
    reached = [e for e in _of(run_dir, "evaluation") if e["metrics"]["accuracy"] >= goal and e["at"] > times[0]]
    gaps = sorted(later - earlier for earlier, later in pairwise(times))
    return Trained(
        reached[0]["at"] - times[0] if reached else None,
        reached[0]["step"] if reached else None,
        gaps[len(gaps) // 2],
        sent,
        result["wire_ratio"],
        result["metrics"]["accuracy"],
    )


def _together(run_dir: Path) -> list[dict[str, Any]]:
    """The steps that both have committed together."""
    both = {entry["generation"] for entry in _of(run_dir, "generation", "journal.jsonl") if len(entry["members"]) == 2}
    return [entry for entry in _of(run_dir, "step") if entry["generation"] in both]


def _of(run_dir: Path, kind: str, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    path = run_dir / name
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [entry for line in lines if line and (entry := json.loads(line))["kind"] == kind]


def _until(condition: Any, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            raise SystemExit("the run did not come to have both hosts: see its log")
        time.sleep(0.1)


def _run(*command: str) -> str:
    found = subprocess.run(command, check=False, capture_output=True, text=True, timeout=30)
    if found.returncode:
        raise SystemExit(f"{' '.join(command)}: {found.stderr.strip()}\nnetwork namespaces need root and iproute2")
    return found.stdout
