"""A control group with limits, as a container has them, for processes that a test starts. Needs root, or a group that
this user may divide."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from distbelief.controlgroups import MEMBERSHIP, ROOT, folders

LIMITS = {"memory": ("memory.max", "memory.limit_in_bytes"), "pids": ("pids.max", "pids.max")}
"""Controller -> the file of its limit, in version 2 and in version 1."""
USED = {"memory": ("memory.current", "memory.usage_in_bytes"), "pids": ("pids.current", "pids.current")}


class Group:
    """One control group; `inside` is the prefix of a command that runs in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.inside = ["/bin/sh", "-c", f'echo $$ > {folder}/cgroup.procs && exec "$@"', "inside"]

    def below(self, name: str) -> Group:
        """A group in this one, without a limit of its own; it is removed with this one."""
        (self.folder / name).mkdir()
        return Group(self.folder / name)

    def limit(self, controller: str, most: int) -> None:
        names = LIMITS[controller]
        name = next(name for name in names if (self.folder / name).exists())
        (self.folder / name).write_text(f"{most}\n")

    def used(self, controller: str) -> int:
        name = next(name for name in USED[controller] if (self.folder / name).exists())
        return int((self.folder / name).read_text())

    def refused(self) -> int:
        """How often the kernel has refused a process because of the limit."""
        words = (self.folder / "pids.events").read_text().split()
        return int(words[words.index("max") + 1])


@contextlib.contextmanager
def limited(limits: Mapping[str, int]) -> Iterator[Group]:
    """A new group with one limit, or the test is skipped with the reason."""
    ((controller, most),) = limits.items()
    where = next(
        (
            ROOT / path
            for path in folders(MEMBERSHIP.read_text(), controller)
            if (ROOT / path / "cgroup.procs").exists() and _can_limit(ROOT / path, controller)
        ),
        None,
    )
    if where is None:
        pytest.skip(f"this user can make no control group with a limit on {controller} here")
    folder = where / f"distbelief-{uuid.uuid4().hex[:8]}"
    folder.mkdir()
    group = Group(folder)
    try:
        group.limit(controller, most)
        yield group
    finally:
        for inner in [*(one for one in folder.iterdir() if one.is_dir()), folder]:
            _remove(inner)


def _can_limit(folder: Path, controller: str) -> bool:
    if not os.access(folder, os.W_OK) or not os.access(folder / "cgroup.procs", os.W_OK):
        return False
    divided = folder / "cgroup.subtree_control"
    return not divided.exists() or controller in divided.read_text().split()


def _remove(folder: Path) -> None:
    deadline = time.monotonic() + 30
    while True:
        try:
            folder.rmdir()
            return
        except OSError:  # the kernel has not let go of the last process
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
