"""A small disk of its own for a test: a tmpfs, which only root may mount."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from distbelief.chaos.fulldisk import FullDisk


@contextlib.contextmanager
def small_disk(folder: Path, size: str = "24m") -> Iterator[FullDisk]:
    """Mounted at `folder`. Skips the test where that cannot be."""
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small disk")
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this container cannot mount a small disk: {done.stderr.strip()}")
    try:
        yield FullDisk(folder)
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
