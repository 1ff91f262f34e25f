"""The live view, drawn into a console of 80 columns."""

from __future__ import annotations

import io
import json
import os
import pty
from pathlib import Path

import pytest
from rich.console import Console

from distbelief.observe.plain import PlainView
from distbelief.observe.records import Progress, advance, describe
from distbelief.observe.terminal import TerminalView, render, source_colour
from distbelief.observe.view import open_view

RUN = Path("runs/digits-1")


def progress(workers: int = 3, slow: int = 1) -> Progress:
    state = describe(Progress(), {"name": "digits", "strategy": "allreduce", "steps": 400})
    for n in range(120):
        record = {"kind": "step", "step": n, "loss": 0.5, "samples": 64, "fingerprint": "f", "at": 1000 + n / 10}
        state = advance(state, record)
    metrics = {"loss": 0.1034, "accuracy": 0.97123}
    state = advance(state, {"kind": "evaluation", "step": 100, "metrics": metrics, "at": 1.0})
    rows = [
        {
            "worker": w,
            "host": "a-host-with-a-long-name",
            "first": 2 * w,
            "end": 2 * w + 2,
            "step": 120,
            "data_s": 0.5,
            "compute_s": 9.0 if w == slow else 6.0,
            "comm_s": 0.5 if w == slow else 3.5,
            "shards": 240,
        }
        for w in range(workers)
    ]
    return advance(state, {"kind": "workers", "at": 1.0, "generation": 1, "step": 120, "workers": rows})


def draw(state: Progress, rows: int = 16, width: int = 80) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(render(state, 12.0, RUN, 3, rows))
    return console.export_text().splitlines()


def test_a_frame_fits_80_columns_and_cuts_no_figure() -> None:
    lines = draw(progress())
    assert max(map(len, lines)) <= 80
    title, bar, loss, evaluation, _, header, *rows, note = lines
    assert title.rstrip() == "digits  allreduce · 3 workers · runs/digits-1"
    assert bar.startswith("step 120/400 ━")
    assert bar.rstrip().endswith("30 % 0:12, 0:28 left")
    assert loss.rstrip() == "loss 0.5000   speed 640 samples/s"
    assert evaluation.rstrip() == "evaluation at step 100   accuracy 0.9712   loss 0.1034"
    assert header.split() == ["worker", "host", "shards", "step", "time", "░", "data", "█", "compute", "▒", "comm"]
    assert [row.split()[0] for row in rows] == ["0", "▶", "2"]
    assert rows[0].split()[1:4] == ["a-host-with…", "0–1", "120"]
    assert rows[0].rstrip().endswith("5 %       60 %    35 %")
    assert note.rstrip() == "▶ worker 1 is the slowest: a shard takes it 50 % longer"


def test_before_the_first_step_it_says_so() -> None:
    assert draw(Progress())[1].rstrip() == "starting … 0:12"


def test_a_run_of_unknown_length_has_no_bar() -> None:
    state = advance(Progress(), {"kind": "step", "step": 4, "loss": None, "samples": 1, "fingerprint": "", "at": 1.0})
    lines = draw(state)
    assert lines[1].split() == ["step", "5", "0:12"]
    assert lines[2].rstrip() == "loss nan"


def test_of_many_workers_some_are_listed_and_the_slowest_among_them() -> None:
    lines = draw(progress(workers=100, slow=77), rows=4)
    assert [line.split()[0] for line in lines[6:10]] == ["0", "1", "2", "▶"]
    assert "… and 96 more workers" in lines[10]


def test_a_narrow_terminal_keeps_the_numbers() -> None:
    lines = draw(progress(), width=66)
    assert max(map(len, lines)) <= 66
    assert "60 %" in lines[6]


