"""How much memory is free, for the machine and for the container."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from distbelief.doctor.checks.cgroup import memory_left
from distbelief.doctor.rules.finding import Finding, megabytes, ok, problem

LEAST_BYTES = 1 << 30
"""One worker takes some 300 MB before it has a model."""


@dataclass(frozen=True)
class Memory:
    total: int
    available: int
    limit: int = 0
    """The container's; 0: there is none."""
    left: int = 0
    """Of the limit."""

    @property
    def room(self) -> int:
        return min(self.available, self.left) if self.limit else self.available


def probe() -> Memory:
    machine = psutil.virtual_memory()
    return Memory(machine.total, machine.available, *memory_left())


def judge(found: Memory) -> Finding:
    text = f"{megabytes(found.available)} of {megabytes(found.total)} are free"
    if found.limit:
        text += f"; the container may use {megabytes(found.limit)}, of which {megabytes(found.left)} are free"
    if found.room < LEAST_BYTES:
        scarce = "raise the container's memory limit" if found.limit and found.left < found.available else "end others"
        return problem(
            "memory", text, f"a worker needs {megabytes(LEAST_BYTES)} or more: {scarce}, or take fewer workers"
        )
    return ok("memory", text)
