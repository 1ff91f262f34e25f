"""What all tests share: where child processes find `tests.support`, which signals they start with, how soon the first
test runs, and a list of what was skipped."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

from tests.sim.seeds import again, seeds_of_today

ROOT = str(Path(__file__).parent)
# Child processes of tests import `tests.support` too, whatever folder they work in.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (ROOT, os.environ.get("PYTHONPATH"))))
pytest.register_assert_rewrite("tests.support")


def _leave_no_signal_ignored() -> None:
    """Give the processes that tests start the usual dispositions of the signals that tests send.

    A shell without job control ignores SIGINT for `make test &`, and so may a CI service; a process inherits that, and
    a test that sends Ctrl-C would wait for ever. This process goes on ignoring them: a handler that does nothing is
    reset by exec, SIG_IGN is not. SIGHUP stays as it is: `nohup` must keep its meaning for the processes of tests.
    """
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGQUIT, signal.SIGTERM, signal.SIGCHLD})


if threading.current_thread() is threading.main_thread():
    _leave_no_signal_ignored()


try:
    from hypothesis import HealthCheck, settings
except ImportError:  # a machine with a GPU that runs tests/gpu alone
    pass
else:
    # Hypothesis limits examples by wall-clock time, which depends on the machine and on what else it does.
    settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("any machine")


def pytest_report_header() -> str:
    return f"simulation: today's seeds are those of `{again(seeds_of_today())}`"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collecting imports torch and all that is tested, none of which is ever garbage: the collector, which would walk
    through it time and again, waits until it is there, and leaves it alone from then on."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """As workers have it, whatever the machine. Several threads for small tensors wait for each other, for very long
    where other processes need the cores."""
    import torch

    torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out the files whose tests start processes")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    from tests.support.selection import starts_processes

    if config.option.quick and collection_path.name.startswith("test_") and starts_processes(collection_path):
        return True
    return None


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Every skipped test by its name, and why."""
    skipped = terminalreporter.stats.get("skipped", [])
    if skipped:
        terminalreporter.section(f"{len(skipped)} skipped", sep="-")
    for report in skipped:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        terminalreporter.line(f"{report.nodeid}: {reason.removeprefix('Skipped: ')}")
