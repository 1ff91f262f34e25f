"""Measures that have programs of their own: bandwidth, the stall of a checkpoint, recovery after a kill."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench.running import ROOT, DriverFailed, environment

LIMIT_S = 3600.0


def command(part: str, file: Path, quick: bool) -> list[str]:
    """How a part is measured; its figures go to the file."""
    quick_options = {
        "bandwidth": ["--quick"],
        "checkpoint": ["--quick", "--only", "ours,torch.save"],
        "recovery": ["--quick", "--kills", "3", "--peers", "ours,torchrun"],
    }
    return [sys.executable, "-m", f"bench.{part}", "--json", str(file), *(quick_options[part] if quick else [])]


def measure(part: str, folder: Path, quick: bool) -> dict[str, Any]:
    """Run a part's program to its end; what it found, with its exit status (1: something of ours is wrong)."""
    file = folder / f"{part}.json"
    told = command(part, file, quick)
    try:
        done = subprocess.run(
            told, cwd=ROOT, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=LIMIT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise DriverFailed(f"{' '.join(told)} was not done within {LIMIT_S:.0f} s") from None
    if not file.exists():
        raise DriverFailed(f"{' '.join(told)} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-1500:]}")
    return {"command": " ".join(told[1:3]), "status": done.returncode, **json.loads(file.read_text())}
