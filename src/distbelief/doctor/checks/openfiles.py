"""How many files and sockets a process may have open: a member has one for each other member, and some."""

from __future__ import annotations

import resource
from dataclasses import dataclass

from distbelief.doctor.rules.finding import Finding, ok, problem

LEAST = 1024


@dataclass(frozen=True)
class OpenFiles:
    soft: int
    hard: int


def probe() -> OpenFiles:
    return OpenFiles(*resource.getrlimit(resource.RLIMIT_NOFILE))


def judge(found: OpenFiles) -> Finding:
    text = f"a process may have {_many(found.soft)} open"
    if 0 <= found.soft < LEAST:
        can = found.hard < 0 or found.hard >= LEAST
        how = "ulimit -n 4096" if can else "raise nofile in /etc/security/limits.conf, or of the container"
        return problem("open files", f"{text}, and no more than {_many(found.hard)}", how)
    return ok("open files", text)


def _many(limit: int) -> str:
    return "any number" if limit < 0 else str(limit)
