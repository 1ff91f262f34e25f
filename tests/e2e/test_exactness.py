"""The result does not depend on the cluster: the same weights, bit for bit, on any number of workers."""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from distbelief.cli.summary import KEYS
from distbelief.strategies.flatmodel.onednn import use_onednn
from tests.support.runs.command import JOBS, REPOSITORY, Outcome
from tests.support.runs.reference import undisturbed

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
        return [JOBS / "digits.py", "--set", "epochs=1", "--set", "width=8"]
    if name == "fashion":
        folder = request.getfixturevalue("images")
        return [EXAMPLES / "fashion.py", "--set", f"folder={folder}", "--set", "epochs=2"]
    if name == "gpt":
        small = ["layers=2", "width=32", "context=32", "steps=8", "megabytes=0.1"]
        return [EXAMPLES / "gpt.py", *(part for setting in small for part in ("--set", setting))]
    return [JOBS / f"{name}.py"]


OVER_GLOO = ["--strategy", "allreduce:gloo"]


@pytest.mark.parametrize(
    ("arguments", "ways"),
    [
        # The job with everything that makes exactness hard in most ways; the examples in one, for each takes seconds.
        ("everything", [["--workers", 4], ["--workers", 5, *OVER_GLOO], ["--shares", "5,1,2"]]),
        ("digits", [["--workers", 2, *OVER_GLOO]]),
        ("fashion", [["--workers", 5]]),
        ("gpt", [["--shares", "1,3", *OVER_GLOO]]),
    ],
    indirect=["arguments"],
)
def test_same_weights_on_any_number_of_workers(
    distbelief: Cli, arguments: list[object], ways: list[list[object]]
) -> None:
    """And those of one plain process."""
    found = {str(way): distbelief("train", *arguments, *way, "--json").json for way in ways}
    hashes = {way: result["weights_sha256"] for way, result in found.items()}
    assert set(hashes.values()) == {undisturbed(*arguments)}, hashes
    metrics = [result["metrics"] for result in found.values()]
    assert all(one == metrics[0] for one in metrics), metrics


def libraries_differ() -> bool:
    """Whether torch and oneDNN round differently here. On some processors they give the same bits."""
    layers = [torch.nn.Linear(64, 256, bias=False) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    use_onednn(layers[1])
    x = torch.randn(256, 64)
    for layer in layers:
        layer(x).square().sum().backward()
    return not torch.equal(*(layer.weight.grad for layer in layers))


def test_onednn_is_exact_too(distbelief: Cli) -> None:
    small = ["layers=1", "width=64", "context=64", "steps=4", "megabytes=0.1", "matmul=onednn"]
    job = [EXAMPLES / "gpt.py", *(part for setting in small for part in ("--set", setting))]
    hashes = {
        distbelief("train", *job, *way, "--json").json["weights_sha256"]
        for way in (["--workers", 3], ["--shares", "1,3", *OVER_GLOO])
    }
    assert hashes == {undisturbed(*job)}
    if libraries_differ():
        assert hashes != {undisturbed(*job[:-2])}, "torch's own products, as it seems"


def test_bf16_is_exact_too(distbelief: Cli) -> None:
    job = [JOBS / "small.py", "--set", "precision=bf16"]
    result = distbelief("train", *job, "--workers", 3, "--json").json
    assert result["weights_sha256"] == undisturbed(*job) != undisturbed(job[0])
    assert list(result) == list(KEYS)
