"""Plans of models of many kinds, and what is said about requests that cannot be met."""

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from distbelief.errors import JobError
from distbelief.strategies.mesh.tensor.plan import TensorPlan, explain, plan

EXAMPLE = runpy.run_path(str(Path(__file__).resolve().parents[5] / "examples" / "gpt.py"))


def gpt(layers: int = 2, heads: int = 4, dropout: float = 0.1) -> nn.Module:
    with torch.device("meta"):
        model: nn.Module = EXAMPLE["GPT"](layers, 32, heads, 12, dropout)
    return model


def text() -> tuple[torch.Tensor]:
    return (torch.zeros(2, 12, dtype=torch.uint8),)


class Between(nn.Module):
    """Two linear layers and anything between them."""

    def __init__(self, between: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.between = between
        self.one, self.two = nn.Linear(8, 16), nn.Linear(16, 8)
        self.other = nn.Linear(8, 16)
        self.norm, self.batch_norm = nn.LayerNorm(16), nn.BatchNorm1d(5)
        self.scale = nn.Parameter(torch.ones(16))
        self.single = nn.Parameter(torch.ones(1))
        self.register_buffer("frozen", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.two(self.between(self, x)).tanh()


def between(code: Callable[[Any, torch.Tensor], torch.Tensor], degree: int = 2) -> TensorPlan:
    return plan(Between(code).to("meta"), degree, (torch.zeros(3, 5, 8),))


# --- what is divided -------------------------------------------------------------------------------------------------


def test_the_example_is_divided_almost_wholly() -> None:
    found = plan(gpt(), 2, text())
    block = {"query": "column", "key": "column", "value": "column", "out": "row", "mlp.0": "column", "mlp.2": "row"}
    expected = {f"blocks.{n}.{name}": style for n in range(2) for name, style in block.items()}
    assert found.styles == {"symbols": "vocabulary", "head": "column_gather", **expected}
    assert found.whole["places"] == "the code uses its weight directly"
    assert {key: site.dim for key, site in found.sites.items()} == {(f"blocks.{n}.value", 0): 1 for n in range(2)}


def test_explain_folds_blocks() -> None:
    model = gpt(layers=3)
    lines = explain(plan(model, 2, text()), model)
    assert "blocks.0–2.mlp.0  Linear 32→128     by columns" in lines
    assert "head              Linear 32→256     by columns, and what it gives is gathered" in lines
    assert lines[-1] == "98 % of the parameters are divided by 2"
    assert len(lines) == 13


def test_planning_leaves_the_model_and_the_generator_as_they_were() -> None:
    model = gpt().eval()
    before = {name: id(p) for name, p in model.named_parameters()}, torch.get_rng_state()
    plan(model, 2, text())
    assert {name: id(p) for name, p in model.named_parameters()} == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert not any(m.training or m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize(
    "code",
    [
        lambda m, x: m.one(x).relu(),
        lambda m, x: F.relu(m.one(x), inplace=True).add_(1),
        lambda m, x: F.gelu(m.one(x).to(torch.float64).float()) * m.frozen,
        lambda m, x: m.one(x) * m.other(x).sigmoid(),
        lambda m, x: torch.cat([m.one(x)[:, :2], m.other(x)[:, 2:]], 1),
        lambda m, x: torch.stack([m.one(x), m.other(x)], -1).sum(-1),
        lambda m, x: m.one(x).softmax(1) - m.one(x).mean((0, 1), keepdim=True),
        lambda m, x: m.one(x).unflatten(-1, (-1, 4)).flatten(2),
        lambda m, x: torch.einsum("bth,bsh->btsh", m.one(x), m.other(x)).mean(2),
        lambda m, x: m.one(x).transpose(1, 2).contiguous().permute(0, 2, 1),
        lambda m, x: torch.ones(5, 5).tril() @ m.one(x),
        lambda m, x: m.one(x).split(2, 1)[0] + torch.zeros_like(m.one(x))[:, :2],
        lambda m, x: F.dropout(m.one(x), 0.1, m.training),
        lambda m, x: torch.where(x[..., :1] > 0, m.one(x), 0.0).clamp(min=0),
        lambda m, x: F.layer_norm(m.one(x).unflatten(-1, (-1, 4)), (4,)).flatten(-2),
    ],
)
def test_what_lies_between_may_be_divided(code: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
    found = between(code)
    assert found.styles["one"] == "column"
    assert found.styles["two"] == "row"
    torch.manual_seed(0)
    model, x = Between(code).eval(), torch.randn(3, 5, 8)
    given: list[torch.Tensor] = []
    model.two.register_forward_hook(lambda module, args, output: given.append(output))
    with torch.no_grad():
        model(x)
        for rank in range(2):
            torch.func.functional_call(model, part(model, found, rank), (x,))
    torch.testing.assert_close(given[1] + given[2], given[0])


def part(model: Between, found: TensorPlan, rank: int) -> dict[str, torch.Tensor]:
    """The parameters of one of two members. The bias of the last layer is added by the first one only."""
    mine = {"two.weight": model.two.weight.chunk(2, 1)[rank], "two.bias": model.two.bias * (rank == 0)}
    for name in [name for name, style in found.styles.items() if style == "column"]:
        mine |= {f"{name}.{n}": p.chunk(2, 0)[rank] for n, p in model.get_submodule(name).named_parameters()}
    return mine


def test_a_single_sample_does_not_mislead() -> None:
    """Samples and heads in one dimension: only for one sample would a part of it be a member's heads."""
    model = Between(
        lambda m, x: (
            m.one(x).unflatten(-1, (-1, 4)).transpose(1, 2).reshape(-1, 5, 4).mean((0, 2), True) @ x.new_ones(1, 16)
        )
    )
    assert "rearranges" in plan(model, 2, (torch.zeros(1, 5, 8),)).whole["one"]


# --- what is not -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (lambda m, x: m.one(x).softmax(-1), "the code takes the softmax of all its output"),
        (lambda m, x: m.one(x) - m.one(x).mean(-1, keepdim=True), "the code takes the mean of all its output"),
        (lambda m, x: m.norm(m.one(x)), "trained value"),
        (lambda m, x: F.layer_norm(m.one(x), (16,)), "a normalisation needs all its output"),
        (lambda m, x: m.batch_norm(m.one(x)), "no rule"),
        (lambda m, x: m.one(x) * m.scale, "its output meets a value that is not divided"),
        (lambda m, x: m.one(x) * m.single, "its output meets a trained value that is not divided"),
        (lambda m, x: m.one(x) / m.one(x).shape[-1], "the code would do something else"),
        (lambda m, x: m.one(x).relu() if m.one(x).shape[-1] > 8 else m.one(x), "the code would do something else"),
        (lambda m, x: m.one(x) + torch.arange(m.one(x).shape[-1]), "not divided"),
        (lambda m, x: torch.zeros(3, 5, 16).copy_(m.one(x)), "not divided"),
        (lambda m, x: m.one(x) + torch.randn_like(m.one(x)), "random numbers"),
        (lambda m, x: m.one(x).flip(-1), "torch's flip, for which there is no rule"),
        (lambda m, x: torch.cat(m.one(x).chunk(2, -1)[::-1], -1), "the code splits its output"),
        (lambda m, x: F.glu(torch.cat([m.one(x), m.other(x)], -1)), "joined to others"),
        (lambda m, x: m.one(x).view(3, 5, 4, 4).mT.reshape(3, 5, 16), "rearranges"),
        (lambda m, x: m.one(x).reshape(3, 5, 4, 4).flatten(2), "the code does not fit a part of its output"),
        (lambda m, x: (m.one(x) @ m.other(x).mT) @ m.frozen.expand(5, 16), "a matrix product adds"),
        (lambda m, x: m.one(input=x), "positional"),
        (lambda m, x: F.linear(x, m.one.weight), "the code uses its weight directly"),
    ],
)
def test_what_stays_whole_and_why(code: Callable[[Any, torch.Tensor], torch.Tensor], reason: str) -> None:
    found = between(code)
    assert "one" not in found.styles
    assert reason in found.whole["one"]
    assert found.styles["two"] == "column_gather"


class Fused(nn.Module):
    """One matrix for query, key and value, with the number of heads in the code; by a split, or by a view."""

    def __init__(self, by_split: bool) -> None:
        super().__init__()
        self.by_split = by_split
        self.qkv, self.out, self.norm = nn.Linear(16, 48), nn.Linear(16, 16), nn.LayerNorm(16)
        self.mlp = nn.Sequential(nn.Linear(16, 48), nn.GELU(), nn.Linear(48, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        if self.by_split:
            q, k, v = (p.view(batch, length, -1, 4).transpose(1, 2) for p in self.qkv(self.norm(x)).split(16, 2))
        else:
            q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm(x))


@pytest.mark.parametrize("by_split", [True, False])
@pytest.mark.parametrize("degree", [2, 3, 4])
def test_a_fused_attention_stays_whole_and_the_rest_is_divided(by_split: bool, degree: int) -> None:
    found = plan(nn.Sequential(Fused(by_split), nn.LayerNorm(16)), degree, (torch.zeros(2, 5, 16),))
    assert found.styles == {"0.mlp.0": "column", "0.mlp.2": "row"}
    assert "output" in found.whole["0.qkv"]


def test_a_fused_attention_can_be_divided_on_request() -> None:
    found = plan(Fused(True), 2, (torch.zeros(2, 5, 16),), overrides={"qkv": "column", "out": "row"})
    assert found.styles["qkv"] == "column_gather"
    assert found.styles["out"] == "row_split"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: nn.Embedding(64, 16, padding_idx=0), "padding_idx"),
        (lambda: nn.Embedding(64, 16, max_norm=1.0), "max_norm"),
        (lambda: nn.Embedding(64, 16, sparse=True), "sparse"),
        (lambda: nn.Embedding(3, 16), "3 are too few for 4 members"),
    ],
)
def test_embeddings_that_cannot_be_divided(make: Callable[[], nn.Module], reason: str) -> None:
    layers = nn.Sequential(make(), nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    assert reason in plan(layers, 4, (torch.zeros(2, 5, dtype=torch.long),)).whole["0"]


def test_tied_layers_that_disagree_stay_whole() -> None:
    layers = nn.Sequential(nn.Embedding(64, 16, padding_idx=0), nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 16))
    layers.append(nn.Linear(16, 64))
    layers[4].weight = layers[0].weight
    found = plan(layers, 2, (torch.zeros(2, 5, dtype=torch.long),))
    assert found.styles == {"1": "column", "3": "row"}
    assert "also that of 0" in found.whole["4"]


