"""A job that is no pure function is refused before it trains, or trains with `--impure`; its way out is exact."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from tests.support.runs.command import JOBS, Outcome

Cli = Callable[..., Outcome]
IMPURE = JOBS / "impure.py"
TOLD = "`teacher.weight` and `teacher.bias` are written in forward"


def test_an_impure_job_is_one_error_and_does_not_start(distbelief: Cli, tmp_path: Path) -> None:
    outcome = distbelief("train", IMPURE, "--workers", 3, "--run-dir", "run")
    said = outcome.stdout + outcome.stderr
    assert outcome.status == 2, said
    assert said.count("error:") == 1, said
    for text in (TOLD, "`Noise.__getitem__(", "make them buffers (`register_buffer`)", "--impure"):
        assert text in " ".join(said.split()), said
    assert not (tmp_path / "run" / "weights.safetensors").exists()
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    assert "generation" not in kinds


def test_an_impure_job_trains_when_the_user_insists(distbelief: Cli, tmp_path: Path) -> None:
    outcome = distbelief("train", IMPURE, "--workers", 3, "--impure", "--run-dir", "run")
    assert outcome.status == 0, outcome
    assert (tmp_path / "run" / "weights.safetensors").exists()
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (notice,) = [line["text"] for line in lines if line["kind"] == "notice" and "--impure" in line["text"]]
    assert TOLD in notice


def test_the_way_out_gives_the_same_weights_on_any_number_of_workers(distbelief: Cli) -> None:
    runs = [distbelief("train", IMPURE, "--set", "pure=true", "--workers", n, "--json").json for n in (1, 3)]
    assert runs[0]["weights_sha256"] == runs[1]["weights_sha256"]
