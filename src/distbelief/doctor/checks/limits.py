"""Checks the limits of the machine and of its container (cgroup): cores, memory, shared memory, open files."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

import psutil

from distbelief.controlgroups import own_memory_room
from distbelief.doctor.rules.report import Finding, megabytes, ok, problem

# --- memory -----------------------------------------------------------------------------------------------------------


LEAST_BYTES = 1 << 30
"""A worker takes about 300 MB before it has a model."""


@dataclass(frozen=True)
class Memory:
    total: int
    available: int
    limit: int = 0
    """The container's limit; 0: none."""
    left: int = 0
    """The part of the limit that can still be allocated."""

    @property
    def room(self) -> int:
        return min(self.available, self.left) if self.limit else self.available


def probe_memory() -> Memory:
    machine = psutil.virtual_memory()
    room = own_memory_room()
    return Memory(machine.total, machine.available, *((room.limit, max(room.free, 0)) if room else ()))


def judge_memory(found: Memory) -> Finding:
    text = f"{megabytes(found.available)} of {megabytes(found.total)} are free"
    if found.limit:
        text += f"; the container may use {megabytes(found.limit)}, of which {megabytes(found.left)} are free"
    if found.room < LEAST_BYTES:
        scarce = "raise the container's memory limit" if found.limit and found.left < found.available else "end others"
        return problem(
            "memory", text, f"a worker needs {megabytes(LEAST_BYTES)} or more: {scarce}, or take fewer workers"
        )
    return ok("memory", text)


# --- shared memory ----------------------------------------------------------------------------------------------------


TRIED_BYTES = 64 << 20
LEAST_SHM_BYTES = 64 << 20
"""Docker's default size; NCCL takes about 10 MB of it for each pair of GPUs."""
_SHM = "/dev/shm"


@dataclass(frozen=True)
class SharedMemory:
    error: str
    """Why no segment could be made; empty: one could."""
    file_limit: int
    """RLIMIT_FSIZE, which also limits segments; -1: no limit."""
    shm_total: int
    shm_free: int
    """-1: /dev/shm does not exist."""


def probe_sharedmemory(room: int) -> SharedMemory:
    """`room`: the free memory. The test segment takes at most a quarter of it, for a moment."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    error = _try_segment(min(TRIED_BYTES, max(room // 4, 1 << 20)))
    try:
        shm = os.statvfs(_SHM)
    except OSError:
        return SharedMemory(error, limit, -1, -1)
    return SharedMemory(error, limit, shm.f_frsize * shm.f_blocks, shm.f_frsize * shm.f_bavail)


def _try_segment(size: int) -> str:
    try:
        fd = os.memfd_create("distbelief-doctor")
    except OSError as error:
        return error.strerror or str(error)
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        return f"{megabytes(size)}: {error.strerror}"
    finally:
        os.close(fd)
    return ""


def judge_sharedmemory(found: SharedMemory) -> Finding:
    about = "shared memory"
    if found.error:
        limited = found.file_limit >= 0
        return problem(
            about,
            f"a segment could not be made: {found.error}"
            + (f" (files may have {megabytes(found.file_limit)}, by RLIMIT_FSIZE)" if limited else ""),
            "raise the limit: `ulimit -f unlimited`" if limited else "free memory, or raise the container's limit",
        )
    if found.shm_total < 0:
        return problem(about, f"segments can be made, but there is no {_SHM}", f"mount a tmpfs on {_SHM}")
    text = f"segments can be made; {_SHM} has {megabytes(found.shm_free)} of {megabytes(found.shm_total)} free"
    if found.shm_free < LEAST_SHM_BYTES:
        if found.shm_total < 2 * LEAST_SHM_BYTES:
            advice = "make it larger: docker run --shm-size=1g, or mount -o remount,size=1g /dev/shm"
        else:
            advice = f"remove what others have left there: ls -l {_SHM}"
        return problem(about, text, advice)
    return ok(about, text)


# --- open files -------------------------------------------------------------------------------------------------------


LEAST_OPEN_FILES = 1024


@dataclass(frozen=True)
class OpenFiles:
    soft: int
    hard: int


def probe_openfiles() -> OpenFiles:
    return OpenFiles(*resource.getrlimit(resource.RLIMIT_NOFILE))


def judge_openfiles(found: OpenFiles) -> Finding:
    text = f"a process may have {_many(found.soft)} open"
    if 0 <= found.soft < LEAST_OPEN_FILES:
        can = found.hard < 0 or found.hard >= LEAST_OPEN_FILES
        how = "ulimit -n 4096" if can else "raise nofile in /etc/security/limits.conf, or of the container"
        return problem("open files", f"{text}, and no more than {_many(found.hard)}", how)
    return ok("open files", text)


def _many(limit: int) -> str:
    return "any number" if limit < 0 else str(limit)
