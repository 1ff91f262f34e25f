"""`distbelief export` and `distbelief average`: what they refuse, what they print."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
from typer.testing import CliRunner

from distbelief.checkpoint.manifest import Facts
from distbelief.checkpoint.parts import Slice
from distbelief.checkpoint.saving import seal, write_part
from distbelief.checkpoint.sources import read_source
from distbelief.checkpoint.weights import save_tensors
from distbelief.cli.main import app


def run(*arguments: object) -> Any:
    return CliRunner().invoke(app, list(map(str, arguments)))


@pytest.fixture
def weights(tmp_path: Path) -> list[Path]:
    found = [tmp_path / f"{name}.safetensors" for name in "ab"]
    for value, file in enumerate(found):
        save_tensors({"w": torch.full((2, 3), float(value)), "steps": torch.tensor(5)}, file)
    return found


def test_export_prints_what_was_written_and_how_it_was_checked(tmp_path: Path, weights: list[Path]) -> None:
    to = tmp_path / "out.safetensors"
    result = run("export", weights[1], "--to", to)
    assert result.exit_code == 0, result.stderr
    assert result.stdout == (
        f"wrote {to}: safetensors, {to.stat().st_size} B\n"
        "holds 2 tensors, 6 numbers\nchecked: read back: every tensor has the same bits\n"
    )
    assert torch.equal(read_source(to).tensors["w"], torch.ones(2, 3))


def test_export_as_json(tmp_path: Path, weights: list[Path]) -> None:
    to = tmp_path / "out"
    result = run("export", weights[0], "--to", to, "--format", "safetensors", "--json")
    assert json.loads(result.stdout) == {
        "to": str(to),
        "format": "safetensors",
        "size_bytes": to.stat().st_size,
        "tensors": 2,
        "parameters": 6,
        "checked": "read back: every tensor has the same bits",
        "max_difference": 0.0,
        "batch": None,
        "checkpoint": None,
    }


def test_average_as_text_and_json(tmp_path: Path, weights: list[Path]) -> None:
    to = tmp_path / "mean.safetensors"
    result = run("average", *weights, "--to", to)
    assert (result.exit_code, result.stdout) == (
        0,
        f"wrote {to}: {to.stat().st_size} B, 2 tensors, the mean of 2 sources\n",
    )
    assert torch.equal(read_source(to).tensors["w"], torch.full((2, 3), 0.5))
    result = run("average", *weights, "--to", to, "--weights", "1,3", "--force", "--json")
    assert json.loads(result.stdout) == {
        "to": str(to),
        "sources": list(map(str, weights)),
        "checkpoints": [None, None],
        "tensors": 2,
        "size_bytes": to.stat().st_size,
    }
    assert torch.equal(read_source(to).tensors["w"], torch.full((2, 3), 0.75))


def test_a_source_may_be_replaced_by_the_average(weights: list[Path]) -> None:
    assert run("average", *weights, "--to", weights[0], "--force").exit_code == 0
    assert torch.equal(read_source(weights[0]).tensors["w"], torch.full((2, 3), 0.5))


JOB = """
import torch
from distbelief import Job
job = Job(model=lambda: torch.nn.Linear(3, 2, bias=False), loss=torch.nn.functional.cross_entropy, steps=1,
          optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), global_batch=4,
          data=(torch.randn(9, 3), torch.zeros(9, dtype=torch.int64)))
