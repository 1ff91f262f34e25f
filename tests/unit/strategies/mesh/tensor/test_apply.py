"""Divided models against one process, with real members over gloo."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from distbelief.strategies.mesh.tensor.apply import held_box
from tests.support.stage import Stage

MEMBER = "tests.support.mesh.tensor"


def compare(stage: Stage, case: str, tensor: int, fsdp: int = 1, **more: Any) -> list[Any]:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    same = {"port": store.port, "case": case, "tensor": tensor, "fsdp": fsdp, **more}
    return stage.play(MEMBER, "compare", [{"rank": rank, **same} for rank in range(tensor * fsdp)])


def check(differences: list[Any]) -> None:
    for difference in differences:
        assert difference.boxes_right
        assert difference.tied
        assert difference.generator_equal
        assert difference.output < 1e-5
        assert difference.evaluation < 1e-5
        assert max(difference.gradients.values()) < 1e-5, difference.gradients


@pytest.mark.parametrize(
    ("case", "tensor"),
    [
        ("gpt", 2),
        ("gpt with dropout", 2),
        ("gpt with dropout", 4),
        ("mlp", 2),
        ("mlp", 4),
        ("gated", 2),
        ("gated", 4),
        ("encoder", 2),
        ("words", 2),
        ("words", 4),
        ("wishes", 2),
        ("wished words", 2),
    ],
)
def test_a_divided_model_computes_what_one_process_does(stage: Stage, case: str, tensor: int) -> None:
    check(compare(stage, case, tensor))


@pytest.mark.parametrize("case", ["gpt with dropout", "mlp", "gated", "words", "few"])
def test_fsdp_divides_what_tensor_parallelism_left(stage: Stage, case: str) -> None:
    differences = compare(stage, case, tensor=2, fsdp=2)
    check(differences)
    assert all(difference.divided < 0.35 for difference in differences)


@pytest.mark.parametrize("case", ["gpt with dropout", "mlp"])
def test_a_traced_model_draws_the_same_masks(stage: Stage, case: str) -> None:
    check(compare(stage, case, tensor=2, how="traced"))


@pytest.mark.parametrize("case", ["gpt with dropout", "mlp"])
def test_without_whole_masks_other_values_would_be_dropped(stage: Stage, case: str) -> None:
    for difference in compare(stage, case, tensor=2, how="broken"):
        assert difference.output > 1e-3
        assert not difference.generator_equal


def test_held_box_of_a_plain_tensor_is_all_of_it() -> None:
    assert held_box(torch.zeros(3, 4)) == ((0, 3), (0, 4))
    assert held_box(torch.tensor(1.0)) == ()
