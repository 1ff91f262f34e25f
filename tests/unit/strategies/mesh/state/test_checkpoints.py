"""The checkpoint matrix: saved in each layout, loaded in each other one, the next steps are those of one process.

All 64 pairs take minutes: DISTBELIEF_MATRIX=whole tries them. Otherwise each layout is loaded by two others.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from distbelief.verification.plain import make_model, train_plainly
from tests.support.mesh.saving import END, Act, Layout, matrix_job
from tests.support.stage import Stage

MEMBER = "tests.support.mesh.saving"

LAYOUTS = [
    Layout("allreduce", 1),
    Layout("allreduce", 2),
    Layout("tensor:2", 2),
    Layout("pipeline:2:zbv", 2),
    Layout("pipeline:3", 3),
    Layout("sharded", 3),
    Layout("dp2.fsdp2", 4),
    Layout("tp2.pp2", 4),
]


@lru_cache
def plainly() -> dict[str, torch.Tensor]:
    job = matrix_job()
    model = make_model(job)
    list(train_plainly(job, model, END))
    return model.state_dict()


def loaders(saved: Layout) -> list[Layout]:
    if os.environ.get("DISTBELIEF_MATRIX") == "whole":
        return LAYOUTS
    first = LAYOUTS.index(saved)
    return [LAYOUTS[(first + step) % len(LAYOUTS)] for step in (1, 4)]


@pytest.mark.parametrize("saved", LAYOUTS, ids=str)
def test_every_layout_goes_on_from(stage: Stage, tmp_path: Path, saved: Layout) -> None:
    folder = str(tmp_path)
    acts = [Act(saved, save=folder), *(Act(layout, load=folder) for layout in loaders(saved))]
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = [{"worker": worker, "port": store.port, "acts": acts} for worker in range(4)]
    found = stage.play(MEMBER, "perform", given)[0]
    for act, weights in list(zip(acts, found, strict=True))[1:]:
        assert weights.keys() == plainly().keys()
        for name, value in weights.items():
            # A step moves a number by up to 1e-2: without the optimizer's state they would be as far apart as that.
            torch.testing.assert_close(
                value, plainly()[name], rtol=0, atol=3e-4, msg=lambda m, n=name, a=act: f"{a} {n}: {m}"
            )
