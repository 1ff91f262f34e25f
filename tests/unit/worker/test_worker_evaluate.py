"""Evaluation: the members together give the values of one process over the whole validation data."""

from __future__ import annotations

import itertools
import os
import select
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
import torchmetrics
from torch.distributed import TCPStore
from torch.nn import functional as F

from distbelief.data.readers import ReaderError, ReadersLost
from distbelief.data.sources import as_source
from distbelief.worker.evaluate import Evaluator
from tests.support.stage import Stage
from tests.support.worker.evaluate import Rows, make_job, tables

MEMBER = "tests.support.worker.evaluate"

_names = itertools.count()


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


def evaluated(stage: Stage, size: int, *, readers: bool = False, port: int = 0) -> dict[str, Any]:
    """What all members agree on."""
    shared = {"size": size, "readers": readers, "port": port, "name": f"group {next(_names)}"}
    found = stage.play(MEMBER, "evaluate", [{"rank": rank, **shared} for rank in range(size)])
    assert all(member["metrics"] == found[0]["metrics"] for member in found)
    return found[0]


def test_any_members_give_the_same_values_as_one_process(stage: Stage, port: int) -> None:
    alone = evaluated(stage, 1)
    for size in (2, 3, 5):  # there are three shards to evaluate: two of five members have none
        assert evaluated(stage, size)["metrics"] == alone["metrics"]
    for size in (1, 3):
        assert evaluated(stage, size, port=port)["metrics"] == alone["metrics"]
    assert evaluated(stage, 2, readers=True)["metrics"] == alone["metrics"]

    model = make_job(False).model()  # type: ignore[operator]
    model.load_state_dict({name: torch.from_numpy(value) for name, value in alone["weights"].items()})
    x, y = tables()[1]
    with torch.no_grad():
        output = model.eval()(x)
    area = torchmetrics.AUROC(task="multiclass", num_classes=3)
    assert alone["metrics"] == {
        "loss": pytest.approx(F.cross_entropy(output, y).item(), rel=1e-6),
        "accuracy": (output.argmax(1) == y).double().mean().item(),
        "auroc": pytest.approx(area(output, y).item(), rel=1e-5),
        "total": float(y.sum()),
    }


@pytest.mark.parametrize(
    ("collate", "doing"), [(torch.stack, "making a batch of samples 0, 1, 2, "), (None, "reading sample 5 ")]
)
def test_a_failure_in_the_validation_data_says_so(collate: Any, doing: str) -> None:
    job = make_job(readers=True)
    x, y = job.validation.columns
    samples = Rows(x, y) if collate else Broken(x, y)
    evaluator = Evaluator(job, as_source(samples, collate), torch.device("cpu"))
    try:
        with pytest.raises(ReaderError, match=f"^`validation`: {doing}"):
            evaluator.rehearse(job.model())
    finally:
        evaluator.close()


def test_the_death_of_the_validation_readers_parent_is_no_error_of_the_data_set() -> None:
    """Else the run would end; a worker that loses its readers is replaced."""
    job = make_job(readers=True)
    evaluator = Evaluator(job, as_source(job.validation, None), torch.device("cpu"))
    try:
        (parent,) = {psutil.Process(pid).ppid() for pid in evaluator._feed._readers.pids}
        assert psutil.Process(parent).name() == "reader parent"
        ends = [os.pidfd_open(pid) for pid in (parent, *evaluator._feed._readers.pids)]
        os.kill(parent, signal.SIGKILL)
        for end in ends:  # a reader that is not dead yet would answer
            assert select.select([end], [], [], 60)[0]
            os.close(end)
        with pytest.raises(ReadersLost, match=r"^`validation`: the process that forks the readers .* is dead"):
            evaluator.rehearse(job.model())
    finally:
        evaluator.close()


class Broken(Rows):
    def __getitem__(self, sample: int) -> Any:
        if sample == 5:
            raise KeyError("no such image")
        return super().__getitem__(sample)
