"""Trained runs as files for others: exported in every format, and averaged."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.support.runs.command import JOBS, Outcome

Cli = Callable[..., Outcome]

needs_onnx = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime") is None or importlib.util.find_spec("onnxscript") is None,
    reason="onnx, onnxscript and onnxruntime are not installed: pip install 'distbelief[dev]'",
)


def test_a_small_run_exported_and_read_without_distbelief(distbelief: Cli, tmp_path: Path) -> None:
    assert distbelief("train", JOBS / "small.py", "--workers", 2, "--run-dir", "run").status == 0
    saved = distbelief("export", "run", "--to", "w.safetensors", "--json").json
    assert (saved["tensors"], saved["parameters"], saved["max_difference"]) == (4, 16 * 7 + 2 * 17, 0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Tanh(), torch.nn.Linear(16, 2))
    model.load_state_dict(load_file(tmp_path / "w.safetensors"))

    traced = distbelief("export", "run", "--to", "net.pt2", "--json").json
    assert (traced["format"], traced["max_difference"], traced["batch"]) == ("program", 0, None)
    x = torch.randn(11, 6)
    program = torch.export.load(tmp_path / "net.pt2").module()
    assert torch.equal(program(x), model(x))


@needs_onnx
def test_the_average_of_two_seeds_of_the_digits_as_onnx(distbelief: Cli, tmp_path: Path) -> None:
    import onnxruntime

    digits = JOBS / "digits.py"
    for seed in (0, 1):
        settings = ["--set", "epochs=1", "--set", f"seed={seed}", "--set", "width=8"]
        assert distbelief("train", digits, "--workers", 1, *settings, "--run-dir", f"run{seed}").status == 0
    merged = distbelief("average", "run0", "run1", "--to", "mean.safetensors", "--json").json
    assert (merged["sources"], merged["tensors"]) == (["run0", "run1"], 20)
    one, other = (load_file(tmp_path / run / "weights.safetensors") for run in ("run0", "run1"))
    mean = load_file(tmp_path / "mean.safetensors")
    assert not torch.equal(one["12.weight"], other["12.weight"])
    for name in one:
        middle = one[name] if name.endswith("tracked") else ((one[name].double() + other[name].double()) / 2).float()
        assert torch.equal(mean[name], middle)

    outcome = distbelief("export", "mean.safetensors", "--model-of", "run0", "--to", "net.onnx", "--json").json
    assert outcome["format"] == "onnx"
    assert outcome["max_difference"] < 1e-4
    session = onnxruntime.InferenceSession(tmp_path / "net.onnx", providers=["CPUExecutionProvider"])
    (scores,) = session.run(None, {session.get_inputs()[0].name: torch.rand(4, 1, 8, 8).numpy()})
    assert scores.shape == (4, 10)
