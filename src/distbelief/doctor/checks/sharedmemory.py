"""Shared memory: workers of one host have one copy of the state in it (memfd), data readers and NCCL use /dev/shm."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass

from distbelief.doctor.rules.finding import Finding, megabytes, ok, problem

TRIED_BYTES = 64 << 20
LEAST_SHM_BYTES = 64 << 20
"""What Docker gives by default; NCCL takes some 10 MB of it for each pair of GPUs."""
_SHM = "/dev/shm"


@dataclass(frozen=True)
class SharedMemory:
    error: str
    """Why a segment could not be made; empty: it could."""
    file_limit: int
    """RLIMIT_FSIZE, which holds for segments too; -1: none."""
    shm_total: int
    shm_free: int
    """-1: there is no /dev/shm."""


def probe(room: int) -> SharedMemory:
    """`room`: the memory that is free; no more than a quarter of it is taken, for a moment."""
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    error = _try(min(TRIED_BYTES, max(room // 4, 1 << 20)))
    try:
        shm = os.statvfs(_SHM)
    except OSError:
        return SharedMemory(error, limit, -1, -1)
    return SharedMemory(error, limit, shm.f_frsize * shm.f_blocks, shm.f_frsize * shm.f_bavail)


def _try(size: int) -> str:
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


def judge(found: SharedMemory) -> Finding:
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
