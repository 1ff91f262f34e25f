"""`distbelief doctor` on several hosts (network namespaces) with real problems planted, and beside a run."""

from __future__ import annotations

import json
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.hosts import Lab, why_not
from tests.support.runs.command import JOBS, Outcome, Run

Start = Callable[..., Run]
Wait = Callable[[Callable[[], object]], None]
OF_THE_MACHINE = ("processor", "run directory", "processes")
"""What this machine is blamed for while it does other things: too few cores, a slow disk, workers that other tests
freeze."""
NO_CUDA = "torch was built without CUDA"
"""What a machine with a GPU is blamed for, since the development set-up has the torch for processors."""
MOUNT = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m none "$1"; shift; exec "$@"', "sh"]
AHEAD = "import time\nnow = time.time\ntime.time = lambda: now() + 5\n"


@pytest.fixture
def lab() -> Iterator[Lab]:
    problem = why_not()
    if problem:
        pytest.skip(problem)
    with Lab(3) as made:
        yield made


@pytest.fixture
def key(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_text(secrets.token_hex(32))
    path.chmod(0o600)
    return path


def report(outcome: Outcome) -> dict[str, Any]:
    assert outcome.status in (0, 1), outcome.stderr
    found: dict[str, Any] = json.loads(outcome.stdout)
    assert outcome.status == int(any(problems(found).values()))
    return found


def problems(found: dict[str, Any]) -> dict[str, list[str]]:
    """Host, or "" for all of them -> what is wrong."""
    every = {host["name"]: host["findings"] for host in found["hosts"]} | {"": found["shared"]}
    return {
        name: [
            f"{one['about']}: {one['found']}"
            for one in findings
            if one["status"] == "problem" and NO_CUDA not in one["found"]
        ]
        for name, findings in every.items()
    }


def meet(start: Start, lab: Lab, key: Path, where: str, *prefixes: list[str]) -> dict[str, Any]:
    """A doctor on every host. All print the same."""
    runs = [start("doctor", "--listen", where, "--hosts", 3, "--key", key, "--json", prefix=lab.inside(1))]
    for host, prefix in zip((2, 3), prefixes or ([], []), strict=True):
        full = [*lab.inside(host), *prefix]
        runs.append(start("doctor", "--join", where, "--key", key, "--json", prefix=full))
    outcomes = [report(run.wait()) for run in runs]
    assert outcomes[0] == outcomes[1] == outcomes[2]
    return outcomes[0]


def test_healthy_hosts(start: Start, lab: Lab, key: Path) -> None:
    """Over IPv6."""
    found = meet(start, lab, key, "[fd77::1]:7000")
    assert [host["name"] for host in found["hosts"]] == ["host1", "host2", "host3"]
    for name, wrong in problems(found).items():  # a host that stood still during a transfer seems to have a slow link
        assert [one for one in wrong if not one.startswith((*OF_THE_MACHINE, "links:"))] == [], name
    assert [one["about"] for one in found["shared"]] == ["hosts", "versions", "clocks", "links"]
    assert len(found["links"]) == 6
    assert all(link["bytes_per_s"] > 0 and not link["error"] for link in found["links"])


def test_every_problem_is_found_where_it_is(start: Start, lab: Lab, key: Path, tmp_path: Path) -> None:
    """Another instruction set, a full disk, a tiny /dev/shm, a wrong clock, a slow cable, and no way between two."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "ahead").mkdir()
    (tmp_path / "ahead" / "sitecustomize.py").write_text(AHEAD)
    lab.impair(2, "rate", "16mbit")
    lab.on(3, "ip", "route", "add", "unreachable", lab.address(2))
    second = ["env", "ATEN_CPU_CAPABILITY=default", *MOUNT, str(tmp_path / "runs")]
    third = ["sh", "-c", f'export PYTHONPATH={tmp_path}/ahead:$PYTHONPATH; exec "$@"', "sh", *MOUNT, "/dev/shm"]
    found = problems(meet(start, lab, key, "10.77.0.1:7000", second, third))
    (disk,) = (one for one in found["host2"] if one.startswith("run directory"))
    assert "runs cannot be written: No space left on device" in disk
    assert [one for one in found["host2"] if not one.startswith(OF_THE_MACHINE)] == []
    (memory,) = (one for one in found["host3"] if not one.startswith(OF_THE_MACHINE))
    assert memory.startswith("shared memory:")
    assert [one for one in found["host1"] if not one.startswith(OF_THE_MACHINE)] == []
    wrong = found[""]
    assert len([one for one in wrong if one.startswith("versions: instruction set: host2 has")]) == 1
    assert "clocks: host3 is 5.0 s ahead of host1" in wrong
    slow = [one for one in wrong if "host1 → host2" in one or "host2 → host1" in one]
    assert len(slow) == 2, "one cable, both ways"
    (cut,) = (one for one in wrong if "does not reach" in one)
    assert "host2" in cut
    assert "host3" in cut
    assert [one for one in wrong if not one.startswith(("versions:", "clocks:", "links:"))] == []


def test_beside_a_run(start: Start, tmp_path: Path, wait_until: Wait) -> None:
    """A host that could take part, one that would be refused; and the run goes on as if nobody had asked."""
    brake = tmp_path / "brake"
    brake.touch()
    settings = ["--set", "steps=300", "--set", "brake_s=0.3"]
    run = start("train", JOBS / "small.py", *settings, "--workers", 1, "--run-dir", "run", "--json")
    wait_until(lambda: '"kind":"step"' in _text(tmp_path / "run" / "metrics.jsonl"))
    journal = _text(tmp_path / "run" / "journal.jsonl")
    fit = start("doctor", "--join", "run", "--json")
    unfit = start("doctor", "--join", "run", "--json", prefix=["env", "ATEN_CPU_CAPABILITY=default"])
    good, bad = report(fit.wait()), report(unfit.wait())
    assert problems(good)[""] == []
    assert [one["about"] for one in good["shared"]] == ["connection", "run", "versions", "clocks"]
    (other,) = problems(bad)[""]
    assert "versions: this host computes with" in other
    assert _text(tmp_path / "run" / "journal.jsonl") == journal, "nobody decided anything for it"
    brake.unlink()
    assert run.wait().json["steps"] == 300


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
