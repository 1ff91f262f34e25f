"""Models made again from a run's job file, and written as programs for others. The runs here were never trained."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from distbelief.checkpoint.sources import read_source
from distbelief.checkpoint.weights import save_weights
from distbelief.data.sources import seed_everything
from distbelief.errors import DistBeliefError
from distbelief.exporting.export import Exported, export, largest_difference

HEAD = """
import torch
from torch import nn
from torch.utils.data import Dataset
from distbelief import Job

def make(model, data):
    return Job(model=model, loss=lambda output, target: output.mean(), data=data, global_batch=4, steps=1,
               optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))

class Net(nn.Module):
    def __init__(self, width=3):
        super().__init__()
        self.enter, self.leave = nn.Linear(4, width), nn.Linear(width, 2)
        self.norm = nn.BatchNorm1d(width)
        self.register_buffer("scale", torch.tensor(2.0), persistent=False)
    def forward(self, x, shift=None):
        y = self.leave(self.norm(self.enter(x))) * self.scale
        return y if shift is None else {"shifted": y + shift, "plain": y}

torch.manual_seed(3)
X, Y = torch.randn(9, 4), torch.randn(9, 1)
"""
PLAIN = "job = make(Net, (X, torch.zeros(9)))"

needs_onnx = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime") is None or importlib.util.find_spec("onnxscript") is None,
    reason="onnx, onnxscript and onnxruntime are not installed",
)


def a_run(folder: Path, text: str, settings: dict[str, str] | None = None) -> Path:
    """A run directory as training leaves it, with weights that are not the initial ones."""
    from distbelief.strategies.flatmodel.compute import make_model
    from distbelief.worker.jobfile import load_job

    run_dir = folder / "run"
    run_dir.mkdir()
    file = folder / "made.py"
    file.write_text(HEAD + text)
    (run_dir / "job.json").write_text(json.dumps({"name": "made", "file": str(file), "settings": settings or {}}))
    model = make_model(load_job(file, settings or {}), torch.device("cpu"))
    seed_everything(99)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.rand_like(tensor))
    save_weights(model, run_dir / "weights.safetensors")
    return run_dir


def write(run_dir: Path, file: str) -> Exported:
    forms: dict[str, Any] = {".pt2": "program", ".onnx": "onnx", ".safetensors": "safetensors"}
    return export(read_source(run_dir), run_dir / file, forms[Path(file).suffix])


def files(run_dir: Path) -> set[str]:
    return {file.name for file in run_dir.iterdir()} - {"job.json", "weights.safetensors"}


def test_a_program_computes_what_the_trained_weights_say(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path, PLAIN)
    done = write(run_dir, "net.pt2")
    assert (done.batch, done.max_difference, done.tensors) == (None, 0.0, 9)
    assert "bit for bit, on batches of 3 and 5" in done.checked
    program = torch.export.load(run_dir / "net.pt2")
    w = read_source(run_dir).tensors
    x = torch.randn(1, 4)  # not a size that it was traced or checked with
    h = (x @ w["enter.weight"].T + w["enter.bias"] - w["norm.running_mean"]) / (w["norm.running_var"] + 1e-5).sqrt()
    expected = 2 * ((h * w["norm.weight"] + w["norm.bias"]) @ w["leave.weight"].T + w["leave.bias"])
    torch.testing.assert_close(program.module()(x), expected)
    assert program.example_inputs is None  # no samples of the training data go out with the model


@needs_onnx
@pytest.mark.parametrize(
    "job",
    [
        PLAIN,
        "job = make(Net, (X, Y, torch.zeros(9)))",
        "job = make(Net, {'shift': Y, 'x': X})",
        "class Rows(Dataset):\n"
        "    def __len__(self): return 9\n"
        "    def __getitem__(self, i): return X[i] + torch.randn(4), torch.randn(1), 0\n"
        "job = make(Net, Rows())",
        "def job(width: int = 3): return make(lambda: Net(width), (X, torch.zeros(9)))",
    ],
    ids=["tensors", "two-inputs", "mapping", "dataset", "settings"],
)
def test_every_kind_of_data_in_every_format(tmp_path: Path, job: str) -> None:
    run_dir = a_run(tmp_path, job, {"width": "5"} if "width: int" in job else None)
    for file in ("net.pt2", "net.onnx", "net.safetensors"):
        done = write(run_dir, file)
        assert done.size_bytes == (run_dir / file).stat().st_size
        assert done.batch is None
        assert done.max_difference is not None
        assert done.max_difference < 1e-5
    assert (run_dir / "net.safetensors").read_bytes() == (run_dir / "weights.safetensors").read_bytes()
    assert files(run_dir) == {"net.pt2", "net.onnx", "net.safetensors"}


def test_a_model_for_one_size_of_batch(tmp_path: Path) -> None:
    job = (
        "class Fixed(Net):\n    def forward(self, x): return sum(super(Fixed, self).forward(x[i:i+1]) "
        "for i in range(len(x)))\njob = make(Fixed, (X, torch.zeros(9)))"
    )
    done = write(a_run(tmp_path, job), "net.pt2")
    assert done.batch == 3
    assert "on a batch of 3" in done.checked


def refusal(run_dir: Path, file: str = "net.pt2") -> str:
    with pytest.raises(DistBeliefError) as caught:
        write(run_dir, file)
    assert files(run_dir) == set()
    return f"{caught.value.message}\n{caught.value.details}\n{caught.value.hint}"


def test_a_job_that_came_from_python(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path, PLAIN)
    (run_dir / "job.json").write_text('{"file": "", "settings": {}}')
    assert "came from a Python program" in refusal(run_dir)
    assert write(run_dir, "net.safetensors").tensors == 9


def test_a_job_file_that_is_gone(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path, PLAIN)
    (tmp_path / "made.py").unlink()
    assert f"the job file {tmp_path}/made.py is gone" in refusal(run_dir)


def test_a_job_file_that_makes_another_model_now(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path, PLAIN)
    (tmp_path / "made.py").write_text(HEAD + "job = make(lambda: Net(7), (X, torch.zeros(9)))")
    said = refusal(run_dir)
    assert "do not fit the model" in said
    assert f"enter.weight: float32 [3, 4] in {run_dir}, float32 [7, 4] in the model" in said
    assert "has the job file changed" in said


@pytest.mark.parametrize(
    ("job", "texts"),
    [
        (
            "if int(x[0, 0] * 100) % 2: x = x + 1",
            ["cannot trace the model", "int(x[0, 0]", "the weights can be"],
        ),
        ("self.calls = getattr(self, 'calls', 0) + 1; x = x + self.calls", ["other outputs than the model"]),
        (
            "raise ValueError('no such thing')",
            ["failed on a batch of its data: ValueError: no such", "Traceback"],
        ),
    ],
    ids=["data-dependent", "changes-itself", "raises"],
)
def test_models_that_cannot_be_exported(tmp_path: Path, job: str, texts: list[str]) -> None:
    text = (
        f"class Odd(Net):\n    def forward(self, x):\n        {job}\n        return super().forward(x)\n"
        "job = make(Odd, (X, torch.zeros(9)))"
    )
    said = refusal(a_run(tmp_path, text))
    for wanted in texts:
        assert wanted in said


def test_a_data_set_that_fails(tmp_path: Path) -> None:
    job = "class Bad(Dataset):\n    def __len__(self): return 9\n    def __getitem__(self, i): return X[i + 7], 0\n"
    said = refusal(a_run(tmp_path, job + "job = make(Net, Bad())"))
    assert "reading sample 2 failed: IndexError" in said


def test_weights_alone_need_the_run_of_their_model(tmp_path: Path) -> None:
    run_dir = a_run(tmp_path, PLAIN)
    alone = read_source(run_dir / "weights.safetensors")
    with pytest.raises(DistBeliefError, match="does not say which model"):
        export(alone, run_dir / "net.pt2", "program")
    assert export(alone, run_dir / "net.pt2", "program", model_of=run_dir).max_difference == 0.0


def test_without_the_extra_for_onnx(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxscript", None)  # how Python itself marks what cannot be imported
    assert "pip install 'distbelief[onnx]'" in refusal(a_run(tmp_path, PLAIN), "net.onnx")


@needs_onnx
def test_without_onnxruntime_the_check_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    done = write(a_run(tmp_path, PLAIN), "net.onnx")
    assert done.max_difference is None
    assert "not run: onnxruntime is not installed" in done.checked


@needs_onnx
def test_a_type_that_onnxruntime_lacks_is_no_failure(tmp_path: Path) -> None:
    done = write(a_run(tmp_path, "job = make(lambda: nn.Linear(4, 2).bfloat16(), (X.bfloat16(), Y))"), "net.onnx")
    assert done.max_difference is None
    assert "accepted by onnx.checker; not run: " in done.checked


def test_what_counts_as_the_same_output() -> None:
    nan, inf = float("nan"), float("inf")
    assert largest_difference([torch.tensor([nan, inf, -inf, 1.0])], [torch.tensor([nan, inf, -inf, 1.0])]) == 0
    assert largest_difference([torch.tensor([1e6])], [torch.tensor([1e6 + 10])]) == 10
    for one, other in [([0.0], [0.1]), ([nan], [1.0]), ([inf], [-inf]), ([1.0], [nan]), ([1.0], [inf])]:
        with pytest.raises(DistBeliefError, match="differ by up to"):
            largest_difference([torch.tensor(one)], [torch.tensor(other)])
    with pytest.raises(DistBeliefError, match="differ by up to 1"):
        largest_difference([torch.tensor([5])], [torch.tensor([6])])
    for found in ([], [torch.zeros(2, 1)], [torch.zeros(2, dtype=torch.float64)], [torch.zeros(2), torch.zeros(2)]):
        with pytest.raises(DistBeliefError, match=r"in place of float32 \[2\]"):
            largest_difference([torch.zeros(2)], found)
