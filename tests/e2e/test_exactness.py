"""The result does not depend on the cluster: the same weights, bit for bit, on any number of workers."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from conftest import JOBS, REPOSITORY, Outcome

Cli = Callable[..., Outcome]
EXAMPLES = REPOSITORY / "examples"


@pytest.fixture(scope="session")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small data set in the files and format of Fashion-MNIST."""
    folder = tmp_path_factory.mktemp("fashion")
    random = np.random.default_rng(0)
    for part, count in (("train", 300), ("t10k", 60)):
        labels = random.integers(0, 10, count, dtype=np.uint8)
        pixels = random.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        pixels[np.arange(count), labels] = 255
        with gzip.open(folder / f"{part}-images-idx3-ubyte.gz", "wb") as file:
            file.write(struct.pack(">4B3I", 0, 0, 8, 3, count, 28, 28) + pixels.tobytes())
        with gzip.open(folder / f"{part}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(struct.pack(">4BI", 0, 0, 8, 1, count) + labels.tobytes())
    return folder


@pytest.fixture
def arguments(request: pytest.FixtureRequest) -> list[object]:
    """The command line of a short run of each job."""
    name = request.param
    if name == "digits":
        return [EXAMPLES / "digits.py", "--set", "epochs=1"]
    if name == "fashion":
        folder = request.getfixturevalue("images")
        return [EXAMPLES / "fashion.py", "--set", f"folder={folder}", "--set", "epochs=2"]
    if name == "gpt":
        small = ["layers=2", "width=32", "context=32", "steps=8", "megabytes=0.1"]
        return [EXAMPLES / "gpt.py", *(part for setting in small for part in ("--set", setting))]
    return [JOBS / f"{name}.py"]


@pytest.mark.parametrize("arguments", ["digits", "fashion", "gpt", "everything"], indirect=True)
def test_same_weights_on_any_number_of_workers(
    distbelief: Cli, arguments: list[object], request: pytest.FixtureRequest
) -> None:
    hashes = {}
    for workers in (1, 2, 3, 4, 5):
        result = distbelief("train", *arguments, "--workers", workers, "--json").json
        hashes[f"{workers} workers"] = result["weights_sha256"]
        metrics = result["metrics"]
        assert hashes.setdefault("metrics", metrics) == metrics
    del hashes["metrics"]
    difficult = "everything" in request.node.name
    for workers in (1, 2, 3, 4, 5) if difficult else (2, 5):
        result = distbelief("train", *arguments, "--workers", workers, "--strategy", "allreduce:gloo", "--json").json
        hashes[f"{workers} workers over gloo"] = result["weights_sha256"]
    result = distbelief("train", *arguments, "--shares", "5,1,2", "--json").json
    hashes["another assignment"] = result["weights_sha256"]
    assert len(set(hashes.values())) == 1, hashes


def test_a_planted_wrong_order_is_noticed(distbelief: Cli) -> None:
    right = distbelief("train", JOBS / "small.py", "--set", "shards=8", "--workers", 3, "--json").json
    wrong = distbelief("train", JOBS / "wrong_order.py", "--workers", 3, "--json").json
    assert wrong["weights_sha256"] != right["weights_sha256"]
    assert wrong["loss"] == pytest.approx(right["loss"], rel=1e-3)  # wrong in the last bits only


def test_the_same_job_twice(distbelief: Cli) -> None:
    first, second = (distbelief("train", JOBS / "small.py", "--workers", 2, "--json").json for _ in range(2))
    assert first["weights_sha256"] == second["weights_sha256"]
    keys = {"run_dir", "steps", "loss", "metrics", "weights_sha256", "samples_per_s", "wall_s", "workers", "recoveries"}
    assert set(first) == keys


def test_bf16_is_exact_too(distbelief: Cli) -> None:
    arguments = ["train", JOBS / "small.py", "--set", "precision=bf16", "--json"]
    hashes = {distbelief(*arguments, "--workers", workers).json["weights_sha256"] for workers in (1, 3)}
    assert len(hashes) == 1


def test_not_exact_learns_the_same(distbelief: Cli) -> None:
    exact = distbelief("train", JOBS / "small.py", "--workers", 2, "--json").json
    loose = distbelief("train", JOBS / "small.py", "--workers", 2, "--strategy", "allreduce:inexact", "--json").json
    assert loose["loss"] == pytest.approx(exact["loss"], rel=1e-3)