def test_the_live_view_draws_logs_above_and_ends_with_the_last_frame(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = io.StringIO()
    console = Console(width=80, height=30, file=screen, force_terminal=True, color_system=None)
    view = TerminalView(console, clock=lambda: 0.0)
    view.log("worker 0", "importing")
    view.started(tmp_path, 2)
    view.refresh()
    view.log("worker 1", "\x1b[31mred\x1b[0m [not markup]")
    (tmp_path / "job.json").write_text(json.dumps({"name": "digits", "steps": 4, "strategy": "allreduce"}))
    records = [{"kind": "step", "step": n, "loss": 1.0, "samples": 8, "fingerprint": "", "at": n} for n in range(4)]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(record) + "\n" for record in [*records, {"kind": "notice", "text": "2 spares"}])
    )
    view.close()
    view.close()
    shown = screen.getvalue()
    assert "worker 0 │ importing" in shown
    assert "worker 1 │ red [not markup]" in shown
    assert "2 spares" in shown
    assert shown.rindex("step 4/4") > shown.rindex("worker 1 │")
    assert shown.rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_a_worker_keeps_its_colour() -> None:
    assert source_colour("worker 0") == source_colour("worker 6") != source_colour("worker 1")
    assert source_colour("coordinator") == "dim"


def test_the_view_fits_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert isinstance(open_view(io.StringIO()).view, PlainView)
    main, other = pty.openpty()
    with os.fdopen(main, "rb", buffering=0), os.fdopen(other, "w") as terminal:
        assert isinstance(open_view(terminal).view, TerminalView)
        assert isinstance(open_view(terminal, plain=True).view, PlainView)
        monkeypatch.setenv("TERM", "dumb")
        assert isinstance(open_view(terminal).view, PlainView)


def divided(*places: str) -> Progress:
    rows = [
        {
            "worker": w,
            "host": "here",
            "first": 0,
            "end": 8,
            "step": 120,
            "data_s": 0.1,
            "compute_s": 6.0,
            "comm_s": 3.9,
            "shards": 240,
            "place": place,
            "waits": {str((w + 1) % len(places)): 3.0, str(w): 0.1} if w else {"1": 0.01},
        }
        for w, place in enumerate(places)
    ]
    state = describe(Progress(), {"name": "gpt", "strategy": "dp2.pp2", "steps": 400})
    return advance(state, {"kind": "workers", "at": 1.0, "generation": 1, "step": 120, "workers": rows})


def test_of_a_divided_model_places_and_bubbles_are_shown() -> None:
    *_, header, first, second = draw(divided("stage 1/2", "stage 2/2"))
    assert header.split() == ["worker", "stage", "time", "░", "data", "█", "compute", "▒", "comm", "waits", "for"]
    assert first.split() == ["0", "1/2", "███████▒▒▒▒▒", "1", "%", "60", "%", "39", "%", "–"]
    assert second.rstrip().endswith("39 %  0 (31 %)")


def test_a_place_in_four_dimensions_fits_80_columns() -> None:
    places = [f"stage {p}/2 · data {d}/2 · sharded {s}/2 · tensor 1/2" for p in (1, 2) for d in (1, 2) for s in (1, 2)]
    lines = draw(divided(*places))
    assert max(map(len, lines)) <= 80
    assert "stage · data · sharded · tensor" in lines[-9]
    assert lines[-1].split()[:8] == ["7", "2/2", "·", "2/2", "·", "2/2", "·", "1/2"]
    assert lines[-1].rstrip().endswith("0 (31 %)"), "nothing is cut off"


def test_a_pace_that_workers_choose_is_shown_in_place_of_their_shards() -> None:
    row = {"host": "here", "first": 0, "end": 4, "step": 9, "data_s": 0, "compute_s": 1.0, "comm_s": 1.0, "shards": 9}
    rows = [{"worker": worker, **row, "pace": [4, worker + 1]} for worker in (0, 1)]
    state = advance(Progress(), {"kind": "workers", "at": 1.0, "generation": 1, "step": 9, "workers": rows})
    *_, header, first, second = draw(state)
    assert header.split()[:4] == ["worker", "host", "push/fetch", "step"]
    assert [line.split()[2] for line in (first, second)] == ["4/1", "4/2"]
