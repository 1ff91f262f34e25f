"""Models that are hard to cut in one way or another, and one comparison: their stages in a row against the whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from distbelief.strategies.mesh.cut.cutting import Blueprint, make_blueprint
from distbelief.strategies.mesh.cut.stages import Stage

Given = tuple[tuple[Any, ...], dict[str, Any]]


def on_meta(value: Any) -> Any:
    return pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), value)


def without_memory(model: nn.Module) -> nn.Module:
    """A copy on meta, plain attributes included; tied parameters stay tied, which `Module.to` does not see to."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers(), *plain_attributes(model).values()):
        other = tensor.detach().to("meta")
        memo[id(tensor)] = nn.Parameter(other, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else other
    return copy.deepcopy(model, memo)


def plain_attributes(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that modules keep without registering them, under all of their names."""
    return {
        f"{path}.{key}" if path else key: value
        for path, module in model.named_modules(remove_duplicate=False)
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def blueprint_of(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any] = {}, **options: Any) -> Blueprint:
    return make_blueprint(without_memory(model), on_meta(args), on_meta(dict(kwargs)), **options)


def give_values(stage: Stage, model: nn.Module) -> None:
    """Let the stage's modules hold the tensors of `model`, by name; plain attributes as members of a mesh set them."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = dict(model.named_buffers(remove_duplicate=False))
    modules = dict(stage.module.named_modules())
    for name, value in plain_attributes(model).items():
        owner, _, key = name.rpartition(".")
        if owner in modules:
            setattr(modules[owner], key, value)
    for name, _ in list(stage.module.named_parameters(remove_duplicate=False)):
        owner, _, key = name.rpartition(".")
        stage.module.get_submodule(owner)._parameters[key] = parameters[name]
    for name, _ in list(stage.module.named_buffers(remove_duplicate=False)):
        owner, _, key = name.rpartition(".")
        stage.module.get_submodule(owner)._buffers[key] = buffers[name]


Crossed = list[tuple[list[torch.Tensor], list[torch.Tensor]]]


def run(stages: list[Stage], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Crossed]:
    """Each stage on copies of what the one before sent, as if it came over a wire.

    Also, for every wire, the tensors that want a gradient: as they were sent, and as they arrived.
    """
    sent: Any = ()
    crossed: Crossed = []
    for stage in stages:
        assert len(sent) == len(stage.receives)
        assert all(isinstance(value, torch.Tensor | int) for value in sent)
        arrived = [value.detach().clone() if isinstance(value, torch.Tensor) else value for value in sent]
        pairs = [(a, b) for a, b in zip(sent, arrived, strict=True) if isinstance(a, torch.Tensor) and a.requires_grad]
        crossed.append(([a for a, _ in pairs], [b.requires_grad_() for _, b in pairs]))
        sent = stage(arrived, args, kwargs)
    return sent, crossed


def backward(output: torch.Tensor, crossed: Crossed) -> None:
    """From the last stage to the first: the gradient of what arrived is that of what was sent."""
    output.backward()
    for sent, arrived in reversed(crossed):
        pairs = [(one, other.grad) for one, other in zip(sent, arrived, strict=True) if other.grad is not None]
        if pairs:
            torch.autograd.backward([one for one, _ in pairs], [gradient for _, gradient in pairs])


def assert_same_bits(make: Callable[[], nn.Module], *batches: Given, **options: Any) -> Blueprint:
    """Output, gradients, buffers and random state of the stages are those of the whole model, to the bit.

    The model is drawn for the first batch and run on all; in training, in evaluation, and in training again.
    """
    torch.manual_seed(0)
    whole = make()
    cut = blueprint_of(whole, *batches[0], **options)
    parts = [cut.stage(number, number + 1) for number in range(len(cut.units))]
    mine = copy.deepcopy(whole)
    parameters = dict(mine.named_parameters(remove_duplicate=False))
    buffers = dict(mine.named_buffers(remove_duplicate=False))
    for part in parts:
        part.module.to_empty(device="cpu")
    for part in parts:  # only now: a module that two stages use is emptied twice
        give_values(part, mine)
    for args, kwargs in batches:
        for training in (True, False, True):
            whole.train(training).zero_grad()
            mine.zero_grad()
            for part in parts:
                part.module.train(training)
            torch.manual_seed(7)
            expected = whole(*args, **kwargs)
            state = torch.get_rng_state()
            torch.manual_seed(7)
            output, crossed = run(parts, args, kwargs)
            assert torch.equal(torch.get_rng_state(), state)
            assert type(output) is type(expected)
            tensors = [leaf for leaf in pytree.tree_leaves(expected) if isinstance(leaf, torch.Tensor)]
            others = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]
            assert others
            assert len(others) == len(tensors) or hasattr(
                expected, "past_key_values"
            )  # a cache does not come out of a graph
            for one, other in zip(tensors, others, strict=False):
                assert torch.equal(one, other)
            if training:
                tensors[0].square().sum().backward()
                backward(others[0].square().sum(), crossed)
                for name, parameter in whole.named_parameters():
                    mine_too = parameters[name].grad
                    assert (parameter.grad is None) == (mine_too is None), name
                    if parameter.grad is not None:
                        assert torch.equal(parameter.grad, mine_too), name
            for name, buffer in whole.named_buffers():
                assert torch.equal(buffer, buffers[name]), name
    return cut


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 2, width // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0, is_causal=True)
        x = x + F.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)), 0.1, self.training)
        return x + F.dropout(self.mlp(self.norm2(x)), 0.1, self.training)


