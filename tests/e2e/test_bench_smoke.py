"""The comparison runs from one end to the other: two systems train, their losses agree, and a table is shown. How fast
anything is, is not a test's business."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_two_systems_do_the_same_work(tmp_path: Path) -> None:
    file = tmp_path / "new folder" / "results.json"
    options = ["--quick", "--workloads", "mlp", "--systems", "allreduce,ddp", "--repetitions", "1", "--steps", "4"]
    command = [sys.executable, "-m", "bench", "speed", *options, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=550, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    content = json.loads(file.read_text())
    assert content["failed"] == {}
    assert content["machine"]["versions"]["torch"]
    ours, ddp = (next(one for one in content["measurements"] if one["system"] == name) for name in ("allreduce", "ddp"))
    for one in (ours, ddp):
        assert one["problem"] == ""
        assert one["samples_per_s"] > 0
        assert one["first_step_s"] > 0
        assert one["peak_bytes"] > 1e7
        assert one["losses"] == pytest.approx(content["references"]["mlp ×2"], rel=1e-3)
    if not content["wire"]:  # as root: bytes are counted, and DDP's gradients go over loopback, ours do not
        assert ddp["wire_bytes_per_step"] > 10 * ours["wire_bytes_per_step"]
    assert "DistBelief allreduce" in done.stdout
