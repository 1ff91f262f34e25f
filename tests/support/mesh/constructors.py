"""Constructors of models that do all that constructors do: for what must follow them to the last bit."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.nn.utils import parametrizations

OUTSIDE = torch.Generator().manual_seed(3)
torch.rand(5, generator=OUTSIDE)
BEFORE = torch.arange(12, dtype=torch.float32).reshape(3, 4)
SAVED = io.BytesIO()
torch.save(nn.Linear(4, 3).state_dict(), SAVED)


def holding(**tensors: torch.Tensor) -> nn.Module:
    """A module with these as parameters (floating point) and buffers (the others)."""
    module = nn.Module()
    for name, tensor in tensors.items():
        if tensor.is_floating_point():
            module.register_parameter(name, nn.Parameter(tensor))
        else:
            module.register_buffer(name, tensor)
    return module


def apply_inits() -> nn.Module:
    layers = [nn.Linear(20, 20) for _ in range(9)]
    nn.init.trunc_normal_(layers[0].weight, std=0.02)
    nn.init.orthogonal_(layers[1].weight)
    nn.init.kaiming_normal_(layers[2].weight, nonlinearity="relu")
    nn.init.xavier_uniform_(layers[3].weight)
    nn.init.sparse_(layers[4].weight, sparsity=0.3)
    nn.init.dirac_(layers[5].weight.data.view(20, 20, 1))
    nn.init.eye_(layers[6].weight)
    nn.init.constant_(layers[7].bias, 0.5)
    return nn.Sequential(*layers, nn.Linear(4, 4))


def gpt_like() -> nn.Module:
    class Gpt(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token, self.position = nn.Embedding(30, 16, padding_idx=2), nn.Embedding(8, 16)
            layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
            self.blocks = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.head = nn.Linear(16, 30, bias=False)
            self.head.weight = self.token.weight
            self.register_buffer("mask", torch.tril(torch.ones(8, 8)).bool(), persistent=False)
            self.register_buffer("ids", torch.arange(8).expand((1, -1)))
            self.apply(self.init)

        @staticmethod
        def init(module: nn.Module) -> None:
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)

    return Gpt()


def reads_values() -> nn.Module:
    layer, noise = nn.Linear(6, 6), torch.rand(50)
    width = int(noise.sum().item())
    if noise[0] > noise[1]:
        width += 1
    chosen = noise[noise > 0.5]
    mean = float(np.mean(noise.numpy())) + sum(noise.tolist()) + float(np.asarray(noise)[3])
    layer.weight.data.mul_(mean + float(f"{noise[4]:.3f}") + float(repr(noise[5])[7:-1]))
    return nn.Sequential(
        layer, nn.Linear(width, len(torch.nonzero(noise > 0.3))), holding(chosen=chosen, w=torch.randn(3))
    )


def reads_again_and_again() -> nn.Module:
    layers = []
    for _ in range(6):
        layer = nn.Linear(7, 7)
        layer.weight.data.div_(layer.weight.abs().max().item())
        layers.append(layer)
    return nn.Sequential(*layers)


def seeds_inside() -> nn.Module:
    first = nn.Linear(torch.initial_seed() % 7, 5)
    torch.manual_seed(4)
    second = nn.Linear(5, 5)
    torch.manual_seed(4)
    third = nn.Linear(5, 7)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(4)
        fourth = nn.Linear(3, 3)
    fifth = nn.Linear(5, 5)
    state = torch.get_rng_state()
    sixth = nn.Linear(5, 5)
    torch.set_rng_state(state)
    seventh, eighth = nn.Linear(2, 2), nn.Linear(5, 5)
    torch.set_rng_state(state)
    return nn.Sequential(first, second, third, fourth, fifth, sixth, seventh, eighth, nn.Linear(2, 2))


def own_generators() -> nn.Module:
    own, other = torch.Generator(), torch.Generator()
    own.manual_seed(8)
    a, b = torch.randn(40, generator=own), torch.rand(3)
    other.set_state(own.get_state())
    c = torch.empty(6).uniform_(generator=own)
    d, e = torch.randn(6, generator=other), torch.randn(3, generator=OUTSIDE)
    own.manual_seed(8)
    f, g = torch.randn(20, generator=own), torch.randperm(9, generator=OUTSIDE)
    return holding(a=a, b=b, c=c, d=d, e=e, f=f, g=g, h=torch.randn(3, generator=torch.default_generator))


def other_kinds_of_randomness() -> nn.Module:
    scale = float(np.random.rand()) + random.random()
    drawn = torch.poisson(torch.rand(20) * 5), torch.bernoulli(torch.rand(20)), torch.randint(0, 9, (4,))
    weights = torch.rand(6)
    picked, mixed = torch.multinomial(weights, 3), torch.normal(weights, 2.0)
    like, gamma = torch.rand_like(mixed), torch.distributions.Gamma(2.0, 1.0).sample((5,))
    dropped = nn.functional.dropout(torch.ones(30), 0.4)
    named = dict(zip("abcdefgh", (*drawn, picked, mixed, like, gamma, dropped), strict=True))
    return holding(**named, last=torch.randn(4) * scale)


def changes_data() -> nn.Module:
    layer, other = nn.Linear(4, 3), nn.Linear(4, 3)
    layer.weight.data = torch.randn(3, 4).t().contiguous().t()
    layer.bias.data = torch.from_numpy(np.random.rand(3).astype(np.float32))
    other.weight.data[1:].copy_(layer.weight[:2])
    other.bias.data, kept = layer.bias.data, other.bias.data
    kept.add_(1)
    with torch.no_grad():
        other.weight[0] += kept[0]
        other.weight.unsqueeze_(0).squeeze_(0)
        torch.sin(other.weight[2], out=other.weight[1])
    copied = copy.deepcopy(other)
    copied.weight.data.mul_(2)
    return nn.Sequential(layer, other, copied, other.to("cpu").double())


def loads_weights() -> nn.Module:
    SAVED.seek(0)
    layer, other, third = nn.Linear(4, 3), nn.Linear(4, 3), nn.Linear(4, 3)
    layer.load_state_dict(torch.load(SAVED))
    layer.weight.data.mul_(0.5)
    other.load_state_dict({"weight": BEFORE, "bias": BEFORE[:, 0]})
    third.load_state_dict({"weight": BEFORE, "bias": torch.rand(3)}, assign=True)
    return nn.Sequential(layer, other, third, nn.Linear(2, 2))


def constants() -> nn.Module:
    table = np.outer(np.arange(6), np.ones(4)).astype(np.float32)
    made = {
        "a": torch.tensor([1.5, 2.5]),
        "b": torch.from_numpy(table).sin(),
        "c": torch.FloatTensor([1, 2]),
        "d": torch.frombuffer(bytearray(range(16)), dtype=torch.int32),
        "e": torch.as_tensor(table)[:, ::2],
        "f": torch.linspace(0, 1, 7),
        "g": torch.full((3,), 2),
        "h": torch.randn(3).new_tensor([3.0]),
    }
    made["a"][0] = 7.0
    return holding(**made, z=torch.randn(5))


def on_meta_first() -> nn.Module:
    with torch.device("meta"):
        layer = nn.Linear(5, 5)
        nn.init.normal_(layer.weight)
    layer.to_empty(device="cpu").reset_parameters()
    skipped = nn.utils.skip_init(nn.Linear, 4, 4)
    nn.init.uniform_(skipped.weight)
    nn.init.zeros_(skipped.bias)
    return nn.Sequential(layer, skipped, nn.Linear(3, 3, device="cpu"))


def asks_for_the_device() -> nn.Module:
    layer = nn.Linear(4, 4)
    if layer.weight.is_meta or not layer.weight.is_cpu or layer.weight.device != torch.device("cpu"):
        raise AssertionError("a plain process has it on the CPU")
    layer.weight.data.to("cpu").mul_(3)  # no copy
    layer.bias.data.cpu().zero_()
    layer.share_memory()
    return nn.Sequential(layer, holding(x=torch.rand(3, device=layer.weight.device)))


def default_types() -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        layer, ratio = nn.Linear(4, 4), torch.arange(5) / 3
    finally:
        torch.set_default_dtype(before)
    return nn.Sequential(layer, holding(ratio=ratio), nn.Linear(3, 3).to(torch.bfloat16), nn.Linear(2, 2))


def shares_storage() -> nn.Module:
    whole = torch.randn(30, 4)
    return holding(q=whole[:10], k=whole[10:20], v=whole[20:], t=whole.t(), s=whole[:, 1])


def runs_forward() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2))
    out = model(torch.randn(16, 4))
    out.sum().backward()
    with torch.no_grad():
        model[0].weight -= 0.1 * model[0].weight.grad
    model.zero_grad()
    model[4].weight.data.div_(out.detach().std(0).unsqueeze(1))
    return nn.Sequential(model, nn.Linear(3, 3))


def catches_errors() -> nn.Module:
    layer = nn.Linear(3, 3)
    try:
        torch.rand(3) @ torch.rand(4)
    except RuntimeError:
        layer.weight.data.zero_()
    return nn.Sequential(layer, nn.Linear(3, 3))


def linear_algebra() -> nn.Module:
    matrix = torch.randn(7, 5)
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    spectral = parametrizations.spectral_norm(nn.Linear(5, 5))
    orthogonal = parametrizations.orthogonal(nn.Linear(5, 5))
    made = holding(u=u, s=s, v=v, p=torch.linalg.pinv(matrix), e=torch.matrix_exp(matrix.t() @ matrix * 0.01))
    return nn.Sequential(made, spectral, orthogonal, nn.Linear(2, 2))


def complex_numbers() -> nn.Module:
    rates = torch.polar(torch.ones(3, 2), torch.rand(3, 2))
    module = holding(real=torch.view_as_real(rates).clone(), imaginary=rates.conj().imag)
    module.register_buffer("rates", rates.conj())
    return module


MODELS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(5, 3),
    "convolution": lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.Linear(9, 4)),
    "lstm": lambda: nn.LSTM(5, 7, num_layers=2, bidirectional=True),
    "attention": lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True, kdim=4, vdim=6),
    "bilinear": lambda: nn.Sequential(nn.Bilinear(3, 4, 5), nn.PReLU(), nn.EmbeddingBag(9, 4), nn.GRUCell(3, 4)),
    "weight norm": lambda: nn.Sequential(parametrizations.weight_norm(nn.Linear(6, 4)), nn.Linear(3, 3)),
    "old weight norm": lambda: nn.Sequential(nn.utils.weight_norm(nn.Linear(6, 4)), nn.Linear(3, 3)),
    "inits": apply_inits,
    "gpt": gpt_like,
    "values": reads_values,
    "values often": reads_again_and_again,
    "seeds": seeds_inside,
    "generators": own_generators,
    "randomness": other_kinds_of_randomness,
    "data": changes_data,
    "loading": loads_weights,
    "constants": constants,
    "meta first": on_meta_first,
    "device": asks_for_the_device,
    "default types": default_types,
    "shared storage": shares_storage,
    "forward": runs_forward,
    "errors": catches_errors,
    "linear algebra": linear_algebra,
    "complex": complex_numbers,
}
