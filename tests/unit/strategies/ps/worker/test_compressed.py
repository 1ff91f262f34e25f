"""What workers owe the servers: who takes it over from a checkpoint, and that nobody takes it twice."""

from __future__ import annotations

import torch
from torch import nn

from distbelief.errors import DistBeliefError
from distbelief.strategies.base import Saved
from distbelief.strategies.flatmodel.layout import lay_out
from distbelief.strategies.ps.protocol.messages import CompleteUpdate, Inspect, Inspected, RequestLease
from distbelief.strategies.ps.rules.leases import LeaseTerms
from distbelief.strategies.ps.server.asyncslice import LeaseSlice
from distbelief.strategies.ps.server.stores import Change
from distbelief.strategies.ps.worker.compressed import OwedResiduals, saved_tensors

MODEL = nn.Linear(3, 2)
LAYOUT = lay_out(MODEL)
STEP = 20


def saved_by(members: int) -> Saved:
    tensors = {
        f"compression/residual/{member}/{name}": torch.full(value.shape, 10.0**member)
        for member in range(members)
        for name, value in MODEL.named_parameters()
    }
    return Saved(STEP, tensors)


def taken(applied: int, began: int, rank: int, size: int, members: int = 3) -> set[float]:
    owed, into = OwedResiduals(LAYOUT, "int8"), torch.zeros(LAYOUT.size_bytes // 4)
    owed.add_once(lambda step=-1: saved_by(members), applied, began, (rank, size), into)
    return {number for _, place in owed.places for number in into[place.part].tolist()}


def test_a_run_that_begins_from_a_checkpoint_shares_out_what_was_owed() -> None:
    assert [taken(STEP, STEP, rank, 2) for rank in range(2)] == [{101.0}, {10.0}]
    assert [taken(STEP, STEP, rank, 4) for rank in range(4)] == [{1.0}, {10.0}, {100.0}, {0.0}]


def test_a_newcomer_at_the_step_of_a_checkpoint_takes_nothing_that_others_have() -> None:
    """The run has gone on from step 0, and its members have what they saved a moment ago."""
    assert taken(STEP, 0, 1, 3) == {0.0}


def test_no_checkpoint_of_that_step_is_nothing_owed() -> None:
    def missing(step: int = -1) -> Saved | None:
        raise DistBeliefError("there is no checkpoint")

    assert saved_tensors(missing, 7) == {}
    assert saved_tensors(lambda step=-1: saved_by(1), 7) == {}


def test_the_ledger_says_where_the_parameters_began() -> None:
    ledger = LeaseSlice(LeaseTerms(STEP, 100, 1))
    for content in (RequestLease(1), CompleteUpdate(0, 1, 1, [0.5], [8], 0.0)):
        ledger.apply(Change(content))
    copy = LeaseSlice(LeaseTerms(0, 100, 1))
    copy.load(ledger.state())
    for one in (ledger, copy):
        framed = one.reply(Inspect(1, 0), "", everywhere=True, caught_up=True)
        assert framed is not None
        assert isinstance(framed.message, Inspected)
        assert (framed.message.version, framed.message.began) == (STEP + 1, STEP)
