"""The choice of a view, and streams that fail under it."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from distbelief.observe.plain import PlainView
from distbelief.observe.view import GuardedView, open_view


def test_a_view_survives_a_reader_that_goes(tmp_path: Path) -> None:
    read, write = os.pipe()
    with open(write, "w") as stream:
        view = open_view(stream)
        view.started(tmp_path, 2)
        assert os.read(read, 1000).decode().startswith("2 workers")
        os.close(read)
        view.log("worker 0", "is there anybody?")
        view.log("worker 0", "nobody")
        view.close()
        os.dup2(os.open(os.devnull, os.O_WRONLY), write)  # for the stream's own last flush


def test_a_view_survives_a_full_disk(tmp_path: Path) -> None:
    with open("/dev/full", "w") as stream:
        view = open_view(stream)
        assert isinstance(view.view, PlainView)
        view.started(tmp_path, 2)
        view.close()
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


@pytest.mark.parametrize(("plain", "kind"), [(False, "TerminalView"), (True, "PlainView")])
def test_a_live_view_survives_a_terminal_that_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plain: bool, kind: str
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal, slave = os.openpty()
    with open(slave, "w") as stream:
        view = open_view(stream, plain=plain, elapsed_s=3700)
        assert type(view.view).__name__ == kind
        view.started(tmp_path, 2)
        view.refresh()
        shown = ""
        while "workers" not in shown:  # in both views' first lines
            shown += os.read(terminal, 10_000).decode()
        while not plain and "starting" not in shown:
            shown += os.read(terminal, 10_000).decode()
        assert ("1:01:4" in shown) == (not plain)
        os.close(terminal)
        view.log("worker 0", "is there anybody?")
        view.refresh()
        view.close()
        os.dup2(os.open(os.devnull, os.O_WRONLY), slave)


class _Broken:
    """A view that cannot show something."""

    calls = 0

    def started(self, run_dir: Path, workers: int) -> None: ...

    def log(self, source: str, line: str) -> None: ...

    def refresh(self) -> None:
        self.calls += 1
        raise KeyError("step")

    def close(self) -> None:
        raise ValueError


def test_an_error_of_a_view_ends_the_view_only(tmp_path: Path) -> None:
    shown, inner = io.StringIO(), _Broken()
    view = GuardedView(inner, shown)
    view.started(tmp_path, 2)
    assert shown.getvalue() == ""
    for _ in range(3):
        view.refresh()
    view.close()
    assert inner.calls == 1
    assert shown.getvalue().count("the run itself goes on: KeyError: 'step' (test_observe_view.py, line") == 1
