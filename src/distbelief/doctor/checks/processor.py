"""Cores, threads and the instruction set: what decides how fast steps are, and to which bits."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass

from distbelief.doctor.checks.cgroup import cpu_quota
from distbelief.doctor.rules.finding import Finding, ok, problem

BUSY = 2.0
"""Processes that want to run, for each core: with more the workers wait for cores instead of each other."""


@dataclass(frozen=True)
class Processor:
    cores: int
    """Of the machine."""
    usable: int
    """That this process may run on."""
    quota: float
    """Cores' worth of time that the container may use; 0: no limit."""
    instruction_set: str
    """That torch computes with. Empty: torch does not work."""
    threads: int
    """That torch takes by itself; `train --threads` says otherwise."""
    load: float
    """Processes that wanted to run, over the last minute."""
    onednn: str = ""
    """The instruction set that oneDNN is confined to, by ONEDNN_MAX_CPU_ISA."""

    def facts(self) -> dict[str, str]:
        facts = {"instruction_set": self.instruction_set} if self.instruction_set else {}
        return {**facts, "MKL-DNN": self.onednn or "default"}


def probe() -> Processor:
    instruction_set, threads = "", 0
    try:
        import torch

        instruction_set = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        threads = torch.get_num_threads()
    except Exception:  # the check of the software says it
        pass
    usable, cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    onednn = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    return Processor(cores, usable, cpu_quota(), instruction_set, threads, os.getloadavg()[0], onednn)


def judge(found: Processor) -> Finding:
    about = "processor"
    text = f"{found.cores} cores, {found.instruction_set or platform.machine()}, {found.threads} threads by default"
    if found.usable < found.cores:
        text += f"; {found.usable} of the cores are for this process"
    if found.quota:
        text += f"; the container may use {found.quota:g} cores' worth of time"
    room = min(found.usable, found.quota or found.usable)
    if room < 1:
        return problem(about, text, "give the container at least one core (cpu limit): steps would stop and go")
    if found.load > BUSY * room:
        return problem(
            about,
            f"{text}; {found.load:.1f} processes wanted to run over the last minute",
            "other programs take the cores: end them (see `top`), or start fewer workers here",
        )
    return ok(about, text)