def test_convolutions_do_not_pay() -> None:
    net = nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.Flatten(), nn.Linear(288, 32), nn.ReLU(), nn.Linear(32, 10)
    )
    found = plan(net, 2, (torch.zeros(2, 1, 8, 8),))
    assert found.styles == {"3": "column", "5": "row"}
    assert found.whole["0"] == "dividing the channels of a convolution does not pay"


# --- what is refused -------------------------------------------------------------------------------------------------


def refusal(*args: Any, **kwargs: Any) -> JobError:
    with pytest.raises(JobError) as caught:
        plan(*args, **kwargs)
    return caught.value


def test_heads_that_cannot_be_shared() -> None:
    error = refusal(gpt(), 3, text())
    assert "tensor:3 cannot divide blocks.0.query, blocks.0.key, blocks.0.value: 4 heads" in error.message
    assert error.hint.startswith("tensor:2 or tensor:4 would fit")
    whole = {f"blocks.*.{name}": "whole" for name in ("query", "key", "value")}
    assert str(whole) in error.hint
    assert set(plan(gpt(), 3, text(), overrides=whole).styles) == {"symbols", "head"}


def test_nothing_to_divide() -> None:
    error = refusal(nn.Sequential(nn.Conv2d(1, 8, 3)), 2, (torch.zeros(2, 1, 8, 8),))
    assert "tensor:2 cannot divide any layer" in error.message
    assert "does not pay" in error.message
    assert "pipeline:K" in error.hint


