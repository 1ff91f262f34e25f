"""Divided models whose gradients are compressed between members that hold the same part."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from forked_stage import Stage
from mesh_member import STEPS, Generation, Script
from mesh_saving_member import SAVED, Act, Layout
from test_mesh_replica import check, follow, put_together

from distbelief.strategies.degrees import Degrees
from distbelief.worker.origin import saved_at

SAVING = str(Path(__file__).with_name("mesh_saving_member.py"))
FOUR = (0, 1, 2, 3)


def play(stage: Stage, *acts: Act) -> list[dict[str, torch.Tensor]]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    given = [{"worker": worker, "port": store.port, "acts": list(acts)} for worker in range(4)]
    found: list[dict[str, torch.Tensor]] = stage.play(SAVING, "perform", given)[0]
    return found


def test_what_is_learnt_is_nearly_that_of_one_process(stage: Stage) -> None:
    """With tied weights, layers that tensor parallelism does not divide, and parameters that nothing uses: those who
    hold the same must agree, to the last bit of what others would round otherwise."""
    layouts = [
        ("gpt", "dp2.pp2:bf16:always", Degrees(data=2, pipeline=2)),
        ("gpt", "dp2.tp2:int8=16:always", Degrees(data=2, tensor=2)),
        ("awkward", "dp4:int8=16:always", Degrees(data=4)),
        ("sometimes", "dp2.fsdp2:bf16:always", Degrees(data=2, sharded=2)),
        ("cnn", "dp3:bf16", Degrees(data=3)),
    ]
    scripts = [Script(case, spec, (Generation(d, tuple(range(d.size)), STEPS),)) for case, spec, d in layouts]
    for script, (held,) in zip(scripts, follow(stage, scripts), strict=True):
        try:
            check(script.case, held, tolerance=0.02)
        except AssertionError as error:
            raise AssertionError(f"{script}: {error}") from error
        assert any("gradients are compressed" in line for line in held[0].plan)


def test_a_member_that_was_called_away_owes_what_it_would_have_owed(stage: Stage) -> None:
    degrees, spec = Degrees(data=2, tensor=2), "dp2.tp2:topk=0.1:always"
    smooth = Script("gpt", spec, (Generation(degrees, FOUR, STEPS),))
    rough = Script("gpt", spec, (Generation(degrees, FOUR, 1, (1, 2)), Generation(degrees, FOUR, STEPS)))
    calm, broken = follow(stage, [smooth, rough])
    assert [one.began_at for one in broken[1]] == [2] * 4
    assert_same(put_together(calm[0]), put_together(broken[1]))


def test_when_members_leave_those_who_stay_go_on(stage: Stage) -> None:
    """Alone with its part, a member sends nothing, and adds what it still owes."""
    generations = (Generation(Degrees(data=2, tensor=2), FOUR, 2), Generation(Degrees(tensor=2), (0, 1), STEPS))
    ((_, held),) = follow(stage, [Script("gpt", "dp2.tp2:int8=16:always", generations)])
    check("gpt", held, tolerance=0.02)


@pytest.mark.parametrize("method", ["int8=16", "topk=0.1"])
def test_a_resumed_run_owes_what_was_owed(stage: Stage, tmp_path: Path, method: str) -> None:
    folder, other = tmp_path / "saved", tmp_path / "smooth"
    folder.mkdir()
    other.mkdir()
    layout = Layout(f"dp2.tp2:{method}:always", 4)
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
