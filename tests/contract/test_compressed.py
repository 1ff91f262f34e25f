"""The contract of compressed exchanges: everybody applies the same bytes, and what is not sent is sent later."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed import TCPStore

from tests.support.exchange.member import Seat
from tests.support.stage import Stage

MEMBER = "tests.support.exchange.compressed"
METHODS = ["bf16", "int8", "int8=64", "topk=0.05", "powersgd=2"]
WHERE = ["host", "device"]
STEPS = 8
CLOSE = 1e-4  # rounding of float32, over all steps

_names = itertools.count()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def seats(port: int, size: int, tiles: str = "mixed", **more: Any) -> list[dict[str, Any]]:
    name = f"compressed {next(_names)}"
    return [{"seat": Seat("torch", name, port, rank, size, 8, tiles), **more} for rank in range(size)]


@pytest.mark.parametrize("size", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("method", METHODS)
def test_all_apply_the_same_and_nothing_is_lost(stage: Stage, port: int, method: str, size: int) -> None:
    found = stage.play(MEMBER, "several_steps", seats(port, size, method=method, steps=STEPS))
    assert len({one.digest for one in found}) == 1
    assert max(one.missing for one in found) < CLOSE
    wire, plain = found[0].traffic
    if size == 1:
        assert not any(found[0].packed)
        assert (wire, plain, found[0].owed) == (0, 0, 0.0)
    else:
        assert all(found[0].packed)
        assert max(one.owed for one in found) > 0.0, "something was lost on the way, and kept"
        assert 0 < wire < plain


@pytest.mark.parametrize(("tiles", "size"), [("even", 2), ("even", 3), ("mixed", 3)])
@pytest.mark.parametrize("method", METHODS)
def test_members_on_devices_send_and_apply_what_those_on_hosts_do(
    stage: Stage, port: int, method: str, tiles: str, size: int
) -> None:
    """Without a device the host's memory stands in for it, in the same operations. PowerSGD's products are rounded by
    whatever computes them."""
    found = {}
    for kind, on_device in {"host": [], "device": range(size), "both kinds": range(0, size, 2)}.items():
        members = seats(port, size, tiles, method=method, steps=STEPS)
        for rank in on_device:
            members[rank]["where"] = "device"
        found[kind] = stage.play(MEMBER, "several_steps", members)
    assert max(one.missing for members in found.values() for one in members) < CLOSE
    assert len({members[0].traffic for members in found.values()}) == 1
    if not method.startswith("powersgd") or not torch.cuda.is_available():
        assert len({one.digest for members in found.values() for one in members}) == 1
        assert len({tuple(one.owed for one in members) for members in found.values()}) == 1


@pytest.mark.parametrize("method", METHODS)
def test_who_is_left_alone_applies_all_that_it_owes(stage: Stage, port: int, method: str) -> None:
    found = [stage.play(MEMBER, "left_alone", seats(port, 2, "even", method=method, where=where))[0] for where in WHERE]
    assert max(missing for missing, _ in found) < CLOSE
    assert len({digest for _, digest in found}) == 1 or torch.cuda.is_available()


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("interrupt", ["published", "collected"])
@pytest.mark.parametrize("method", METHODS)
def test_a_step_that_is_taken_again_consumes_nothing_twice(
    stage: Stage, port: int, method: str, interrupt: str, where: str
) -> None:
    given = {"method": method, "steps": STEPS, "where": where}
    smooth = stage.play(MEMBER, "several_steps", seats(port, 3, **given))
    rough = stage.play(MEMBER, "several_steps", seats(port, 3, **given, interrupt=interrupt))
    assert {one.digest for one in rough} == {one.digest for one in smooth}
    assert max(one.missing for one in rough) < CLOSE


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("method", METHODS)
def test_a_newcomer_applies_what_all_others_apply(stage: Stage, port: int, method: str, where: str) -> None:
    assert len(set(stage.play(MEMBER, "with_a_newcomer", seats(port, 3, method=method, where=where)))) == 1


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("method", METHODS)
def test_what_was_sent_of_a_parameter_that_no_shard_touched_is_still_owed(
    stage: Stage, port: int, method: str, where: str
) -> None:
    assert stage.play(MEMBER, "untouched", seats(port, 2, method=method, where=where)) == [0.0, 0.0]


@pytest.mark.parametrize("where", WHERE)
def test_a_compressor_slower_than_the_link_is_switched_off_by_all_at_one_step(
    stage: Stage, port: int, where: str
) -> None:
    found = stage.play(MEMBER, "too_slow", seats(port, 3, steps=STEPS, where=where))
    assert len({tuple(one.packed) for one in found}) == 1
    assert found[0].packed[0]
    assert not found[0].packed[-1]
    assert max(one.missing for one in found) < CLOSE, "what was owed went out with the first uncompressed step"
    # Some members have nothing to do in the step in which it is switched off; then they still owe it.
    assert min(one.owed for one in found) == 0.0
    assert [("int8 is off: the link carries" in line) for line in found[0].news] == [True]
    assert [one.news for one in found[1:]] == [[], []]
