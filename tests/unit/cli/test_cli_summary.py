"""What is printed after a run."""

from __future__ import annotations

import io
import json
import math
import os
import pty

import pytest

from distbelief.cli.summary import KEYS, print_json, print_summary
from distbelief.result import Result

HASH = "0123456789abcdef" * 4


def result(**changes: object) -> Result:
    usual: dict[str, object] = {
        "run_dir": "runs/digits-1",
        "steps": 400,
        "loss": 0.03125,
        "metrics": {"loss": 0.1034, "accuracy": 0.97222},
        "weights_sha256": HASH,
        "samples_per_s": 1234.4,
        "wall_s": 12.34,
        "workers": 2,
        "recoveries": 0,
        "reexecuted": 0,
        "servers": 0,
        "servers_lost": 0,
    }
    return Result(**{**usual, **changes})  # type: ignore[arg-type]


def test_plain_lines() -> None:
    stream = io.StringIO()
    print_summary(result(), stream)
    assert stream.getvalue().splitlines() == [
        "accuracy: 0.9722",
        "validation loss: 0.1034",
        "training loss: 0.0312",
        "speed: 1,234 samples/s on 2 workers",
        "time: 12.3 s for 400 steps",
        f"weights sha256: {HASH}",
        "run: runs/digits-1",
    ]


def test_recoveries_are_told_when_there_were_some() -> None:
    stream = io.StringIO()
    print_summary(result(recoveries=1, metrics={}), stream)
    assert "recoveries: 1" in stream.getvalue().splitlines()


def test_steps_that_were_executed_again_are_told() -> None:
    stream = io.StringIO()
    print_summary(result(recoveries=1, reexecuted=7), stream)
    assert "executed again: 7 steps" in stream.getvalue().splitlines()


def test_parameter_servers_are_told_where_there_are_some() -> None:
    stream = io.StringIO()
    print_summary(result(servers=2, servers_lost=3), stream)
    lines = stream.getvalue().splitlines()
    assert "speed: 1,234 samples/s on 2 workers and 2 parameter servers" in lines
    assert "servers lost: 3" in lines


def test_on_a_terminal_the_hash_is_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    main, other = pty.openpty()
    with os.fdopen(main, "rb", buffering=0) as screen, os.fdopen(other, "w") as terminal:
        print_summary(result(), terminal)
        terminal.flush()
        shown = b""
        while b"runs/digits-1" not in shown:
            shown += screen.read(4096)
    assert b"done" in shown
    assert HASH.encode() in shown


def test_json_is_one_line_with_the_promised_keys(capsys: pytest.CaptureFixture[str]) -> None:
    print_json(result(loss=math.nan, metrics={"accuracy": math.inf, "loss": 0.5}))
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    shown = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert tuple(shown) == KEYS
    assert shown["loss"] is None
    assert shown["metrics"] == {"accuracy": None, "loss": 0.5}
    assert (shown["steps"], shown["weights_sha256"]) == (400, HASH)
