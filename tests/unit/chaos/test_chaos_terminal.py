"""A terminal for a command, and its loss."""

from __future__ import annotations

import io
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from distbelief.chaos.terminal import Terminals

PATIENCE_S = 60


def python(code: str) -> list[str]:
    return [sys.executable, "-uc", code]


def test_a_command_has_the_terminal_and_ends_by_itself() -> None:
    shown = io.StringIO()
    with Terminals(shown) as terminals:
        code = "import os, sys; print(os.isatty(0), os.isatty(1), os.getsid(0) == os.getpid()); sys.exit(3)"
        assert terminals.run(python(code)) == (3, False)
        assert not terminals.drop(), "there is none any more"
    assert shown.getvalue() == "True True True\n"


def test_all_that_was_printed_before_the_end_is_shown() -> None:
    shown = io.StringIO()
    with Terminals(shown) as terminals:
        assert terminals.run(python("print('x' * 300_000)")) == (0, False)
    assert shown.getvalue() == "x" * 300_000 + "\n"


@pytest.mark.parametrize("ignored", [False, True])
def test_the_loss_of_the_terminal_is_sighup_also_under_nohup(ignored: bool) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN) if ignored else None
    shown, outcomes = io.StringIO(), []
    try:
        with Terminals(shown) as terminals:
            command = python("import time; print('up'); time.sleep(600)")
            runs = threading.Thread(target=lambda: outcomes.append(terminals.run(command)))
            runs.start()
            deadline = time.monotonic() + PATIENCE_S
            while shown.getvalue() != "up\n":
                assert time.monotonic() < deadline, "it never started"
                time.sleep(0.01)
            assert terminals.drop()
            runs.join()
    finally:
        if before is not None:
            signal.signal(signal.SIGHUP, before)
    assert outcomes == [(-signal.SIGHUP, True)]


def test_the_death_of_the_holder_is_the_loss_of_the_terminal(tmp_path: Path) -> None:
    command = python("import os, pathlib, time; pathlib.Path('pid').write_text(str(os.getpid())); time.sleep(600)")
    holder = f"import sys; from distbelief.chaos.terminal import Terminals; Terminals(sys.stdout).run({command!r})"
    process = subprocess.Popen(python(holder), cwd=tmp_path)
    deadline = time.monotonic() + PATIENCE_S
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline, "it never started"
        time.sleep(0.01)
    pid = int((tmp_path / "pid").read_text())
    process.kill()
    process.wait()
    while Path(f"/proc/{pid}/stat").exists() and ") Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline, "it goes on without its terminal"
        time.sleep(0.01)
