"""Layouts against one process: members follow scripts, and what they hold in the end is compared."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from distbelief.verification.plain import make_model, train_plainly
from tests.support.mesh.member import JOBS, STEPS, Script
from tests.support.stage import Stage

MEMBER = "tests.support.mesh.member"


@lru_cache
def plainly(case: str, steps: int = STEPS) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The losses, and parameters and buffers after that, of one process."""
    job = JOBS[case]()
    model = make_model(job)
    losses = list(train_plainly(job, model, steps))
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return losses, {f"model/{name}": value.detach() for name, value in tensors}


def put_together(held: list[Any]) -> dict[str, torch.Tensor]:
    """The whole tensors. Those who hold the same must agree."""
    found: dict[str, dict[Any, torch.Tensor]] = {}
    for one in held:
        for name, (box, value) in one.pieces.items():
            before = found.setdefault(name, {}).setdefault(box, value)
            torch.testing.assert_close(before, value, rtol=0, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")
    return {name: _whole(boxes) for name, boxes in found.items()}


def _whole(boxes: dict[Any, torch.Tensor]) -> torch.Tensor:
    first = next(iter(boxes))
    shape = [max(box[dimension][1] for box in boxes) for dimension in range(len(first))]
    result = torch.full(shape, float("nan"), dtype=torch.float64)
    for box, value in boxes.items():
        result[tuple(slice(*one) for one in box)] = value.double()
    assert not bool(result.isnan().any())
    return result


def check(case: str, held: list[Any], steps: int = STEPS, tolerance: float = 1e-5) -> None:
    losses, expected = plainly(case, steps)
    for one in held:
        assert one.losses == pytest.approx(dict(enumerate(losses)), abs=tolerance)
    got = put_together(held)
    model = {name: value for name, value in got.items() if name.startswith("model/")}
    assert model.keys() == expected.keys()
    for name, value in model.items():
        scale = max(1.0, float(expected[name].abs().max()))
        difference = float((value - expected[name].double()).abs().max()) / scale
        assert difference < tolerance, f"{name}: {difference}"


def follow(stage: Stage, scripts: list[Script]) -> list[list[list[Any]]]:
    """By script and generation: what its members held in the end, in rank order."""
    workers = 1 + max(worker for script in scripts for one in script.generations for worker in one.workers)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = [{"worker": worker, "port": store.port, "scripts": scripts} for worker in range(workers)]
    by_worker = stage.play(MEMBER, "follow", given)
    return [
        [[by_worker[worker][s][g] for worker in one.workers] for g, one in enumerate(script.generations)]
        for s, script in enumerate(scripts)
    ]
