"""The rules of the design's exactness section: that they hold, and that a trainer which breaks one would be noticed.

Those about single shards and about the commit are in test_exactness_shards.py and test_exactness_commit.py.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from functools import reduce

import pytest
import torch
from torch import nn, optim
from torch.distributed import TCPStore

from distbelief.shards import Range, program
from distbelief.strategies.flatmodel.layout import ALIGN
from distbelief.transport.exchange import tree_add
from tests.support.replicas.member import BREAK, Place, Trained
from tests.support.stage import Stage

MEMBER = "tests.support.replicas.member"

_names = itertools.count()


# --- all rules together: any members, any assignment, any transport, and plain PyTorch give the same bits ------------


def evenly(shards: int, size: int) -> tuple[Range, ...]:
    return tuple((rank * shards // size, (rank + 1) * shards // size) for rank in range(size))


def trained(stage: Stage, ranges: Sequence[Range], broken: str = "", port: int = 0) -> list[Trained]:
    """What each of the members with these shards has at the end of one training."""
    name, transport = f"group {next(_names)}", "torch" if port else "shared"
    places = [Place(rank, tuple(ranges), transport, port, name) for rank in range(len(ranges))]
    return stage.play(MEMBER, "train", [{"place": place, "broken": broken} for place in places])


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


@pytest.mark.parametrize("shards", [8, 7])
def test_any_members_and_assignment_give_the_bits_of_plain_pytorch(stage: Stage, port: int, shards: int) -> None:
    [plain] = stage.play(MEMBER, "plain", [{"shards": shards}])
    assignments = [evenly(shards, size) for size in (1, 2, 3, 5)]
    assignments += [((0, 1), (1, shards)), ((0, 6), (6, shards))]
    found = [member for ranges in assignments for member in trained(stage, ranges)]
    found += [member for size in (1, 3) for member in trained(stage, evenly(shards, size), port=port)]
    assert {run.sha256 for run in found} == {plain.sha256}
    assert all(run.losses == plain.losses for run in found)
    assert {tuple(run.fingerprints) for run in found} == {tuple(found[0].fingerprints)}


@pytest.mark.parametrize("rule", BREAK)
def test_a_broken_rule_is_noticed(stage: Stage, rule: str) -> None:
    """The same comparison, with a trainer that breaks one rule: it does not stand it."""
    [right] = trained(stage, evenly(8, 1))
    broken = [member for size in (1, 3) for member in trained(stage, evenly(8, size), broken=rule)]
    assert {run.sha256 for run in broken} != {right.sha256}
    assert {run.unused_moved for run in broken} == {rule == "untouched"}


# --- the order of addition -------------------------------------------------------------------------------------------


def tree_sum(values: torch.Tensor) -> torch.Tensor:
    order = program(len(values), len(values), {(v, v + 1): v for v in range(len(values))})
    out = torch.empty_like(values[0])
    tree_add(order, list(values), out, [torch.empty_like(out) for _ in range(8)])
    return out


def test_the_tree_is_not_any_order() -> None:
    """Eight numbers whose sum shows in which order they were added: 2^24 swallows a single 1, but not a 2."""
    large = 2.0**24
    values = torch.tensor([[large], [1.0], [1.0], [1.0], [1.0], [1.0], [1.0], [-large]])
    pairs = [values[i] + values[i + 1] for i in range(0, 8, 2)]
    by_hand = (pairs[0] + pairs[1]) + (pairs[2] + pairs[3])
    left_to_right = reduce(torch.add, values)
    assert torch.equal(tree_sum(values), by_hand)
    assert not torch.equal(by_hand, left_to_right)
    assert not torch.equal(by_hand, values.double().sum(0).float())


def test_an_empty_shard_is_no_node_not_zeros() -> None:
    """-0.0 + 0.0 is +0.0: a sum with a zero shard in it has other bits than the sum without."""
    values = torch.tensor([[-0.0], [-0.0], [float("nan")]])
    order = program(4, 2, {(0, 1): 0, (1, 2): 1})
    out = torch.empty(1)
    tree_add(order, list(values[:2]), out, [torch.empty(1)])
    assert math.copysign(1.0, out.item()) == -1.0
    assert math.copysign(1.0, float(out + torch.zeros(1))) == 1.0


# --- layout ----------------------------------------------------------------------------------------------------------


def stepped(cuts: Sequence[int], numel: int = 5003) -> torch.Tensor:
    """torch's fused optimizer on one parameter of that many elements, cut into several at these places."""
    generator = torch.Generator().manual_seed(0)
    edges = [0, *cuts, numel]
    start = torch.randn(numel, generator=generator)
    pieces = [nn.Parameter(start[a:b].clone()) for a, b in itertools.pairwise(edges)]
    optimizer = optim.SGD(pieces, lr=0.1, momentum=0.9, weight_decay=0.01, fused=True)
    for _ in range(5):
        gradient = torch.randn(numel, generator=generator)
        for piece, a, b in zip(pieces, edges, edges[1:], strict=False):
            piece.grad = gradient[a:b].clone()
        optimizer.step()
    return torch.cat([piece.detach() for piece in pieces])


def test_cuts_at_multiples_of_64_elements_change_no_bits_and_others_do() -> None:
    whole = stepped([])
    assert torch.equal(stepped([ALIGN, 10 * ALIGN, 77 * ALIGN]), whole)
    assert torch.equal(stepped(range(ALIGN, 5003, ALIGN)), whole)
    if torch.backends.cpu.get_cpu_capability() != "DEFAULT":  # without vector instructions every cut is as good
        assert not torch.equal(stepped(range(3, 5003, 5)), whole)


# --- scalars ---------------------------------------------------------------------------------------------------------


def test_a_norm_by_tiles_does_not_depend_on_who_owns_them_and_one_by_members_does() -> None:
    generator = torch.Generator().manual_seed(0)
    tiles = [torch.randn(1000, generator=generator) * 10.0**k for k in (-3, 2, 0, 1, -1, 2, 2, 0)]

    def by_tiles(owned: Sequence[Sequence[int]]) -> float:
        squares = [float(torch.linalg.vector_norm(tiles[t], dtype=torch.float64)) ** 2 for mine in owned for t in mine]
        return math.sqrt(math.fsum(squares))

    def by_members(owned: Sequence[Sequence[int]]) -> float:
        norms = [torch.cat([tiles[t] for t in mine]).norm() for mine in owned]
        return float(torch.stack(norms).norm())

    ownerships = [[range(rank, 8, size) for rank in range(size)] for size in range(1, 9)]
    assert len({by_tiles(owned) for owned in ownerships}) == 1
    assert len({by_members(owned) for owned in ownerships}) > 1
