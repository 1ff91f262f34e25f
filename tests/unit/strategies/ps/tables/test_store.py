"""Sparse tables against torch, against a dict, and against themselves with another history or another division."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from distbelief.errors import DistBeliefError, NotEnoughMemory
from distbelief.strategies.ps.tables.rowbuckets import BUCKETS, bucket_of, part_of
from distbelief.strategies.ps.tables.rowoptimizers import RowOptimizer
from distbelief.strategies.ps.tables.store import RowArray, RowSlots, Table
from distbelief.strategies.tables.rowinit import RowInit, TableForm

FORM = TableForm("words", rows=500, width=6, seed=3)
OPTIMIZERS = {name: RowOptimizer(name, lr=0.1) for name in ("sgd", "adagrad", "adam")}
Pushes = list[tuple[torch.Tensor, torch.Tensor]]


def endless_pushes(seed: int, form: TableForm, most: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Few and many rows, some of them several times; now and then none."""
    made = torch.Generator().manual_seed(seed)
    while True:
        size = int(torch.randint(0, most, (), generator=made))
        among = int(torch.randint(1, form.rows + 1, (), generator=made))
        rows = torch.randint(0, among, (size,), generator=made)
        # Not randn: its bits depend on the processor.
        whole = torch.randint(-(2**23), 2**23, (size, form.width), generator=made)
        yield rows, whole.float() * 2**-21


def random_pushes(seed: int, count: int, form: TableForm = FORM, most: int = 60) -> Pushes:
    return list(islice(endless_pushes(seed, form, most), count))


def pushed(pushes: Pushes, optimizer: RowOptimizer, form: TableForm = FORM) -> Table:
    table = Table(form, optimizer)
    for rows, gradients in pushes:
        table.push(rows, gradients)
    return table


def contents(table: Table) -> dict[str, bytes]:
    return {name: entry.numpy().tobytes() for name, entry in table.state().items()}


# --- values ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sgd", "adagrad"])
def test_the_values_of_torch_with_an_embedding_of_sparse_gradients(name: str) -> None:
    everything = torch.arange(FORM.rows)
    table = Table(FORM, RowOptimizer(name, lr=0.1, initial=0.3))
    module = torch.nn.Embedding(FORM.rows, FORM.width, sparse=True)
    module.weight.data.copy_(table.pull(everything))
    theirs: torch.optim.Optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    if name == "adagrad":
        theirs = torch.optim.Adagrad(module.parameters(), lr=0.1, initial_accumulator_value=0.3)
    for rows, gradients in random_pushes(1, 80):
        module.zero_grad()
        (module(rows) * gradients).sum().backward()
        theirs.step()
        table.push(rows, gradients)
    assert 100 < table.resident < FORM.rows
    torch.testing.assert_close(table.pull(everything), module.weight.detach(), rtol=1e-5, atol=1e-6)


def test_adam_gives_the_values_of_sparse_adam_on_the_steps_of_each_row() -> None:
    """One table of torch for every row: there, the table's count of steps is that row's."""
    table = Table(FORM, OPTIMIZERS["adam"])
    modules = [torch.nn.Embedding(1, FORM.width, sparse=True) for _ in range(12)]
    optimizers = [torch.optim.SparseAdam(list(m.parameters()), lr=0.1) for m in modules]
    for row, module in enumerate(modules):
        module.weight.data.copy_(table.pull(torch.tensor([row])))
    for rows, gradients in random_pushes(2, 60, TableForm("few", rows=12, width=FORM.width), most=12):
        for row in rows.unique().tolist():
            modules[row].zero_grad()
            (
                modules[row](torch.zeros(int((rows == row).sum()), dtype=torch.int64)) * gradients[rows == row]
            ).sum().backward()
            optimizers[row].step()
        table.push(rows, gradients)
    expected = torch.cat([m.weight.detach() for m in modules])
    torch.testing.assert_close(table.pull(torch.arange(12)), expected, rtol=1e-5, atol=1e-5)


def test_a_million_pushes_to_one_row_in_one_message_count_all() -> None:
    table = Table(TableForm("hot", rows=3, width=1, init=RowInit("zeros")), RowOptimizer("sgd", lr=1.0))
    table.push(torch.ones(1_000_000, dtype=torch.int64), torch.ones(1_000_000, 1))
    assert table.pull(torch.tensor([0, 1, 2])).flatten().tolist() == [0.0, -1_000_000.0, 0.0]


