"""A member of a tensor-parallel group, and models for it. Runs in processes of the stage.

Each member makes the same model whole, as one process would have it, and divided, from the same values; both compute
the loss and the gradients of the same batch from the same seed. What it returns is how far apart they are.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from distbelief.strategies.mesh.tensor import apply as tensorapply
from distbelief.strategies.mesh.tensor import plan as tensorplan
from distbelief.transport.shm.segment import SegmentClient

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "gpt.py"


class Gated(nn.Module):
    """Grouped queries, explicit attention with dropout on its weights, and a gated linear unit with dropout inside."""

    def __init__(self, width: int = 32, queries: int = 8, pairs: int = 4) -> None:
        super().__init__()
        self.part, self.repeats = width // queries, queries // pairs
        self.first = nn.Linear(11, width)
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v, self.o = (
            nn.Linear(a, b, bias=False)
            for a, b in ((width, width), (width, pairs * self.part), (width, pairs * self.part), (width, width))
        )
        self.gate, self.up, self.down = nn.Linear(width, 48), nn.Linear(width, 48), nn.Linear(48, width)
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(width, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        x = self.first(x)
        h = self.norm(x)
        q, k, v = (p(h).view(batch, length, -1, self.part).transpose(1, 2) for p in (self.q, self.k, self.v))
        k, v = k.repeat_interleave(self.repeats, 1), v.repeat_interleave(self.repeats, 1)
        scores = (q @ k.transpose(-2, -1)) / self.part**0.5
        scores = scores.masked_fill(torch.ones(length, length, device=x.device).tril() == 0, float("-inf"))
        mixed = self.drop(scores.softmax(-1)) @ v
        x = x + self.drop(self.o(self.drop(mixed.transpose(1, 2)).reshape(batch, length, -1)))
        h = self.norm(x)
        return self.head(x + self.down(self.drop(F.silu(self.gate(h)) * self.up(h))))


def small_gpt(dropout: float) -> nn.Module:
    model: nn.Module = runpy.run_path(str(EXAMPLE))["GPT"](2, 32, 4, 12, dropout)
    return model


class Encoder(nn.Module):
    """torch's own encoder, which in evaluation would compute each layer in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(11, 16)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, dropout=0.2), 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layers(self.first(x))
        return output


def mlp() -> nn.Module:
    layers = nn.Linear(11, 64), nn.ReLU(), nn.Dropout(0.3), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 7)
    return nn.Sequential(*layers)


def words() -> nn.Module:
    """A vocabulary that does not divide evenly."""
    return nn.Sequential(
        nn.Embedding(13, 8), nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.LayerNorm(8), nn.Linear(8, 13)
    )


def symbols() -> torch.Tensor:
    return torch.randint(0, 13, (3, 12), generator=torch.Generator().manual_seed(5))


def numbers() -> torch.Tensor:
    return torch.randn(3, 12, 11, generator=torch.Generator().manual_seed(5))


def few() -> nn.Module:
    """So few outputs that a member of 2 x 2 gets none."""
    return nn.Sequential(nn.Linear(11, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], dict[str, str]]] = {
    "gpt": (lambda: small_gpt(0.0), symbols, {}),
    "gpt with dropout": (lambda: small_gpt(0.2), symbols, {}),
    "mlp": (mlp, numbers, {}),
    "gated": (Gated, numbers, {}),
    "encoder": (Encoder, numbers, {}),
    "few": (few, numbers, {}),
    "words": (words, symbols, {}),
    "wishes": (mlp, numbers, {"0": "row", "3": "column", "5": "row"}),
    "wished words": (words, symbols, {"0": "column", "1": "whole", "5": "whole"}),
}


@dataclass(frozen=True)
class Difference:
    styles: dict[str, str]
    output: float
    evaluation: float
    gradients: dict[str, float]
    generator_equal: bool
    boxes_right: bool
    tied: bool
    divided: float
    """Which share of the parameters this member holds."""


def compare(
    segments: SegmentClient, rank: int, port: int, case: str, tensor: int, fsdp: int = 1, how: str = ""
) -> Difference:
    if how == "broken":
        tensorapply._RULES.clear()
        tensorapply.DropoutMasks.end = lambda *args, **kwargs: None  # type: ignore[method-assign]
    store = dist.TCPStore("127.0.0.1", port, tensor * fsdp, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=tensor * fsdp)
    mesh = init_device_mesh("cpu", (fsdp, tensor), mesh_dim_names=("sharded", "tensor"))
    make, batch, wishes = CASES[case]
    torch.manual_seed(3)
    whole = make()
    with torch.device("meta"):
        model = make()
    plan = tensorplan.plan(model, tensor, (batch()[:2],), overrides=wishes)
    masks = tensorapply.apply_plan(model, plan, mesh["tensor"])
    assert all(p.is_meta for p in model.parameters())
    if fsdp > 1:
        for block in getattr(model, "blocks", ()):
            fully_shard(block, mesh=mesh["sharded"])
        fully_shard(model, mesh=mesh["sharded"])
    fill(model, whole)
    given = dict(whole.named_parameters())
    boxes_right = all(_holds(p, given[name]) for name, p in model.named_parameters())
    local = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
    if how == "traced":  # only the layers are called: neither the model nor its blocks
        traced = torch.fx.symbolic_trace(model)
        with tensorapply.whole_masks(masks):
            result, result_state = run(traced, batch())
    else:
        with tensorapply.whole_masks(masks):
            result, result_state = run(model, batch())
    expected, expected_state = run(whole, batch())
    gradients = {name: _apart(p, given[name]) for name, p in model.named_parameters()}  # before FSDP gathers again
    difference = Difference(
        dict(plan.styles),
        float((result - expected).detach().abs().max()),
        float((evaluate(model, batch()) - evaluate(whole, batch())).abs().max()),
        gradients,
        torch.equal(result_state, expected_state),
        boxes_right,
        case[:3] != "gpt" or model.head.weight is model.symbols.weight,
        local / sum(p.numel() for p in whole.parameters()),
    )
    dist.barrier()
    dist.destroy_process_group()
    return difference


def fill(model: nn.Module, whole: nn.Module) -> None:
    """Memory for what this member holds, with the values of the whole; one tensor stays one tensor."""
    before = {id(p): name for name, p in model.named_parameters()}
    again = [(m, n, before[id(p)]) for m in model.modules() for n, p in m.named_parameters(recurse=False)]
    model.to_empty(device="cpu")
    first: dict[str, nn.Parameter] = {}
    for module, attribute, name in again:
        if name in first:
            module.register_parameter(attribute, first[name])
        first.setdefault(name, module.get_parameter(attribute))
    values = dict(whole.named_parameters())
    with torch.no_grad():
        for name, parameter in first.items():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            local.copy_(_part(parameter, values[name]))


def _part(parameter: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    return whole[tuple(slice(start, end) for start, end in tensorapply.held_box(parameter))]


def _holds(parameter: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether torch, putting all parts together, has the whole; it knows nothing of our boxes."""
    return torch.equal(parameter.full_tensor() if isinstance(parameter, DTensor) else parameter, whole)


def _apart(parameter: torch.Tensor, whole: torch.Tensor) -> float:
    gradient: Any = parameter.grad
    full = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    expected: Any = whole.grad
    return float((full - expected).abs().max())


def run(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(9)
    output: torch.Tensor = model(x)
    (output.square().sum() / output.numel() + output.sum() / 99).backward()  # type: ignore[no-untyped-call]
    return output, torch.get_rng_state()


def evaluate(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        output: torch.Tensor = model.eval()(x)
    return output
