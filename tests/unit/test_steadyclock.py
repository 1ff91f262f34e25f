"""The clock that decisions and records read: it never jumps, whoever sets the machine's clock."""

from __future__ import annotations

import re
from pathlib import Path

from distbelief.steadyclock import CLOCK, SteadyClock

SOURCE = Path(__file__).parents[2] / "src" / "distbelief"
READ_THE_MACHINES_CLOCK = {
    "steadyclock.py": "the start of the steady clock",
    "api.py": "the name of a run directory",
    "cli/chaos.py": "the name of a run directory",
    "cli/attach.py": "the time that a view shows since the run began",
    "chaos/falseclock.py": "the age of files, to be compared with the file system's times",
    "control/signatures.py": "stamps; they rise in any case",
    "checkpoint/saving.py": "the date in a manifest",
    "doctor/connection.py": "compares the clocks of hosts",
    "doctor/hosts.py": "compares the clocks of hosts",
    "worker/profiling/profiler.py": "the date of a recording",
}


class Machine:
    def __init__(self) -> None:
        self.wall_s, self.monotonic_s = 1.75e9, 100.0
        self.clock = self.started()

    def started(self) -> SteadyClock:
        """The clock of a new process."""
        return SteadyClock(lambda: self.wall_s, lambda: self.monotonic_s)

    def passes(self, seconds: float) -> None:
        self.wall_s += seconds
        self.monotonic_s += seconds


def test_it_shows_the_time_and_does_not_jump_when_the_machines_clock_is_set() -> None:
    machine = Machine()
    assert machine.clock.now() == 1.75e9
    machine.wall_s -= 3 * 3600
    machine.passes(10)
    assert machine.clock.now() == 1.75e9 + 10
    machine.wall_s += 100 * 3600
    assert machine.clock.now() == 1.75e9 + 10


def test_a_process_that_replaces_another_one_goes_on_with_its_clock() -> None:
    machine = Machine()
    machine.wall_s -= 3 * 3600
    machine.passes(10)
    late = machine.started()
    assert late.now() < machine.clock.now()
    late.continue_from(machine.clock.offset_s)
    assert late.now() == machine.clock.now()


def test_this_process_has_one() -> None:
    earlier = CLOCK.now()
    assert CLOCK.now() >= earlier


def test_nothing_else_reads_the_machines_clock() -> None:
    """A decision by the machine's clock changes when somebody sets that clock. Read CLOCK, or say here why not."""
    reads = re.compile(
        r"\btime\.(time|time_ns|localtime|gmtime|strftime)\b|\bdatetime\.(now|utcnow|today)\b|\bst_[mca]time\b"
    )
    found = {str(path.relative_to(SOURCE)) for path in SOURCE.rglob("*.py") if reads.search(path.read_text())}
    assert found == set(READ_THE_MACHINES_CLOCK)