# --- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_same_pushes_give_the_same_bits_also_where_the_backup_was_pulled_from_and_restarted(name: str) -> None:
    pushes = random_pushes(4, 60)
    primary, backup = Table(FORM, OPTIMIZERS[name]), Table(FORM, OPTIMIZERS[name])
    for number, (rows, gradients) in enumerate(pushes):
        primary.push(rows, gradients)
        backup.pull(torch.arange(number, FORM.rows, 7))
        backup.push(rows, gradients.clone())
        if number % 20 == 10:
            state, backup = backup.state(), Table(FORM, OPTIMIZERS[name])
            backup.load(state)
    assert contents(primary) == contents(backup)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_any_number_of_servers_gives_the_same_bits(name: str) -> None:
    pushes = random_pushes(5, 40)
    alone = pushed(pushes, OPTIMIZERS[name])
    for servers in (2, 3, 7):
        parts = [Table(FORM, OPTIMIZERS[name]) for _ in range(servers)]
        for rows, gradients in pushes:
            owner = torch.from_numpy(part_of(rows.numpy(), servers))
            for server, part in enumerate(parts):
                part.push(rows[owner == server], gradients[owner == server])
        together = Table(FORM, OPTIMIZERS[name])
        states = [part.state() for part in parts]
        whole = {key: torch.cat([state[key] for state in states]) for key in states[0]}
        order = whole["rows"].argsort()
        together.load({key: one[order] for key, one in whole.items()})
        assert contents(together) == contents(alone)


def test_equal_contents_give_equal_bytes_whatever_their_history() -> None:
    rows, gradients = torch.tensor([30, 10, 20]), torch.randn(3, FORM.width)
    one, other = pushed([(rows, gradients)], OPTIMIZERS["adam"]), Table(FORM, OPTIMIZERS["adam"])
    for place in (2, 0, 1):
        other.push(rows[place : place + 1], gradients[place : place + 1])
    assert contents(one) == contents(other)
    assert one.state()["rows"].tolist() == [10, 20, 30]


def fingerprint() -> str:
    told = hashlib.sha256()
    for optimizer in OPTIMIZERS.values():
        for entry in contents(pushed(random_pushes(7, 40), optimizer)).values():
            told.update(entry)
    return told.hexdigest()


def test_another_instruction_set_gives_the_same_bits() -> None:
    """This program again, with numpy and torch kept from all that not every processor has."""
    beyond = np._core._multiarray_umath.__cpu_dispatch__
    plain = {"NPY_DISABLE_CPU_FEATURES": " ".join(beyond), "ATEN_CPU_CAPABILITY": "default"}
    program = (
        f"import numpy as np, {__name__} as t; f = np._core._multiarray_umath.__cpu_features__;"
        f"assert not any(f[name] for name in {beyond!r}); print(t.fingerprint())"
    )
    there = subprocess.run([sys.executable, "-c", program], env={**os.environ, **plain}, capture_output=True, text=True)
    assert there.stdout.strip() == fingerprint(), there.stderr


# --- residence -------------------------------------------------------------------------------------------------------


def test_a_pull_only_looks() -> None:
    table, rows = Table(FORM, OPTIMIZERS["adagrad"]), torch.tensor([4, 9, 4, 0])
    seen = table.pull(rows)
    assert table.resident == 0
    assert torch.equal(table.pull(rows), seen)
    assert table.pull(torch.empty(0, dtype=torch.int64)).shape == (0, FORM.width)
    table.pull(rows).zero_()  # a copy: what is done to it is not done to the table
    assert torch.equal(table.pull(rows), seen)


def test_growth_keeps_every_row() -> None:
    form = TableForm("large", rows=10**12, width=3, init=RowInit("zeros"))
    table = Table(form, RowOptimizer("sgd", lr=1.0))
    rows = torch.from_numpy(np.random.default_rng(0).choice(10**12, 30_000, replace=False))
    for part in rows.split(999):
        table.push(part, (part % 1000).float()[:, None].expand(-1, 3))
    assert table.resident == 30_000
    assert torch.equal(table.pull(rows), -(rows % 1000).float()[:, None].expand(-1, 3))
    assert not table.pull(rows.add(1)[~torch.isin(rows + 1, rows)]).any()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_memory_is_that_of_the_rows_touched() -> None:
    table = Table(TableForm("users", rows=50_000_000, width=16), OPTIMIZERS["adagrad"])
    rows = torch.from_numpy(np.random.default_rng(0).choice(50_000_000, 100_000, replace=False))
    gradients = torch.ones(5_000, 16)
    table.push(rows[:5_000], gradients)
    before = resident_bytes()
    for part in rows[5_000:].split(5_000):
        table.push(part, gradients)
    # Values and squares of 16 numbers each, the row's number, and its place. The dense table would be 6,400,000,000.
    assert resident_bytes() - before < 1.5 * 100_000 * (2 * 64 + 8 + 16)
    assert table.resident == 100_000


