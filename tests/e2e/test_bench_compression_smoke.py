"""The benchmark of compression runs and writes figures of the promised shape."""

from __future__ import annotations

import gzip
import json
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "bench" / "compression.py"


@pytest.fixture
def clothes(tmp_path: Path) -> Path:
    """A few images of noise, in files of the right names."""
    random = np.random.default_rng(0)
    for part, count in (("train", 128), ("t10k", 32)):
        images, classes = random.integers(0, 256, (count, 28, 28), np.uint8), random.integers(0, 10, count, np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", classes)):
            head = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(f">{array.ndim}I", *array.shape)
            (tmp_path / f"{part}-{kind}-ubyte.gz").write_bytes(gzip.compress(head + array.tobytes()))
    return tmp_path


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=230, cwd=ROOT, check=False)


def test_accuracies_and_bytes_are_written(clothes: Path, tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    settings = ["--set", "width=2", "--set", "epochs=1", "--set", "batch=32"]
    options = ["--folder", clothes, "--only", "accuracy", "--methods", "none,int8", *settings, "--results", results]
    done = run(*options)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(results.read_text())
    assert found["machine"]["versions"]["torch"]
    assert list(found["accuracy"]) == ["none", "int8"]
    assert found["accuracy"]["none"]["wire_ratio"] is None
    assert 0 < found["accuracy"]["int8"]["wire_ratio"] < 1
    assert found["accuracy"]["int8"]["steps"] == 4


def test_an_unknown_method_is_named() -> None:
    done = run("--methods", "zip")
    assert done.returncode == 2
    assert "no such method: zip" in done.stderr
