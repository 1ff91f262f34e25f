"""Jobs that cannot be trained are refused while they are loaded, with the reason. (How a refusal reaches the one who
started the run is in tests/e2e/test_bad_input.py.)"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from distbelief.control.credentials import NO_CREDENTIAL
from distbelief.errors import JobError
from distbelief.options import RunOptions
from distbelief.worker.loading import load
from distbelief.worker.spec import JobSource, WorkerSpec

BROKEN = Path(__file__).resolve().parents[2] / "e2e" / "jobs" / "broken.py"


def refusal(fault: str) -> str:
    spec = WorkerSpec(
        worker=0, host="here", address="", credential=NO_CREDENTIAL, run_dir="", options=RunOptions(1, "allreduce"),
        job=JobSource(str(BROKEN), {"fault": fault}),
    )  # fmt: skip
    with pytest.raises(JobError) as caught:
        load(spec, None)
    return caught.value.message


@pytest.fixture(autouse=True)
def _same_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))  # a job file's folder is put into it


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("few", "4 shards are more than the 3 samples of the data set"),
        ("shards", "40 shards are more than the 16 samples of a global batch"),
        ("collate", "the collate function would never be called"),
        ("validation-collate", "`validation`: the collate function would never be called"),
        ("no-validation", "`validation_collate` is given, and `validation` is missing"),
        ("no-optimizer", "`optimizer` made a str"),
        ("metric", "the metric 'mean' must return (sum, weight)"),
        ("loss-shape", "`loss` must return one number"),
    ],
)
def test_a_job_that_cannot_be_trained(fault: str, text: str) -> None:
    assert text in refusal(fault)