@given(st.lists(st.lists(st.integers(0, 2**62), max_size=400), max_size=12), st.integers(0, 2**32))
@settings(max_examples=40, deadline=None)
def test_slots_are_those_of_a_dict(batches: list[list[int]], seed: int) -> None:
    slots, told = RowSlots(), {}
    bulk = np.random.default_rng(seed).permutation(5_000)[:2_500] * 64  # more than the first table has room for
    for batch in [*batches, bulk.tolist(), *batches]:
        new = np.array(sorted({row for row in batch if row not in told}), np.int64)
        told.update(zip(new.tolist(), slots.add(new).tolist(), strict=True))
        asked = np.array([*batch, *[row + 1 for row in batch]], np.int64)
        assert slots.find(asked).tolist() == [told.get(row, -1) for row in asked.tolist()]
    assert slots.numbers.tolist() == sorted(told, key=told.__getitem__)


def test_an_array_that_grows_moves_and_does_not_forget() -> None:
    array = RowArray(None, np.int64)
    for count in (1, 1024, 1025, 70_000):
        array.reserve(count)
        array.scatter(np.array([count - 1]), np.array([count]))
    with pytest.raises(NotEnoughMemory, match="no memory for"):
        array.reserve(2**52)
    assert array.gather(np.array([0, 1023, 1024, 69_999, 5])).tolist() == [1, 1024, 1025, 70_000, 0]


# --- which part ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stride", [1, 2, 64, 1000, 1024, 2**20, 999_983])
def test_rows_are_spread_evenly_also_where_their_numbers_are_not(stride: int) -> None:
    rows = torch.arange(200_000) * stride
    assert (torch.bincount(bucket_of(rows), minlength=BUCKETS) - 200_000 / BUCKETS).abs().max() < 6 * (
        200_000 / BUCKETS
    ) ** 0.5
    for servers in (2, 3, 8):
        counts = np.bincount(part_of(rows.numpy(), servers), minlength=servers)
        assert counts.max() < 1.03 * 200_000 / servers


# --- what is refused -------------------------------------------------------------------------------------------------


def test_wrong_rows_and_gradients_are_refused_and_change_nothing() -> None:
    table = pushed(random_pushes(1, 5), OPTIMIZERS["adam"])
    before, good = contents(table), torch.ones(2, FORM.width)
    for rows, gradients, told in (
        (torch.tensor([1, 500]), good, "no row 500: it has 500 rows"),
        (torch.tensor([-1, 3]), good, "no row -1"),
        (torch.tensor([1, 2], dtype=torch.int32), good, "int32"),
        (torch.tensor([[1, 2]]), good, r"shape \[1, 2\]"),
        (torch.tensor([1, 2]), good[:1], r"shape \[1, 6\]"),
        (torch.tensor([1, 2]), good.double(), "float64"),
    ):
        with pytest.raises(DistBeliefError, match=told) as caught:
            table.push(rows, gradients)
        assert caught.value.hint
    assert contents(table) == before


def test_a_state_that_does_not_fit_is_refused_and_changes_nothing() -> None:
    table = pushed(random_pushes(1, 5), OPTIMIZERS["adam"])
    before, state = contents(table), table.state()
    for wrong, told in (
        (pushed(random_pushes(1, 5), OPTIMIZERS["sgd"]).state(), "exp_avg"),
        ({**state, "rows": state["rows"].flip(0)}, "ascending"),
        ({**state, "rows": state["rows"] + 400}, "no row"),
        ({**state, "values": state["values"][:, :3]}, "'values'"),
        ({**state, "step": state["step"].float()}, "'step' is float32"),
    ):
        with pytest.raises(DistBeliefError, match=told):
            table.load(wrong)
        assert contents(table) == before
    state["values"].zero_()  # a copy
    assert contents(table) == before