"""


@pytest.fixture
def unfinished(tmp_path: Path) -> Iterator[Path]:
    """A run that was cut short: its newest checkpoint, of step 20, is damaged; those of steps 10 and 15 are sound."""
    run_dir, store = tmp_path / "run", "memory://bucket/saved"
    run_dir.mkdir()
    (tmp_path / "job.py").write_text(JOB)
    (run_dir / "job.json").write_text(json.dumps({"file": str(tmp_path / "job.py")}))
    (run_dir / "launch.json").write_text(json.dumps({"checkpoints": store}))
    for step in (10, 15, 20):
        tensors = {"model/weight": torch.full((2, 3), float(step)), "optimizer/momentum_buffer/weight": torch.ones(6)}
        part = write_part(store, step, 1, 1, [Slice.whole(name, tensor) for name, tensor in tensors.items()])
        seal(store, step, Facts(), [part])
    fsspec.filesystem("memory").pipe(f"{store}/step-000000020/part-00001-of-00001.safetensors", b"cut off")
    yield run_dir
    fsspec.filesystem("memory").store.clear()


def test_a_run_that_was_cut_short_gives_its_newest_sound_checkpoint(tmp_path: Path, unfinished: Path) -> None:
    used = "memory://bucket/saved/step-000000015"
    result = run("export", unfinished, "--to", tmp_path / "w.safetensors")
    assert result.exit_code == 0, result.stderr
    warning, note = result.stderr.splitlines()
    assert warning.startswith("warning: a checkpoint was skipped: memory://bucket/saved/step-000000020/part-00001-of-0")
    assert "is torn: it has 7 of " in warning
    assert note == f"reading {used}"
    assert torch.equal(read_source(tmp_path / "w.safetensors").tensors["weight"], torch.full((2, 3), 15.0))
    traced = run("export", unfinished, "--to", tmp_path / "net.pt2", "--json")
    assert json.loads(traced.stdout)["checkpoint"] == used
    program = torch.export.load(tmp_path / "net.pt2").module()
    assert torch.equal(program(torch.ones(1, 3)), torch.full((1, 2), 45.0))


def test_a_checkpoint_by_its_url(tmp_path: Path, unfinished: Path) -> None:
    one, to = "memory://bucket/saved/step-000000010", tmp_path / "net.pt2"
    refused = run("export", one, "--to", to)
    assert refused.exit_code == 1
    assert f"{one} holds weights only and does not say which model" in refused.stderr
    assert run("export", one, "--to", to, "--model-of", unfinished).exit_code == 0
    assert torch.equal(torch.export.load(to).module()(torch.ones(1, 3)), torch.full((1, 2), 30.0))

    mean = run("average", one, unfinished, "--to", tmp_path / "mean.safetensors", "--json")
    assert json.loads(mean.stdout)["checkpoints"] == [one, "memory://bucket/saved/step-000000015"]
    assert "warning: a checkpoint was skipped" in mean.stderr
    assert torch.equal(read_source(tmp_path / "mean.safetensors").tensors["weight"], torch.full((2, 3), 12.5))


@pytest.mark.parametrize("command", ["export", "average"])
def test_a_file_that_is_there_is_kept(command: str, weights: list[Path]) -> None:
    before = weights[1].read_bytes()
    given = weights[:1] if command == "export" else weights
    result = run(command, *given, "--to", weights[1], "--json")
    assert result.exit_code == 2
    assert "exists already" in json.loads(result.stdout)["error"]
    assert "--force" in result.stderr
    assert weights[1].read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["export", "a.safetensors", "--to", "out.bin"], 2, "the suffix does not say what to write"),
        (["export", "a.safetensors"], 2, "--to"),
        (["export", "a.safetensors", "--to", "out.bin", "--format", "pickle"], 2, "pickle"),
        (["export", "a.safetensors", "--to", "nowhere/out.onnx"], 2, "there is no folder nowhere"),
        (["export", "a.safetensors", "--to", ".", "--format", "program"], 2, "is a folder"),
        (["export", "a.safetensors", "--to", "/proc/out.safetensors"], 1, "cannot write /proc/out.safetensors"),
        (["export", "c.safetensors", "--to", "out.safetensors"], 1, "there is no c.safetensors"),
        (["export", "a.safetensors", "--to", "out.pt2"], 1, "does not say which model"),
        (["average", "a.safetensors", "--to", "out.safetensors"], 2, "at least two"),
        (["average", "a.safetensors", "b.safetensors", "--to", "out.pt2"], 2, "an average is a .safetensors file"),
        (["average", "a.safetensors", "c.safetensors", "--to", "out.safetensors"], 1, "there is no c.safetensors"),
    ],
)
def test_refusals(
    tmp_path: Path,
    weights: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    status: int,
    text: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NO_COLOR", "1")
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (status, "")
    assert text in result.stderr
    assert sorted(file.name for file in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]


@pytest.mark.parametrize("text", ["1", "1,2,3", "1,0", "1,-1", "1,x", "1,nan", "1,inf", ","])
def test_weights_that_cannot_be(tmp_path: Path, weights: list[Path], text: str) -> None:
    result = run("average", *weights, "--to", tmp_path / "out.safetensors", "--weights", text)
    assert result.exit_code == 2
    assert "--weights" in result.stderr
    assert not (tmp_path / "out.safetensors").exists()
