"""Tables in checkpoints: saved by any number of members, found again by any number of servers, bit for bit."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from distbelief.checkpoint.faults import CheckpointMismatch
from distbelief.checkpoint.manifest import Facts
from distbelief.checkpoint.reading import open_checkpoint, read_tensors, verify
from distbelief.checkpoint.saving import seal, write_part
from distbelief.coordinator.rules import explain
from distbelief.errors import DistBeliefError
from distbelief.job import Job
from distbelief.shards import Schedule
from distbelief.strategies.base import Saved
from distbelief.strategies.dataparallel.strategy import AllReduce
from distbelief.strategies.flatmodel.namedtensors import put_back
from distbelief.strategies.ps.strategy import ParameterServer
from distbelief.strategies.ps.tables.rowbuckets import part_of
from distbelief.strategies.ps.tables.saved import PortionWithTables, SavedTables, without_tables
from distbelief.strategies.ps.tables.specs import TableSpec
from distbelief.strategies.ps.worker.prepared import PreparedParameterServer
from distbelief.strategies.tables.embedding import EmbeddingTable
from distbelief.transport.shm.segment import Segment

Arrays = dict[str, torch.Tensor]
PARTS = 5
numbers = itertools.count()


def made_job(kind: str = "adam", rows: int = 5000) -> Job:
    optimizers = {"adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad, "sgd": torch.optim.SGD}

    def model() -> nn.Module:
        parts = {"users": EmbeddingTable(rows, 3), "never": EmbeddingTable(9, 2), "dense": nn.Linear(3, 1)}
        return nn.ModuleDict(parts)

    return Job(
        model=model,
        loss=F.mse_loss,
        optimizer=lambda parameters: optimizers[kind](parameters, lr=0.1),
        data=(torch.zeros(8, 1), torch.zeros(8, 1)),
        global_batch=4,
        steps=10,
    )


def prepared(job: Job) -> PreparedParameterServer:
    return PreparedParameterServer(job, Schedule(8, 4, 2), torch.device("cpu"), ParameterServer())


def some_rows(spec: TableSpec, count: int) -> Arrays:
    made = torch.Generator().manual_seed(count)
    found: Arrays = {"rows": torch.randperm(spec.form.rows, generator=made)[:count]}
    found["values"] = torch.rand(count, spec.form.width, generator=made)
    for field in spec.optimizer.fields:
        shape = (count, spec.form.width) if field.wide else (count,)
        found[field.name] = (torch.rand(shape, generator=made) * 100).to(getattr(torch, field.dtype))
    return found


def part_in(tables: list[Arrays], part: int, parts: int = PARTS) -> list[Arrays]:
    """What one part has of these tables, rows ascending."""
    found = []
    for arrays in tables:
        mine = np.flatnonzero(part_of(arrays["rows"].numpy(), parts) == part)
        order = torch.from_numpy(mine[np.argsort(arrays["rows"].numpy()[mine])])
        found.append({key: array[order] for key, array in arrays.items()})
    return found


def whole(saved: Saved | None, specs: list[TableSpec]) -> list[Arrays]:
    """All parts together, rows ascending."""
    tables = SavedTables(saved, specs, PARTS)
    parts = [tables.part(part) for part in range(PARTS)]
    found = []
    for number in range(len(specs)):
        arrays = {key: torch.cat([part[number][key] for part in parts]) for key in parts[0][number]}
        order = arrays["rows"].argsort()
        found.append({key: array[order] for key, array in arrays.items()})
    return found


def saved_by(members: int, job: Job, tables: list[Arrays]) -> str:
    """Where the checkpoint is: each member saves some parts of the tables."""
    one = prepared(job)
    specs, folder = one.tables, f"memory://tables-{next(numbers)}"
    parts = [part_in(tables, part) for part in range(PARTS)]
    counts = [[len(arrays["rows"]) for arrays in part] for part in parts]

    class NoTiles:
        size_bytes = 12

        def entries(self) -> list[object]:
            return []

        def slices(self, copy: object, outside: object) -> list[object]:
            return []

    portions = [
        PortionWithTables(NoTiles(), specs, counts, range(rank, PARTS, members))  # type: ignore[arg-type]
        for rank in range(members)
    ]
    records = []
    for rank, portion in enumerate(portions):
        copy = Segment.private(portion.size_bytes)
        for part in portion.parts:
            shape = portion.shapes[part]
            content = copy.tensor(torch.uint8, portion.starts[part], shape.size_bytes)
            for views, arrays in zip(shape.views(content), parts[part], strict=True):
                for key, array in arrays.items():
                    views[key].copy_(array)
        record = write_part(folder, 5, rank + 1, members, portion.slices(copy, {}))
        assert sorted(record.entries, key=repr) == sorted(portion.entries(), key=repr)
        records.append(record)
    seal(folder, 5, Facts(), records)
    return folder


@pytest.mark.parametrize("kind", ["adam", "adagrad", "sgd"])
@pytest.mark.parametrize("members", [1, 3, 11])
@pytest.mark.parametrize(("lazily", "parts"), [(True, PARTS), (False, PARTS), (True, 2)])
def test_what_was_saved_is_found_again(kind: str, members: int, lazily: bool, parts: int) -> None:
    """Also where tables are cut into other parts than they were."""
    job = made_job(kind)
    specs = prepared(job).tables
    tables = [some_rows(specs[0], 40), some_rows(specs[1], 0)]
    folder = saved_by(members, job, tables)
    saved = Saved(5, open_checkpoint(folder, 5)[1] if lazily else read_tensors(folder, verify(folder, 5)))
    assert without_tables(saved, specs).tensors == {}
    found = SavedTables(saved, specs, parts)
    for part in range(parts):
        for given, again in zip(part_in(tables, part, parts), found.part(part), strict=True):
            assert given.keys() == again.keys()
            assert all(torch.equal(given[key], again[key]) for key in given)
            assert (part_of(again["rows"].numpy(), parts) == part).all()
            assert (np.diff(again["rows"].numpy()) > 0).all()


def test_weights_alone_begin_with_a_new_optimizer() -> None:
    specs = prepared(made_job("adagrad")).tables
    weights = {"model/users.rows": torch.tensor([7, 3]), "model/users.values": torch.ones(2, 3)}
    users, never = whole(Saved(0, weights), specs)
    assert users["sum"].tolist() == [[0.0] * 3] * 2
    assert len(never["rows"]) == 0
    assert [len(arrays["rows"]) for arrays in whole(None, specs)] == [0, 0]


def test_a_table_that_was_a_parameter_is_taken_with_its_optimizer_state() -> None:
    specs = prepared(made_job(rows=6)).tables
    dense = {
        "model/users.weight": torch.rand(6, 3),
        "optimizer/exp_avg/users.weight": torch.rand(6, 3),
        "optimizer/exp_avg_sq/users.weight": torch.rand(6, 3),
        "optimizer/step/users.weight": torch.tensor(4.0),
        "begun/users.weight": torch.tensor(1, dtype=torch.uint8),
    }
    users, _ = whole(Saved(4, dense), specs)
    assert users["rows"].tolist() == list(range(6))
    assert torch.equal(users["values"], dense["model/users.weight"])
    assert users["step"].tolist() == [4] * 6
    others = {**dense, "model/dense.bias": torch.zeros(1), "optimizer/step/dense.bias": torch.zeros(())}
    assert without_tables(Saved(4, others), specs).tensors.keys() == others.keys() - dense.keys()


def test_another_form_or_another_optimizer_is_refused() -> None:
    specs = prepared(made_job()).tables
    wrong = {"model/users.rows": torch.tensor([1]), "model/users.values": torch.ones(1, 4)}
    with pytest.raises(DistBeliefError, match=r"values is \[1, 4\], not \[1, 3\]"):
        whole(Saved(1, wrong), specs)
    other = {**wrong, "model/users.values": torch.ones(1, 3), "optimizer/sum/users.values": torch.ones(1, 3)}
    with pytest.raises(DistBeliefError, match="another optimizer"):
        whole(Saved(1, other), specs)


def test_without_servers_the_state_of_rows_is_refused() -> None:
    job = made_job("adagrad", rows=20)
    prepared_whole = AllReduce().prepare(job, Schedule(8, 4, 2), torch.device("cpu"))
    computer = prepared_whole._computer
    rows = {"model/users.rows": torch.tensor([3]), "model/users.values": torch.ones(1, 3)}
    with pytest.raises(CheckpointMismatch, match="table 'users' is in rows there"):
        put_back(Saved(2, {**rows, "begun/dense.bias": torch.tensor(1)}), None, computer, prepared_whole._recipe)  # type: ignore[arg-type]


def test_where_tables_are_is_a_fact_of_the_run() -> None:
    """A run whose bits count does not go on with tables elsewhere, and says why."""
    job, schedule = made_job(), Schedule(8, 4, 2)
    here = AllReduce().prepare(job, schedule, torch.device("cpu")).facts()
    there = prepared(job).facts()
    assert (here["tables"], there["tables"]) == ("in the workers", "on servers")
    difference, fix = explain.fact("tables", there["tables"], here["tables"])
    assert (difference, fix) == (
        "has its tables on servers, the run has them in the workers",
        "go on with a strategy that has tables in the workers",
    )
    assert prepared(job).parameters == 5000 * 3 + 9 * 2 + 4
