"""The Kubernetes manifest of docs/by-hand.md, its commands in pods that are network namespaces, through restarts."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from distbelief.control.keyfiles import new_key
from tests.support.hosts import Lab, why_not
from tests.support.runs.command import JOBS, REPOSITORY, Run, processes_of
from tests.support.runs.reference import undisturbed
from tests.support.runs.saved import until
from tests.support.runs.watched import of_kinds, steps_of

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not())

Start = Callable[..., Run]
JOB = [JOBS / "small.py", "--set", "brake_s=0.2", "--set", "steps=300"]


def commands(tmp_path: Path) -> tuple[str, str]:
    """The shell commands of the coordinator's and the worker's container, with the folders of this test."""
    manifest = (REPOSITORY / "docs" / "by-hand.md").read_text().split("```yaml")[1].split("```")[0]
    script = manifest.split("- |\n")[1].split("          volumeMounts")[0]
    (worker,) = re.findall(r"command: \[(distbelief, worker.*)\]", manifest)
    found = []
    for text in (script, worker.replace('"', "").replace(", ", " ")):
        for folder in ("runs", "key"):
            text = text.replace(f"/{folder}/", f"{tmp_path}/{folder}/")
        text = text.replace("/jobs/digits.py --workers 4", f"{shlex.join(map(str, JOB))} --workers 2")
        found.append(re.sub(r"\bdistbelief (\w+)", rf"{sys.executable} -m distbelief.cli.main \1", text))
    return found[0], found[1]


def members(run_dir: Path) -> set[int]:
    """The processes of the newest generation."""
    found = list(of_kinds(run_dir / "journal.jsonl", "generation"))
    return {member["pid"] for member in found[-1]["members"]} if found else set()


def test_the_coordinators_pod_moves_and_a_workers_pod_is_replaced(start: Start, tmp_path: Path) -> None:
    """The coordinator's next pod has another address; the name of the service leads to it."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "key").mkdir()
    new_key(tmp_path / "key" / "run.key")
    (tmp_path / "brake").touch()
    coordinator, worker = commands(tmp_path)
    run_dir = tmp_path / "runs" / "digits"

    with Lab(4) as lab:

        def pod(host: int, command: str) -> Run:
            """A container, which is started again as long as it fails."""
            command = f"until {command}; do sleep 1; done"
            return start(prefix=[*lab.inside(host), "sh", "-c", f"cd {tmp_path}; {command}", "sh"])

        lab.call(1, "digits")
        lead = pod(1, f"sh -c {shlex.quote(coordinator)}")
        workers = [pod(host, worker) for host in (3, 4)]
        until(lambda: steps_of(run_dir) >= 3, lead)
        before = members(run_dir)
        lead.kill()  # the whole pod
        lead.wait()
        lab.call(2, "digits")
        again = pod(2, f"sh -c {shlex.quote(coordinator)}")
        until(lambda: len(found := members(run_dir)) == 2 and found.isdisjoint(before), again)
        gone = {process.pid for process in processes_of(workers[0].mark)}
        workers[0].kill()
        workers[0].wait()
        workers.append(pod(3, worker))
        until(lambda: len(found := members(run_dir)) == 2 and found.isdisjoint(gone), again)
        (tmp_path / "brake").unlink()
        outcome = again.wait()
        assert outcome.status == 0, outcome
        for one in workers[1:]:
            assert one.wait().status == 0
    ended = list(of_kinds(run_dir / "journal.jsonl", "ended"))[-1]
    assert ended["result"]["weights_sha256"] == undisturbed(*JOB)
    assert "refused" not in ended
    assert not [line for line in of_kinds(run_dir / "metrics.jsonl", "notice") if "refused" in line["text"]]
