"""What a step does to the gradients besides computing them, in GB/s against a copy on the device; and how fast they
travel between the device and the host's memory, pinned and not. Codecs are measured with what a step asks of them: to
encode and keep what that lost, and to decode; all in GB of gradients."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from distbelief.compression import block
from distbelief.compression.methods import codec_of
from distbelief.compression.powersgd import LowRank
from distbelief.transport.device.accelerator import pin
from distbelief.transport.shm.segment import Segment

ELEMENTS = 124 << 20
TILE = 1 << 18
REPETITIONS = 20
CODECS = ("bf16", "int8", "topk=0.01", "topk=0.1")
MATRIX = (1024, 4096)


def measure() -> list[dict[str, Any]]:
    a, b, out = (torch.randn(ELEMENTS, device="cuda") for _ in range(3))
    host, pageable = Segment.private(4 * ELEMENTS), Segment.private(4 * ELEMENTS)
    pin(host)
    pinned, plain = (one.tensor(torch.float32, 0, ELEMENTS) for one in (host, pageable))
    tiles = a.view(-1, TILE)
    parameter = torch.nn.Parameter(b)
    parameter.grad = a
    optimizer = torch.optim.AdamW([parameter], lr=1e-4, fused=True)
    cases: dict[str, Callable[[], Any]] = {
        "copy": lambda: out.copy_(a),
        "add two partial sums": lambda: torch.add(a, b, out=out),
        "scale": lambda: out.mul_(1.0),
        "norm of tiles in float64": lambda: torch.linalg.vector_norm(tiles, dim=1, dtype=torch.float64),
        "AdamW, fused": optimizer.step,
        "to the host, pinned": lambda: pinned.copy_(a, non_blocking=True),
        "from the host, pinned": lambda: out.copy_(pinned, non_blocking=True),
        "to the host": lambda: plain.copy_(a),
        "from the host": lambda: out.copy_(plain),
    }
    ratios: dict[str, float] = {}
    for text in CODECS:
        _codec(text, tiles, cases, ratios)
    _low_rank(a, cases, ratios)
    seconds = {name: _seconds(case) for name, case in cases.items()}
    return [
        {
            "kernel": name,
            "size_mb": 4 * ELEMENTS / 1e6,
            "gb_per_s": 4 * ELEMENTS / took / 1e9,
            "of_copy": seconds["copy"] / took,
            **({"fewer_bytes": ratios[name]} if name in ratios else {}),
        }
        for name, took in seconds.items()
    ]


def _codec(text: str, tiles: torch.Tensor, cases: dict[str, Callable[[], Any]], ratios: dict[str, float]) -> None:
    codec, size_bytes = codec_of(text), block.size_bytes(codec_of(text), TILE)
    rests, out = torch.zeros_like(tiles), torch.empty_like(tiles)
    blocks = torch.zeros(len(tiles), size_bytes, dtype=torch.uint8, device=tiles.device)
    cases[f"{text}, encode"] = lambda: block.write_rows(codec, rests, tiles, blocks)
    cases[f"{text}, decode"] = lambda: block.read_rows(codec, blocks, out)
    ratios[f"{text}, encode"] = 4 * TILE / size_bytes


def _low_rank(numbers: torch.Tensor, cases: dict[str, Callable[[], Any]], ratios: dict[str, float]) -> None:
    """Both ways, with factors that go to the host and come back as those of nobody else."""
    method = LowRank(4)
    matrices = list(numbers.view(-1, *MATRIX))
    power = method.over([MATRIX] * len(matrices), 1, numbers.device)
    cases[str(method)] = lambda: power.reduce(matrices, lambda vector: vector)
    ratios[str(method)] = power.ratio


def _seconds(case: Callable[[], Any]) -> float:
    took = []
    for _ in range(REPETITIONS + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        case()
        end.record()
        torch.cuda.synchronize()
        took.append(start.elapsed_time(end) / 1e3)
    return statistics.median(took[3:])
