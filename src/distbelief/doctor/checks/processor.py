"""Checks the processor: cores, threads and instruction set, which decide the speed and the bits of a step; and the
speed of matrix products by torch's BLAS and by oneDNN (`Job.matmul` chooses between them)."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from dataclasses import dataclass

from distbelief.controlgroups import own_cpu_quota
from distbelief.doctor.rules.report import Finding, ok, problem, skipped

BUSY = 2.0
"""Runnable processes per core; above it, workers wait for cores."""


@dataclass(frozen=True)
class Processor:
    cores: int
    """The machine's cores."""
    usable: int
    """The cores on which this process may run."""
    quota: float
    """Cores' worth of time that the container may use; 0: no limit."""
    instruction_set: str
    """The instruction set that torch uses. Empty: torch does not work."""
    threads: int
    """torch's default number of threads; `train --threads` overrides it."""
    load: float
    """Runnable processes, averaged over the last minute."""
    onednn: str = ""
    """The instruction set to which ONEDNN_MAX_CPU_ISA limits oneDNN."""

    def facts(self) -> dict[str, str]:
        facts = {"instruction_set": self.instruction_set} if self.instruction_set else {}
        return {**facts, "MKL-DNN": self.onednn or "default"}


def probe_processor() -> Processor:
    instruction_set, threads = "", 0
    try:
        import torch

        instruction_set = f"{platform.machine()} {torch.backends.cpu.get_cpu_capability()}"
        threads = torch.get_num_threads()
    except Exception:  # the software check reports it
        pass
    usable, cores = len(os.sched_getaffinity(0)), os.cpu_count() or 1
    onednn = os.environ.get("ONEDNN_MAX_CPU_ISA", "")
    return Processor(cores, usable, own_cpu_quota(), instruction_set, threads, os.getloadavg()[0], onednn)


def judge_processor(found: Processor) -> Finding:
    about = "processor"
    text = f"{found.cores} cores, {found.instruction_set or platform.machine()}, {found.threads} threads by default"
    if found.usable < found.cores:
        text += f"; {found.usable} of the cores are for this process"
    if found.quota:
        text += f"; the container may use {found.quota:g} cores' worth of time"
    room = min(found.usable, found.quota or found.usable)
    if room < 1:
        return problem(about, text, "give the container at least one core (cpu limit): steps would stall")
    if found.load > BUSY * room:
        return problem(
            about,
            f"{text}; {found.load:.1f} runnable processes on average over the last minute",
            "other programs take the cores: end them (see `top`), or start fewer workers here",
        )
    return ok(about, text)


# --- products of matrices ---------------------------------------------------------------------------------------------


SIDE = 512
TRIES = 7
WORTH_SAYING = 1.2


@dataclass(frozen=True)
class Products:
    """Floating-point operations per second, in one thread; 0: not measured."""

    torch: float = 0.0
    onednn: float = 0.0


def probe_products() -> Products:
    try:
        return _measured()
    except Exception:  # the software check reports the cause
        return Products()


def _measured() -> Products:
    import torch

    from distbelief.strategies.flatmodel.onednn import available, use_onednn

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        rows, plain, ours = torch.ones(SIDE, SIDE), torch.nn.Linear(SIDE, SIDE), torch.nn.Linear(SIDE, SIDE)
        if available():
            use_onednn(ours)
        with torch.no_grad():
            times = [(_seconds(lambda: plain(rows)), _seconds(lambda: ours(rows))) for _ in range(TRIES)]
    finally:
        torch.set_num_threads(threads)
    of_torch, of_onednn = (2 * SIDE**3 / min(some) for some in zip(*times, strict=True))
    return Products(of_torch, of_onednn if available() else 0.0)


def _seconds(multiply: Callable[[], object]) -> float:
    started = time.perf_counter()
    multiply()
    return time.perf_counter() - started


def judge_products(found: Products) -> Finding:
    about = "products"
    if not found.torch:
        return skipped(about, "torch does not work")
    text = f"of matrices, in one thread: {found.torch / 1e9:.0f} GFLOP/s by torch"
    if found.onednn:
        text += f", {found.onednn / 1e9:.0f} by oneDNN"
    if found.onednn > WORTH_SAYING * found.torch:
        text += '; Job(matmul="onednn") takes the faster one for linear layers'
    return ok(about, text)
