"""Members on several hosts, each a network namespace of its own: slow links, lost packets, cut cables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.hosts import Lab, why_not
from tests.support.runs.command import JOBS, Run
from tests.support.runs.reference import undisturbed

Start = Callable[..., Run]
Wait = Callable[[Callable[[], object]], None]

STEPS = 250  # of 0.6 s each while a test needs time: for a host to be missed, and to come back
MEASURED = 7  # steps: then the coordinator knows how long one takes, and misses a host sooner than in the beginning


@pytest.fixture
def lab() -> Iterator[Lab]:
    problem = why_not()
    if problem:
        pytest.skip(problem)
    with Lab(3) as made:
        yield made


class Cluster:
    """A run whose engine, coordinator and first worker are on host 1, and one worker each on hosts 2 and 3."""

    def __init__(self, start: Start, lab: Lab, folder: Path, wait_until: Wait) -> None:
        self._folder = folder / "run"
        self._brake = folder / "brake"
        self._brake.touch()
        self.wait_until = wait_until
        self._job = [JOBS / "small.py", "--set", f"steps={STEPS}", "--set", "brake_s=0.3"]
        options = ["--workers", 1, "--listen", "10.77.0.1", "--run-dir", "run", "--json"]
        self.run = start("train", *self._job, *options, prefix=lab.inside(1))
        wait_until(lambda: (self._folder / "parcel.bin").exists())
        self.guests = [
            start("worker", "--join", "run", "--host", f"host{host}", prefix=lab.inside(host)) for host in (2, 3)
        ]
        self.has_hosts(3)

    def records(self, kind: str) -> list[dict[str, Any]]:
        path = self._folder / "journal.jsonl"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [entry for line in lines if (entry := json.loads(line))["kind"] == kind]

    def steps(self) -> int:
        path = self._folder / "metrics.jsonl"
        return path.read_text().count('"kind":"step"') if path.exists() else 0

    def progresses(self, steps: int = 3) -> None:
        before = self.steps()
        self.wait_until(lambda: self.steps() >= before + steps)

    def hosts(self) -> Sequence[str]:
        found = self.records("generation")
        return [member["host"] for member in found[-1]["members"]] if found else []

    def has_hosts(self, count: int) -> None:
        self.wait_until(lambda: len(set(self.hosts())) == count)

    def ends_as_one_worker_does(self) -> bool:
        self._brake.unlink()
        result = self.run.wait().json
        for guest in self.guests:
            outcome = guest.wait()
            assert outcome.status == 0, outcome.stderr
        return bool(result["weights_sha256"] == undisturbed(*self._job))


def test_slow_and_lossy_links(start: Start, lab: Lab, tmp_path: Path, wait_until: Wait) -> None:
    lab.impair(2, "delay", "5ms", "2ms", "loss", "1%")
    lab.impair(3, "rate", "20mbit")
    cluster = Cluster(start, lab, tmp_path, wait_until)
    assert cluster.ends_as_one_worker_does()


def test_a_cut_cable_and_its_mending_and_a_host_that_dies(
    start: Start, lab: Lab, tmp_path: Path, wait_until: Wait
) -> None:
    """The others go on without the host that is cut off; when it is back, it finds itself left behind, and rejoins.
    Of one that dies no engine there tells, and no connection is reset: the machine is simply gone."""
    cluster = Cluster(start, lab, tmp_path, wait_until)
    cluster.progresses(MEASURED)
    lab.cut(3)
    wait_until(lambda: cluster.records("estranged"))
    cluster.progresses()
    assert "host3" not in cluster.hosts()
    lab.mend(3)
    cluster.has_hosts(3)
    cluster.progresses(MEASURED)
    lab.cut(2)
    gone = cluster.guests.pop(0)
    gone.kill()
    gone.wait()
    cluster.progresses()
    assert cluster.ends_as_one_worker_does()
