"""The purity check is silent about programs that are pure."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from distbelief.strategies.tables.embedding import EmbeddingTable
from distbelief.worker.jobfile import load_job
from tests.support.clothes import write_clothes
from tests.support.purity import X, Y, check, job_of

ROOT = Path(__file__).resolve().parents[4]


class Mixed(nn.Module):
    """BatchNorm, dropout, both spectral norms, both weight norms."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.utils.spectral_norm(nn.Linear(6, 16))
        self.norm = nn.BatchNorm1d(16)
        self.middle = parametrizations.spectral_norm(nn.Linear(16, 16))
        self.dropout = nn.Dropout(0.3)
        self.old = nn.utils.weight_norm(nn.Linear(16, 16))  # deprecated, and still in use
        self.leave = parametrizations.weight_norm(nn.Linear(16, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.dropout(self.norm(self.enter(x)))
        return self.leave(torch.tanh(self.old(torch.tanh(self.middle(hidden)))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 8, num_layers=2, dropout=0.1, batch_first=True, bidirectional=True)
        self.leave = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(self.lstm(x.view(len(x), 2, 3))[0][:, -1])


class Teacher(nn.Module):
    """The ways out that the check names: the teacher and the counter are buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(6, 2)
        self.register_buffer("teacher", self.student.weight.detach().clone())
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.teacher.lerp_(self.student.weight.detach(), 0.1)
        out = self.student(x)
        return out + (F.linear(x, self.teacher) - out).pow(2).mean() / self.calls


class Harmless(nn.Module):
    """Keeps things that no result depends on, or that are always the same."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 2)
        self.calls = 0
        self.seen: list[float] = []
        self.positions: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.positions is None:
            self.positions = torch.arange(6.0) / 6
            self.register_buffer("table", torch.ones(6), persistent=False)
        out = self.enter(x * self.table + self.positions)
        self.seen.append(float(out.detach().mean()))
        self.last = out
        return out


class Counting(nn.Module):
    """Counts, and does nothing with the counts but to say something, or to build again what it has."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 2)
        self.calls, self.samples, self.at = 0, 0, 0
        self.ring = [0.0] * 4
        self.table = torch.zeros(0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.calls % 5 == 0:
            self.table = torch.arange(6.0)
        self.calls += 1
        self.samples += len(x)
        self.rows, self.columns = x.shape
        out = self.enter(x[: self.rows] * self.table[: self.columns])
        self.ring[self.at] = float(out.detach().mean())  # at a billion an error
        self.at = (self.at + 1) % 4
        return out / (self.samples / self.samples)


class InPlace(nn.Module):
    """Writes into its input, and recomputes a part in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.mul_(2.0)
        return checkpoint(self.enter, x, use_reentrant=False)


class Tabled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = EmbeddingTable(100, 6)
        self.leave = nn.Linear(6, 2)

    def forward(self, kind: torch.Tensor) -> torch.Tensor:
        return self.leave(self.table(kind))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(0.2), nn.Linear(16, 2))


def compilable() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Dropout(0.2), nn.Linear(16, 2))


PURE = {
    "norms": lambda: job_of(Mixed),
    "norms in bf16": lambda: job_of(Mixed, precision="bf16"),
    "one shard": lambda: job_of(Mixed, shards=1, global_batch=64),
    "more samples in a batch than there are": lambda: job_of(Mixed, global_batch=100),
    "an LSTM": lambda: job_of(Recurrent),
    "state in buffers": lambda: job_of(Teacher),
    "harmless state": lambda: job_of(Harmless),
    "counters": lambda: job_of(Counting),
    "writes into its input": lambda: job_of(InPlace),
    "compiled": lambda: job_of(compilable, compile=True),
    "oneDNN": lambda: job_of(lambda: nn.Sequential(nn.Linear(6, 512), nn.Linear(512, 2)), matmul="onednn"),
    "a table": lambda: job_of(Tabled, data=(torch.arange(64), Y)),
    "a loss that is a module": lambda: job_of(plain, loss=nn.CrossEntropyLoss(label_smoothing=0.1)),
    "no loss but infinity": lambda: job_of(plain, loss=lambda output, target: (output * torch.inf).sum()),
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("name", PURE)
def test_nothing_is_found(name: str) -> None:
    assert check(PURE[name]()) == []


@pytest.mark.parametrize("strategy", ["local_sgd:4", "ps:sync", "allreduce:gloo"])
def test_nothing_is_found_in_other_exact_strategies(strategy: str) -> None:
    assert check(job_of(plain), strategy) == []


def test_nothing_is_found_in_a_table_on_servers() -> None:
    assert check(job_of(Tabled, data=(torch.arange(64), Y)), "ps:sync") == []


def test_nothing_is_found_in_a_search() -> None:
    assert check(job_of(lambda: nn.Linear(6, 2)), "sandblaster") == []


EXAMPLES: dict[str, dict[str, str]] = {
    "examples/digits.py": {},
    "examples/fashion.py": {"folder": "."},
    "examples/gpt.py": {"megabytes": "0.1", "layers": "2", "context": "32"},
    "examples/recommend.py": {"batch": "64", "samples": "6400"},
    "tests/e2e/jobs/everything.py": {},
    "tests/e2e/jobs/transformer.py": {},
}


@pytest.mark.parametrize("file", EXAMPLES)
def test_nothing_is_found_in_the_examples(file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_clothes(tmp_path))
    assert check(load_job(ROOT / file, EXAMPLES[file])) == []


class Language(nn.Module):
    """A model of Transformers, whose loss is computed outside."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=tokens).logits


def gpt2() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 50, "n_positions": 16}
    return Language(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)))


def bert() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64}
    config = transformers.BertConfig(vocab_size=50, max_position_embeddings=16, **sizes)
    return Language(transformers.BertForMaskedLM(config))


@pytest.mark.parametrize("model", [gpt2, bert])
def test_nothing_is_found_in_models_of_transformers(model: Callable[[], nn.Module]) -> None:
    pytest.importorskip("transformers")
    tokens = torch.randint(50, (64, 16), generator=torch.Generator().manual_seed(1))

    def loss(output: torch.Tensor, target: Any) -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten())

    assert check(job_of(model, data=(tokens, tokens), loss=loss, shuffle=False)) == []


def test_the_check_would_find_something_in_these_data() -> None:
    """The data above are not so that an impure model goes unnoticed."""

    class Counting(nn.Linear):
        calls = 0

        def forward(self, input: torch.Tensor) -> torch.Tensor:  # noqa: A002 - as torch names it
            self.calls += 1
            return super().forward(input) / self.calls

    assert len(check(job_of(lambda: Counting(6, 2), data=(X, Y)))) == 1
