"""Divided models whose gradients are compressed between members that hold the same part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from distbelief.strategies.rules.degrees import Degrees
from distbelief.worker.origin import saved_at
from tests.support.mesh.following import check, follow, put_together
from tests.support.mesh.member import STEPS, Generation, Script
from tests.support.mesh.saving import SAVED, Act, Layout
from tests.support.stage import Stage

SAVING = "tests.support.mesh.saving"
FOUR = (0, 1, 2, 3)


def play(stage: Stage, *acts: Act) -> list[dict[str, torch.Tensor]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = [{"worker": worker, "port": store.port, "acts": list(acts)} for worker in range(4)]
    found: list[dict[str, torch.Tensor]] = stage.play(SAVING, "perform", given)[0]
    return found


def test_what_is_learnt_is_nearly_that_of_one_process(stage: Stage) -> None:
    """With tied weights, layers that tensor parallelism does not divide, and parameters that nothing uses: those who
    hold the same must agree. A member that was called away inside of a vote owes what it would have owed; one that is
    left alone with its part sends nothing, and adds what it still owes."""
    mesh, spec = Degrees(data=2, tensor=2), "dp2.tp2:int8=16:always"
    scripts = [
        Script("gpt", spec, (Generation(mesh, FOUR, STEPS),)),
        Script("gpt", spec, (Generation(mesh, FOUR, 1, (1, 2)), Generation(mesh, FOUR, STEPS))),
        Script("gpt", spec, (Generation(mesh, FOUR, 2), Generation(Degrees(tensor=2), (0, 1), STEPS))),
        Script("gpt", "dp2.pp2:int8=16:always", (Generation(Degrees(data=2, pipeline=2), FOUR, STEPS),)),
        Script("sometimes", "dp2.fsdp2:bf16", (Generation(Degrees(data=2, sharded=2), FOUR, STEPS),)),
    ]
    found = [generations[-1] for generations in follow(stage, scripts)]
    for script, held in zip(scripts, found, strict=True):
        try:
            check(script.case, held, tolerance=0.02)
        except AssertionError as error:
            raise AssertionError(f"{script}: {error}") from error
    calm, called_away = found[0], found[1]
    assert any("gradients are compressed" in line for line in calm[0].plan)
    assert [one.began_at for one in called_away] == [2] * 4
    assert_same(put_together(calm), put_together(called_away))


def test_a_resumed_run_owes_what_was_owed(stage: Stage, tmp_path: Path) -> None:
    folder, other = tmp_path / "saved", tmp_path / "smooth"
    folder.mkdir()
    other.mkdir()
    layout = Layout("dp2.tp2:topk=0.1:always", 4)
    save, load, smooth = Act(layout, save=str(folder)), Act(layout, load=str(folder)), Act(layout, scratch=str(other))
    fewer = Act(Layout("tensor:2", 2), load=str(folder))  # without compression it is left out
    _, resumed, straight, _ = play(stage, save, load, smooth, fewer)
    assert_same(resumed, straight)
    saved = saved_at(folder, SAVED).tensors
    owed = {name: tensor for name, tensor in saved.items() if name.startswith("compression/residual/")}
    assert {name.split("/")[2] for name in owed} == {"0", "1"}, "by data index"
    assert all(tensor.shape == saved["model/" + name.split("/", 3)[3]].shape for name, tensor in owed.items())
    assert all(any(bool(t.any()) for name, t in owed.items() if f"/{row}/" in name) for row in (0, 1))


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    assert [name for name, value in one.items() if not torch.equal(value, other[name])] == []