class GPT(nn.Module):
    """Dropout in the model's own code, a position table that is never called, one matrix at both ends."""

    def __init__(self, layers: int = 3, width: int = 16) -> None:
        super().__init__()
        self.symbols, self.places = nn.Embedding(32, width), nn.Embedding(12, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.symbols.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.symbols(x.long()) + self.places.weight[: x.shape[1]]
        return self.head(self.norm(self.blocks(F.dropout(x, 0.1, self.training))))


def digits() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10),
    )  # fmt: skip


class UNet(nn.Module):
    """Values that skip stages, and a size that crosses a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.up = nn.ModuleList([nn.Linear(16, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for layer in self.down:
            x = torch.relu(layer(x))
            kept.append(x)
        count = kept[0].shape[0]
        for layer in self.up:
            x = torch.relu(layer(torch.cat([x, kept.pop()], dim=1)))
        return x / count


class PreActivation(nn.Module):
    """A block that changes its input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.act, self.linear = nn.ReLU(inplace=True), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.act(x))


class Recurrent(nn.Module):
    """Layers that give tuples, which go from stage to stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LSTM(8, 8, batch_first=True), nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Any]:
        x, state = self.first(x)
        x, state = self.second(x, state)
        return self.head(x), state


class Masked(nn.Module):
    """Two inputs by name, a mask that every block needs, and a mapping as output."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.blocks = nn.ModuleList([nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True) for _ in range(2)])
        self.head = nn.Linear(8, 2)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, scale: float = 1.0) -> dict[str, Any]:
        hidden = self.embed(ids)
        ignored = mask == 0
        for block in self.blocks:
            mixed, _ = block(hidden, hidden, hidden, key_padding_mask=ignored, need_weights=False)
            hidden = hidden + mixed
        return {"logits": self.head(hidden[:, 0]) * scale, "hidden": (hidden,)}


class InPlace(nn.Module):
    """Changes in the model's own code: of a value, of a part of one, and of one under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        same = y
        y += self.b(x)
        z = self.c(same)
        z[:, 0] = 1.0
        noise = torch.rand(8)
        return self.d(torch.tanh(z)) + noise * torch.randn(z.shape[0], 1)


class Twice(nn.Module):
    """One normalisation used at two places: its buffers cannot be in two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.norm(self.b(self.norm(self.a(x)))))


class Auxiliary(nn.Module):
    """A branch that there is in training only."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])
        self.side, self.head = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        for number, block in enumerate(self.blocks):
            x = torch.relu(block(x))
            if number == 1 and self.training:
                side = self.side(x)
        out = self.head(x)
        return (out + side, side) if self.training else (out,)


class Python(nn.Module):
    """Control flow over shapes, a buffer that counts, a constant: what torch.fx cannot follow and torch.export can."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU()) for _ in range(3)])
        self.head = nn.Linear(8, 2)
        self.register_buffer("steps", torch.zeros(1))
        self.steps: torch.Tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if int(x.shape[1]) != 4:
            raise ValueError("four columns are needed")
        x = self.embed(x)
        if self.training:
            self.steps += 1
        x = x * torch.tensor([1.0, 2.0] * 4, device=x.device)
        for number in range(len(x.shape) + 1):
            x = x + self.blocks[number](F.dropout(x, 0.2, self.training))
        return self.head(x)


class DataDependent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            if x.sum() > 0:  # the tracer meets this
                x = -x
        return x


class Router(nn.Module):
    """The same control flow, inside one module, with a normalisation and a table that it makes when it first runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.other = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.linspace(0.5, 1.5, 8)
        x = self.linear(x) * self.table
        return self.norm(x) if x.sum() > 0 else self.other(x)


class Routed(nn.Module):
    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Router() for _ in range(layers)), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


class Scaled(nn.Module):
    """Tensors that are plain attributes: of its own, and one that all blocks share."""

    def __init__(self, width: int, shared: torch.Tensor) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.factor, self.shared = torch.rand(width) + 0.5, shared

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.two(torch.relu(self.one(x + self.shared))) * self.factor


class Shift(nn.Module):
    """No modules inside: a parameter and a plain attribute."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight, self.offset = nn.Parameter(torch.rand(width)), torch.rand(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight + self.offset


class PlainAttributes(nn.Module):
    """`over_shapes`: with control flow that only torch.export can follow."""

    def __init__(self, over_shapes: bool = False) -> None:
        super().__init__()
        self.offset, self.over_shapes = torch.rand(8), over_shapes
        self.blocks = nn.ModuleList(Scaled(8, self.offset) for _ in range(3))
        self.shift, self.head = Shift(8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in range(x.shape[1] - 5) if self.over_shapes else range(3):
            x = self.blocks[number](x)
        return self.head(self.shift(x - self.offset)) + self.shift.offset[:2]


class FrozenNorm(nn.Module):
    """Its statistics are those of another time: the model sees to it that the normalisations are never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh()) for _ in range(3))
        self.norm = nn.BatchNorm1d(8)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                nn.init.uniform_(module.running_mean)
                nn.init.uniform_(module.running_var, 0.5, 2.0)

    def train(self, mode: bool = True) -> FrozenNorm:
        super().train(mode)
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d) and module is not self.norm:
                module.eval()
        return self

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.norm(x)