def test_code_that_looks_at_values() -> None:
    error = refusal(Between(lambda m, x: m.one(x) if x.sum() > 0 else m.other(x)), 2, (torch.zeros(3, 5, 8),))
    assert "item" in error.message


@pytest.mark.parametrize(
    ("overrides", "message", "hint"),
    [
        ({"blocks.*.query": "rows"}, "'rows' (for 'blocks.*.query') is no way", "'column', 'row' or 'whole'"),
        ({"blocks.0.qurey": "row"}, "no module of the model is called 'blocks.0.qurey'", "did you mean blocks.0.query"),
        ({"blocks.*.norm1": "row"}, "LayerNorm; only Linear and Embedding", "inside are none"),
        ({"blocks.0": "row"}, "names Block; only Linear and Embedding", "inside are blocks.0.query"),
        ({"places": "row"}, "wants to divide places, which is not possible: the code uses its weight", "patterns"),
        ({"symbols": "column"}, "also that of head", "patterns"),
    ],
)
def test_overrides_that_mean_nothing(overrides: dict[str, str], message: str, hint: str) -> None:
    error = refusal(gpt(), 2, text(), overrides=overrides)
    assert message in error.message
    assert hint in error.hint


def test_a_container_can_be_kept_whole() -> None:
    found = plan(gpt(), 2, text(), overrides={"blocks.*": "whole", "blocks.1.mlp.0": "column"})
    assert found.styles == {"symbols": "vocabulary", "blocks.1.mlp.0": "column_gather", "head": "column_gather"}


# --- Transformers ----------------------------------------------------------------------------------------------------


def test_transformers() -> None:
    transformers = pytest.importorskip("transformers")
    ids = (torch.zeros(2, 6, dtype=torch.long),)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(**sizes, intermediate_size=64, num_key_value_heads=2)
    with torch.device("meta"):
        llama = transformers.LlamaForCausalLM(config)
        gpt2 = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, n_positions=16))
    styles = plan(llama, 2, ids).styles
    assert styles["model.layers.1.self_attn.k_proj"] == styles["model.layers.1.mlp.gate_proj"] == "column"
    assert styles["model.layers.1.self_attn.o_proj"] == styles["model.layers.1.mlp.down_proj"] == "row"
    assert "2 and 4 heads" in refusal(llama, 4, ids).message
    found = plan(gpt2, 2, ids)
    assert found.styles["transformer.wte"] == "vocabulary"
    assert found.whole["transformer.h.0.attn.c_attn"] == "Conv1D is no Linear or Embedding layer"
