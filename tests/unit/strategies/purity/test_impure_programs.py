"""The purity check names what makes a program impure, and says nothing about pure ones. Each program is checked as a
worker checks its job: real readers, a real shard computer."""

from __future__ import annotations

import copy
import functools
import os
import random
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import Dataset, Subset

from tests.support.purity import X, Y, check, job_of


class Net(nn.Module):
    """A model of which each program changes something."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 16)
        self.leave = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(torch.tanh(self.enter(x)))


# --- hidden state in Python ------------------------------------------------------------------------------------------


class Annealed(Net):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * min(1.0, self.calls / 100)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Annealed()
        self.seen = 0  # changes too, and nothing depends on it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return self.encoder(x)


class Noisy(Net):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.draws: Any = {
            "torch": torch.Generator().manual_seed(3),
            "numpy": np.random.default_rng(3),
            "legacy": np.random.RandomState(3),
            "python": random.Random(3),
        }[kind]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "torch":
            noise = torch.rand(x.shape, generator=self.draws)
        elif self.kind == "python":
            noise = torch.full_like(x, self.draws.random())
        else:
            noise = torch.from_numpy(np.asarray(self.draws.normal(size=x.shape), dtype=np.float32))
        return super().forward(x + noise)


class Alternating(Net):
    """Every second call does something else, so A, B, A alone would show no difference."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.turn[0] += 1
        return super().forward(x) if self.turn[0] % 2 else self.leave(F.relu(self.enter(x)))


class Recurrent(Net):
    """Truncated backpropagation through time: the state of the last batch goes on."""

    def __init__(self) -> None:
        super().__init__()
        self.state: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.enter(x))
        if self.state is not None:
            hidden = hidden + 0.1 * self.state
        self.state = hidden.detach()
        return self.leave(hidden)


class LateBuffer(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "mean" not in self._buffers:
            self.register_buffer("mean", torch.zeros(16))
        hidden = torch.tanh(self.enter(x))
        self.mean = 0.9 * self.mean + 0.1 * hidden.detach().mean(0)
        return self.leave(hidden - self.mean)


class HiddenTeacher(Net):
    """A list hides the teacher from the model's parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = [nn.Linear(6, 2, bias=False)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        with torch.no_grad():
            self.teacher[0].weight.add_(self.enter.weight[:2], alpha=0.1)
            wanted = self.teacher[0](x)
        return out + 0.1 * (wanted - out).pow(2)


class History:
    def __init__(self) -> None:
        self.mean = 0.0


class RunningLoss:
    """Divides by a running mean of itself."""

    def __init__(self) -> None:
        self.history = History()

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(output, target)
        self.history.mean = 0.9 * self.history.mean + 0.1 * loss.item()
        return loss / self.history.mean


class CenterLoss(nn.Module):
    """A loss with a buffer, which is no buffer of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(2))

    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        self.center.mul_(0.9).add_(output.detach().mean(0), alpha=0.1)
        return F.cross_entropy(output - self.center, target)


def closure_loss() -> Callable[[Any, Any], torch.Tensor]:
    smoothed = 1.0

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal smoothed
        value = F.cross_entropy(output, target)
        smoothed = 0.9 * smoothed + 0.1 * value.item()
        return value / smoothed

    return loss


TEMPERATURE = {"now": 1.0}


def global_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    TEMPERATURE["now"] *= 0.99
    return F.cross_entropy(output / TEMPERATURE["now"], target)


def noisy_hook() -> nn.Module:
    """A hook keeps the number of its calls in its closure."""
    model = Net()
    number = 0

    def scale(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        nonlocal number
        number += 1
        return output * (1 + 1 / number)

    model.enter.register_forward_hook(scale)
    return model


def sometimes_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target) * (1 + int.from_bytes(os.urandom(2)) / 65536)


