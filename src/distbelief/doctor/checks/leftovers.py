"""Processes of earlier runs that have nobody left, or stand still."""

from __future__ import annotations

import os
from dataclasses import dataclass

import psutil

from distbelief.doctor.rules.report import Finding, ok, problem

_OURS = ("distbelief.coordinator", "distbelief.launch.zygote", "distbelief.kv")


@dataclass(frozen=True)
class Process:
    pid: int
    what: str
    """The module that it runs."""
    orphan: bool
    """Who started it is gone."""
    stopped: bool
    memory: int = 0


def probe() -> list[Process]:
    found = []
    first_is_ours = _is_python(1)  # in a container the first process may be the launching program itself
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
            what = next((word for word in words if word in _OURS), "")
            if what and process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE:
                orphan = process.ppid() == 1 and not first_is_ours
                stopped = process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)
                found.append(Process(process.pid, what, orphan, stopped, process.memory_info().rss))
        except psutil.Error:  # it has ended meanwhile, or is not ours to look at
            continue
    return found


def _is_python(pid: int) -> bool:
    try:
        return "python" in psutil.Process(pid).name()
    except psutil.Error:
        return False


def judge(found: list[Process]) -> Finding:
    about = "processes"
    bad = [one for one in found if one.orphan or one.stopped]
    if bad:
        told = [f"{one.pid} ({one.what}, {'stopped' if one.stopped else 'left behind'})" for one in bad]
        return problem(
            about, f"of earlier runs: {', '.join(told)}", f"end them: kill -9 {' '.join(str(one.pid) for one in bad)}"
        )
    running = sum(one.what == "distbelief.coordinator" for one in found)
    if running:
        return ok(about, f"{running} run{'s' * (running > 1)} on this machine; nothing is left behind")
    return ok(about, "nothing is left behind")
