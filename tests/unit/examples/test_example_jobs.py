"""The example job files: they load, and plain torch can train a few steps of what they declare."""

from __future__ import annotations

import importlib.util
import math
import pathlib
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch

from distbelief.data.sources import InMemory, as_source, split_batch
from distbelief.errors import JobError
from distbelief.job import Job
from tests.support.clothes import write_clothes

EXAMPLES = pathlib.Path(__file__).parents[3] / "examples"


def load(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def few_steps(job: Job, steps: int = 3) -> list[float]:
    """Train on the first samples again and again; the losses."""
    torch.manual_seed(job.seed)
    assert not isinstance(job.model, torch.nn.Module)
    model = job.model()
    optimizer = job.optimizer(list(model.parameters()))
    assert job.schedule is not None
    rates = [job.schedule(step) for step in range(steps)]
    assert all(0 < rate <= 1 for rate in rates)
    source = as_source(job.data)
    assert isinstance(source, InMemory), "the examples need no reader processes"
    args, kwargs, target = split_batch(source.fetch(np.arange(job.global_batch) % len(source)))
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss: Any = job.loss(model(*args, **kwargs), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.eval()
    held_out = as_source(job.validation)
    args, kwargs, target = split_batch(held_out.fetch(np.arange(min(8, len(held_out)))))
    with torch.no_grad():
        output = model(*args, **kwargs)
    for metric in job.metrics.values():
        total, weight = metric(output, target)
        assert float(weight) > 0
        assert np.isfinite(float(total))
    return losses


def test_digits() -> None:
    pytest.importorskip("sklearn")
    job = load("digits").job(width=4, dropout=0.0, batch=32)
    assert len(as_source(job.data)) + len(as_source(job.validation)) == 1797
    assert len(as_source(job.validation)) == 359
    losses = few_steps(job, steps=8)
    assert losses[-1] < losses[0]
    again = load("digits").job(seed=9)
    assert torch.equal(again.validation[0], job.validation[0]), "the split does not depend on the job's seed"
    assert again.steps is None
    assert math.ceil(again.epochs * 23 / again.evaluate_every) in (8, 9, 10), "enough evaluations to watch"


def test_digits_without_scikit_learn_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    module = load("digits")
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)  # what Python itself puts there for "cannot be imported"
    with pytest.raises(JobError) as caught:
        module.job()
    assert "pip install 'distbelief[examples]'" in caught.value.hint


@pytest.fixture
def clothes(tmp_path: pathlib.Path) -> pathlib.Path:
    return write_clothes(tmp_path)


def test_fashion(clothes: pathlib.Path) -> None:
    module = load("fashion")
    job = module.job(folder=str(clothes), width=2, batch=16)
    assert len(as_source(job.data)) == 40
    assert job.steps == 9
    assert len(few_steps(job)) == 3
    assert len(as_source(module.job(folder=str(clothes), limit=20).data)) == 20
    with pytest.raises(JobError, match="limit"):
        module.job(folder=str(clothes), limit=-1)


def test_fashion_without_its_files_says_how_to_get_them(tmp_path: pathlib.Path) -> None:
    with pytest.raises(JobError, match="there is no folder") as caught:
        load("fashion").job(folder=str(tmp_path / "nowhere"))
    assert "apt-get install dataset-fashion-mnist" in caught.value.hint
    assert "--set folder=PATH" in caught.value.hint
    with pytest.raises(JobError, match=r"there is no file .*train-images-idx3-ubyte"):
        load("fashion").job(folder=str(tmp_path))


def test_gpt() -> None:
    job = load("gpt").job(layers=1, width=16, heads=2, context=16, megabytes=0.05, dropout=0.0, batch=4, lr=0.05)
    x, y = job.data
    assert torch.equal(x[:, 1:], y[:, :-1]), "the target is the text one byte later"
    assert x.dtype == torch.uint8
    losses = few_steps(job, steps=8)
    assert losses[-1] < losses[0] - 0.5
    assert not isinstance(job.model, torch.nn.Module)
    names = [name for name, _ in job.model().named_parameters()]
    assert "symbols.weight" in names
    assert "head.weight" not in names, "the output's weights are the embedding's"


def test_gpt_measures_bits_per_byte() -> None:
    total, weight = load("gpt").bits_per_byte(torch.zeros(2, 5, 256), torch.zeros(2, 5, dtype=torch.uint8))
    assert float(total) / weight == pytest.approx(8.0)


def test_gpt_reads_any_folder_in_a_fixed_order(tmp_path: pathlib.Path) -> None:
    module = load("gpt")
    (tmp_path / "b.txt").write_text("world" * 100)
    (tmp_path / "a.txt").write_text("hello" * 100)
    (tmp_path / "c.py").write_text("no")
    (tmp_path / "folder.txt").mkdir()
    text = module.read_text(tmp_path, "*.txt", 10**6)
    assert bytes(text.tolist()) == b"hello" * 100 + b"world" * 100
    assert len(module.read_text(tmp_path, "*.txt", 700)) == 700
    with pytest.raises(JobError, match="no text"):
        module.job(folder=str(tmp_path), pattern="*.md")
    with pytest.raises(JobError, match="too few"):
        module.job(folder=str(tmp_path), pattern="*.txt", context=5000)
