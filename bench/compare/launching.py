"""Start a system's processes on a task, watch them from outside, end them. It knows nothing of figures."""

from __future__ import annotations

import contextlib
import re
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from bench.compare import isolation
from bench.compare.system import Commands, Start, System
from bench.machine import Bystanders
from bench.memory.watch import first_workers
from bench.running import TIMEOUT_S, DriverFailed, environment
from bench.task import VARIABLE, peak_bytes

POLL_S = 0.02
LOOK_S = 0.2
TAIL = 1500
OUTPUT = "output.txt"
FIRST_ERROR = re.compile(r"^.*\b\w+(Error|Exception)\b: .*$", re.MULTILINE)


@dataclass
class Ran:
    """What was seen from outside."""

    began: float
    others: float = 0.0
    """The share of the machine's processor time that others had."""
    wire: list[tuple[float, int]] = field(default_factory=list)
    """(time, bytes that have gone over loopback)"""
    peak_bytes: int = 0
    """Of our workers; other systems' ranks tell theirs."""


def run(system: System, start: Start, counted: bool, limit_s: float = TIMEOUT_S) -> Ran:
    """To the end of the first process. `counted`: the loopback is ours alone."""
    variables = {**environment(), VARIABLE: str(start.folder), **system.variables}
    for command in system.setup(start) if system.setup else []:
        _to_its_end(command, variables, start.folder, limit_s)
    bystanders, ran = Bystanders(), Ran(time.time())
    with (start.folder / OUTPUT).open("w") as output:
        processes = started(system.commands(start), variables, start.folder, output)
        first = processes[0]
        try:
            _watch(processes if system.ends_with_all else [first], start.folder, ran, counted, limit_s)
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    if process.poll() is None:
                        process.terminate()
            isolation.end_descendants()
            for process in processes:
                process.wait()
    ran.others = bystanders.share()
    if first.returncode:
        raise DriverFailed(f"{' '.join(first.args)} ended with {first.returncode}:\n{tail(start.folder)}")  # type: ignore[arg-type]
    return ran


def _watch(ends: list[subprocess.Popen[bytes]], folder: Path, ran: Ran, counted: bool, limit_s: float) -> None:
    """Until all of these have ended."""
    deadline, next_look = time.monotonic() + limit_s, 0.0
    journal, workers = folder / "run" / "journal.jsonl", list[int]()
    while any(one.poll() is None for one in ends):
        now = time.monotonic()
        if now > deadline:
            raise DriverFailed(f"not done after {limit_s:.0f} s:\n{tail(folder)}")
        if now >= next_look or not ran.peak_bytes:  # a short run may be over before the second look
            if not workers and journal.exists():
                workers = list(first_workers(journal))
            for pid in workers:
                with contextlib.suppress(OSError):  # it has ended
                    ran.peak_bytes = max(ran.peak_bytes, peak_bytes(pid))
        if now >= next_look:
            next_look = now + LOOK_S
            if counted:
                ran.wire.append((time.time(), isolation.loopback_bytes()))
        time.sleep(POLL_S)
    if counted:
        ran.wire.append((time.time(), isolation.loopback_bytes()))


def started(
    commands: Commands, variables: Mapping[str, str], folder: Path, output: IO[str]
) -> list[subprocess.Popen[bytes]]:
    return [
        subprocess.Popen(
            command, env=variables, cwd=folder, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True,
        )
        for command in commands
    ]  # fmt: skip


def _to_its_end(command: list[str], variables: Mapping[str, str], folder: Path, limit_s: float) -> None:
    done = subprocess.run(
        command, env=variables, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s,
        check=False,
    )  # fmt: skip
    if done.returncode:
        raise DriverFailed(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-TAIL:]}")


def tail(folder: Path) -> str:
    """The end of what was printed; before it the first error, which launchers bury under their own."""
    text = (folder / OUTPUT).read_text(errors="replace")
    first = FIRST_ERROR.search(text)
    return (f"{first.group(0).strip()}\n…\n" if first else "") + text[-TAIL:]