HIDDEN = {
    "a counter": (job_of(Annealed), "`calls` (a Python attribute of Annealed)", "keep `calls` as a buffer"),
    "a counter of a part": (
        job_of(Nested),
        "`encoder.calls` (a Python attribute of Annealed)",
        "a counter then counts",
    ),
    "torch's generator": (
        job_of(lambda: Noisy("torch")),
        "`draws` (a Python attribute of Noisy) draws",
        "draw without",
    ),
    "numpy's generator": (
        job_of(lambda: Noisy("numpy")),
        "`draws` (a Python attribute of Noisy) draws",
        "draw without",
    ),
    "numpy's old one": (job_of(lambda: Noisy("legacy")), "`draws` (a Python attribute of Noisy) draws", "draw without"),
    "Python's generator": (
        job_of(lambda: Noisy("python")),
        "`draws` (a Python attribute of Noisy) draws",
        "draw without",
    ),
    "a period of two": (job_of(Alternating), "`turn` (a Python attribute of Alternating)", "keep `turn` as a buffer"),
    "a carried state": (
        job_of(Recurrent),
        "`state` (a Python attribute of Recurrent)",
        "must begin anew in each batch",
    ),
    "a late buffer": (
        job_of(LateBuffer),
        "`mean` (a buffer of LateBuffer)",
        "register `mean` in the module's __init__",
    ),
    "a hidden teacher": (
        job_of(HiddenTeacher),
        "`teacher[0].weight` (a buffer or parameter of Linear, which is no part of the model)",
        "make `teacher[0].weight` a buffer of the model",
    ),
    "a loss with a mean": (
        job_of(Net, loss=RunningLoss()),
        "`loss.history.mean` (an attribute of History)",
        "function of output and target",
    ),
    "a loss with a buffer": (
        job_of(Net, loss=CenterLoss()),
        "`loss.center` (a buffer or parameter of CenterLoss",
        "a buffer of the model",
    ),
    "a loss with a closure": (
        job_of(Net, loss=closure_loss()),
        "`smoothed` (a variable around the function loss)",
        "a buffer of the model",
    ),
    "a loss with a global": (
        job_of(Net, loss=global_loss),
        "`TEMPERATURE` (a global variable of test_impure_programs.py)",
        "buffer of the model",
    ),
    "a hook": (job_of(noisy_hook), "`number` (a variable around the function scale)", "keep `number` as a buffer"),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_hidden_state_is_named_with_the_way_out(name: str) -> None:
    job, what, way_out = HIDDEN[name]
    found = check(job)
    assert len(found) == 1, found
    assert found[0].what.startswith(what)
    assert way_out in found[0].way_out


class Target(Net):
    """A network that is copied every 100 calls, as for Q-learning."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.leave).requires_grad_(False)
        self.place = place
        self.calls, self.several, self.named = 0, [7, 0], {"size": 6, "calls": 0}
        self.seen: list[int] = []

    def count(self) -> int:
        self.calls += self.place == "attribute"
        self.several[1] += self.place == "list"
        self.named["calls"] += self.place == "mapping"
        self.seen.append(len(self.seen))  # changes too, and nothing depends on it
        return self.calls + self.several[1] + self.named["calls"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.count() % 100 == 0:
            self.target.load_state_dict(self.leave.state_dict())
        hidden = torch.tanh(self.enter(x))
        return self.leave(hidden) - self.target(hidden)


class Freezing(Net):
    calls = 0
    samples = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.samples += len(x)
        hidden = torch.tanh(self.enter(x))
        return self.leave(hidden.detach() if self.calls > 1000 else hidden)


class EveryHundred:
    """A loss that changes at call 99, 199, …: it looks before it counts."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        scale = 0.5 if self.calls % 100 == 99 else 1.0
        self.calls += 1
        return F.cross_entropy(output, target) * scale


PLACES = {"attribute": "calls", "list": "several", "mapping": "named"}


@pytest.mark.parametrize("place", PLACES)
def test_a_counter_that_writes_parameters_later_is_named_with_them(place: str) -> None:
    parameters, counter = check(job_of(lambda: Target(place)))
    assert parameters.what == "`target.weight` and `target.bias` are written in forward"
    assert counter.what.startswith(f"`{PLACES[place]}` (a Python attribute of Target) changes while")


@pytest.mark.parametrize(
    ("job", "what"),
    [
        (job_of(Freezing), "`calls` (a Python attribute of Freezing) changes while a shard is computed, "),
        (job_of(Net, loss=EveryHundred()), "`loss.calls` (an attribute of EveryHundred) changes in the loss, "),
    ],
)
def test_a_counter_that_acts_later_is_named(job: Any, what: str) -> None:
    (found,) = check(job)
    assert found.what.startswith(what)


def test_a_counter_has_its_old_value_after_the_check() -> None:
    model = Freezing()
    check(job_of(lambda: model))
    calls = model.calls
    assert 0 < calls < 100
    assert model.samples == 4 * (calls - 1) + 4  # the other shard has four samples too


class Mode(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.leave(self.norm(torch.tanh(self.enter(x))))
        self.norm.eval()
        return out


def backward_hook(kind: str) -> nn.Module:
    model = Net()
    number = 0

    def scaled(gradient: torch.Tensor) -> torch.Tensor:
        nonlocal number
        number += 1
        return gradient / number

    if kind == "module":
        model.leave.register_full_backward_hook(lambda module, grads, outputs: (scaled(grads[0]),))
    elif kind == "before module":
        model.leave.register_full_backward_pre_hook(lambda module, outputs: (scaled(outputs[0]),))
    else:
        model.enter.weight.register_hook(scaled)
    return model


@pytest.mark.parametrize("kind", ["module", "before module", "parameter"])
def test_state_of_a_backward_hook_is_named(kind: str) -> None:
    (found,) = check(job_of(lambda: backward_hook(kind)))
    assert found.what.startswith("`number` (a variable around the function scaled) changes while a shard is computed")


def test_a_mode_that_changes_in_forward_is_named() -> None:
    (found,) = check(job_of(Mode))
    assert found.what.startswith("`norm.training` (a Python attribute of BatchNorm1d) changes")
    assert "override `train`" in found.way_out


class Queue(Net):
    """Subtracts the mean of the last means."""

    def __init__(self) -> None:
        super().__init__()
        self.means: deque[torch.Tensor] = deque(maxlen=3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        self.means.append(out.detach().mean())
        return out * sum(self.means) / len(self.means)


def test_a_container_of_tensors_gets_the_advice_of_a_tensor() -> None:
    (found,) = check(job_of(Queue))
    assert found.what.startswith("`means` (a Python attribute of Queue)")
    assert "a statistic" in found.way_out


class TiedLate(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.other.weight = self.leave.weight
        return super().forward(x) + self.other(torch.tanh(self.enter(x)))


def test_a_parameter_that_disappears_is_named() -> None:
    (found,) = check(job_of(TiedLate))
    assert found.what == "`other.weight` is removed or replaced by another parameter in forward"
    assert "tie weights in the module's __init__" in found.way_out


def test_of_a_buffer_that_cannot_be_pinned_down_the_name_is_said() -> None:
    class Timed(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("token", torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.token.fill_(int.from_bytes(os.urandom(2)))
            return super().forward(x)

    (found,) = check(job_of(Timed))
    assert found.what == "the same shard, computed again, gave another value of the buffer `token`"


def test_what_cannot_be_pinned_down_is_said_honestly() -> None:
    (found,) = check(job_of(Net, loss=sometimes_loss))
    assert found.what == "the same shard, computed again, gave another gradient of `enter.weight` and 3 more"
    assert "os.urandom" in found.way_out


# --- parameters ------------------------------------------------------------------------------------------------------


class Teacher(Net):
    """A mean teacher; at first it equals the student."""

    def __init__(self, move: Callable[[nn.Parameter, nn.Parameter], None], trainable: bool = False) -> None:
        super().__init__()
        self.teacher = nn.Sequential(nn.Linear(6, 16))
        self.teacher[0].load_state_dict(self.enter.state_dict())
        self.teacher.requires_grad_(trainable)
        self.move = move

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for theirs, mine in zip(self.teacher.parameters(), self.enter.parameters(), strict=True):
            self.move(theirs, mine)
        with torch.no_grad():
            wanted = self.teacher(x)
        return super().forward(x) + 0.1 * (wanted - self.enter(x)).pow(2).mean()


def in_place(theirs: nn.Parameter, mine: nn.Parameter) -> None:
    with torch.no_grad():
        theirs.lerp_(mine, 0.004)


def through_data(theirs: nn.Parameter, mine: nn.Parameter) -> None:
    """Leaves no version, and no other bytes as long as both are equal."""
    theirs.data.lerp_(mine.data, 0.004)


def by_assignment(theirs: nn.Parameter, mine: nn.Parameter) -> None:
    theirs.data = theirs.data * 0.996 + mine.data * 0.004


class Averaging(Net):
    """torch's AveragedModel: its count is a buffer, so while nothing is committed it copies equal values."""

    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(self.enter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average.update_parameters(self.enter)
        return super().forward(x)


class Clamped(Net):
    def __init__(self, limit: float, data: bool) -> None:
        super().__init__()
        self.limit, self.data = limit, data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            (self.enter.weight.data if self.data else self.enter.weight).clamp_(-self.limit, self.limit)
        return super().forward(x)


class Words(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6, **options)
        self.leave = nn.Linear(6, 2)

    def forward(self, kind: torch.Tensor) -> torch.Tensor:
        return self.leave(self.embedding(kind))


class Grown(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(2))
        return super().forward(x) * self.scale


WORDS = (torch.arange(64) % 10, Y)
WRITTEN = {
    "a teacher": (
        job_of(lambda: Teacher(in_place)),
        "`teacher.0.weight` and `teacher.0.bias` are",
        "make them buffers",
    ),
    "through .data": (job_of(lambda: Teacher(through_data)), "`teacher.0.weight` and `teacher.0.bias` are", "buffers"),
    "assigned": (job_of(lambda: Teacher(by_assignment)), "`teacher.0.weight` and `teacher.0.bias` are", "buffers"),
    "not frozen": (job_of(lambda: Teacher(in_place, True)), "`teacher.0.weight` and `teacher.0.bias` are", "buffers"),
    "AveragedModel": (job_of(Averaging), "`average.module.weight` and `average.module.bias` are", "make them buffers"),
    "a clamp": (job_of(lambda: Clamped(0.1, False)), "`enter.weight` is written in forward", "`Job.after_update`"),
    "a clamp of .data": (
        job_of(lambda: Clamped(0.1, True)),
        "`enter.weight` is written in forward",
        "`Job.after_update`",
    ),
    "a clamp that does nothing yet": (job_of(lambda: Clamped(9.0, False)), "`enter.weight` is written", "after_update"),
    "max_norm": (
        job_of(lambda: Words(max_norm=1.0), data=WORDS),
        "`embedding.weight` is written in forward: its layer has max_norm=1,",
        "leave max_norm out, and limit the rows in `Job.after_update`",
    ),
    "max_norm that is not reached yet": (
        job_of(lambda: Words(max_norm=99.0), data=WORDS),
        "`embedding.weight` is",
        "max",
    ),
    "a parameter made in forward": (
        job_of(Grown),
        "`scale` is made in forward, and would never be trained",
        "__init__",
    ),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_parameter_that_is_written_in_forward_is_named_with_the_way_out(name: str) -> None:
    job, what, way_out = WRITTEN[name]
    found = check(job)
    assert len(found) == 1, found
    assert found[0].what.startswith(what)
    assert way_out in found[0].way_out


@pytest.mark.parametrize("strategy", ["local_sgd:4", "ps:sync", "sandblaster"])
def test_every_exact_strategy_checks(strategy: str) -> None:
    (found,) = check(job_of(lambda: Teacher(in_place)), strategy)
    assert found.what == "`teacher.0.weight` and `teacher.0.bias` are written in forward"


@pytest.mark.parametrize("strategy", ["allreduce:inexact", "ps:async", "pipeline:2"])
def test_strategies_that_promise_no_bits_do_not_check(strategy: str) -> None:
    assert check(job_of(Nested), strategy) == []


# --- samples ---------------------------------------------------------------------------------------------------------


class Samples(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return X[index], Y[index]


class Noise(Samples):
    def __init__(self) -> None:
        self.rng = np.random.default_rng(0)

    def __getitem__(self, index: int) -> Any:
        return X[index] + float(self.rng.normal()), Y[index]


class OneOdd(Samples):
    """Only one sample is not a function of its number; it counts how often it was read."""

    reads = 0

    def __getitem__(self, index: int) -> Any:
        self.reads += index == 17
        return X[index] + self.reads * (index == 17), Y[index]


class Neighbours(Samples):
    """Mixes each sample with another one that was read before it."""

    def __init__(self) -> None:
        self.last, self.before = -1, torch.zeros(6)

    def __getitem__(self, index: int) -> Any:
        if self.last != index:
            self.before = X[self.last] if self.last >= 0 else self.before
            self.last = index
        return X[index] + self.before, Y[index]


DROPPING = random.Random(1)


def dropping(samples: list[Any]) -> Any:
    batch = torch.utils.data.default_collate(samples)
    return batch[0] * (0.5 + DROPPING.random()), batch[1]


@pytest.mark.parametrize("readers", [1, 3])
def test_a_sample_that_differs_is_named(readers: int) -> None:
    (found,) = check(job_of(Net, data=Noise(), shuffle=False, readers=readers))
    assert found.what == "`Noise.__getitem__(0)` gave two different samples"
    assert "seeded for each sample" in found.way_out


def test_the_one_sample_that_differs_is_found() -> None:
    (found,) = check(job_of(Net, data=OneOdd(), shuffle=False, global_batch=64, shards=1))
    assert found.what == "`OneOdd.__getitem__(17)` gave two different samples"


def test_a_sample_of_a_subset_has_the_number_that_its_data_set_knows() -> None:
    (found,) = check(job_of(Net, data=Subset(OneOdd(), range(10, 30)), shuffle=False, shards=1))
    assert found.what == "`OneOdd.__getitem__(17)` gave two different samples"


def test_samples_that_differ_only_in_a_batch_are_named_together() -> None:
    (found,) = check(job_of(Net, data=Neighbours(), shuffle=False))
    assert found.what == "`Neighbours` gave two different batches of samples 0, 1, 2, 3"
    assert "must not depend on the samples that were read before it" in found.way_out


def test_a_collate_with_a_generator_of_its_own_is_named() -> None:
    (found,) = check(job_of(Net, data=Samples(), collate=dropping, shuffle=False))
    assert found.what == "`collate` made two different batches of samples 0, 1, 2, 3"
    assert "a function of the samples" in found.way_out


class Memo(Samples):
    """Keeps each sample when it is read first: what is random, or what comes before."""

    def __init__(self, at_random: bool) -> None:
        self.at_random = at_random
        self.cache: dict[int, torch.Tensor] = {}

    def __getitem__(self, index: int) -> Any:
        if index not in self.cache:
            self.cache[index] = X[index] + torch.randn(6) if self.at_random else X[index].exp()
        if self.at_random:
            return self.cache[index], Y[index]
        return self.cache[index] + torch.randn(6), Y[index]


@functools.lru_cache(maxsize=1000)
def kept_batch(samples: tuple[Any, ...]) -> torch.Tensor:
    return torch.rand(len(samples), 6)


@pytest.mark.parametrize("readers", [1, 3])
def test_a_random_result_that_is_kept_for_the_next_epoch_is_named(readers: int) -> None:
    (found,) = check(job_of(Net, data=Memo(at_random=True), shuffle=False, readers=readers))
    assert found.what == "`Memo.__getitem__(0)` keeps a random result from one epoch to the next"
    assert "cache what comes before the random part" in found.way_out
    assert check(job_of(Net, data=Memo(at_random=False), shuffle=False, readers=readers)) == []


def test_a_collate_that_keeps_a_random_result_is_named() -> None:
    def collate(samples: list[Any]) -> Any:
        y = torch.stack([one[1] for one in samples])
        return kept_batch(tuple(float(one[0].sum()) for one in samples)), y

    (found,) = check(job_of(Net, data=Samples(), collate=collate, shuffle=False))
    assert found.what == "`Samples`, or its collate function, keeps a random result from one epoch to the next"


def test_impure_samples_and_an_impure_model_are_both_named() -> None:
    one, other = check(job_of(Nested, data=Noise(), shuffle=False))
    assert one.what.startswith("`Noise.__getitem__(0)`")
    assert other.what.startswith("`encoder.calls`")
