"""A run that tests watch and disturb while it goes on: what its files say, and signals to its members."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from tests.support.runs.command import Run

Start = Callable[..., Run]
Wait = Callable[[Callable[[], object]], None]


class Watched:
    """A run and its files. It may be slow, if its job looks for a file `brake`, until its result is asked for."""

    def __init__(self, start: Start, tmp_path: Path, wait_until: Wait, *arguments: object) -> None:
        self.folder = tmp_path / "run"
        self._brake = tmp_path / "brake"
        self._brake.touch()
        self.run = start("train", *arguments, "--run-dir", "run", "--json")
        self._wait_until = wait_until

    def journal(self, *kinds: str) -> list[dict[str, Any]]:
        return self._lines("journal.jsonl", *kinds)

    def metrics(self, *kinds: str) -> list[dict[str, Any]]:
        return self._lines("metrics.jsonl", *kinds)

    def _lines(self, name: str, *kinds: str) -> list[dict[str, Any]]:
        return list(of_kinds(self.folder / name, *kinds))

    def step(self) -> int:
        return steps_of(self.folder)

    def wait_until(self, condition: Callable[[], object]) -> None:
        """Of a run that has ended nothing more is waited for."""

        def is_so() -> bool:
            had_ended = self.has_ended()  # before the look: what was true in the end counts
            found = bool(condition())
            assert found or not had_ended, f"it has ended: {self.run.wait()}"
            return found

        self._wait_until(is_so)

    def after(self, steps: int) -> None:
        self.wait_until(lambda: self.step() >= steps)

    def has_ended(self) -> bool:
        return self.run.status() is not None

    def members(self) -> dict[int, int]:
        """Worker -> process, of the newest generation."""
        found = self.journal("generation")
        return {member["worker"]: member["pid"] for member in found[-1]["members"]} if found else {}

    def living(self) -> list[int]:
        """Members that have not been killed: a generation without the last victim may not have been written yet."""
        return sorted(worker for worker, pid in self.members().items() if _lives(pid))

    def has_members(self, count: int) -> None:
        """That many, and they have committed a step together."""

        def have_committed() -> bool:
            generations, steps = self.journal("generation"), self.metrics("step")
            if not generations or not steps or len(generations[-1]["members"]) != count:
                return False
            return bool(steps[-1]["generation"] == generations[-1]["generation"])

        self.wait_until(have_committed)

    def signal(self, worker: int, number: signal.Signals) -> None:
        pid = self.members()[worker]
        expect_ours(pid)
        os.kill(pid, number)

    def kill_all(self) -> None:
        self.kill(self.members())

    def kill(self, workers: Iterable[int]) -> None:
        """These members, in one moment: nobody has time to take over from the first before the last is gone."""
        members = self.members()
        pids = [members[worker] for worker in workers]
        for pid in pids:
            expect_ours(pid)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)

    def servers(self) -> dict[int, int]:
        """Server -> process, by the newest map."""
        found = self.journal("servers")
        return {one["number"]: one["pid"] for one in found[-1]["servers"]} if found else {}

    def signal_server(self, number: int, what: signal.Signals) -> None:
        pid = self.servers()[number]
        expect_ours(pid)
        os.kill(pid, what)

    def servers_are_whole(self, without: Iterable[int] = ()) -> None:
        """Every slice has a primary and a backup, nothing is being copied, and these servers are known to be dead."""

        def is_whole() -> bool:
            newest = self.journal("servers")[-1]
            placed, there = newest["placement"], {one["number"] for one in newest["servers"]}
            return there.isdisjoint(without) and -1 not in placed["map"]["backups"] and set(placed["recruits"]) == {-1}

        self.wait_until(is_whole)

    def rendezvous_server(self) -> int:
        """The process that the zygote forked beside the workers. Ask before any of them is killed."""
        members = set(self.members().values())
        zygote = psutil.Process(min(members)).parent()
        assert zygote is not None
        (found,) = {child.pid for child in zygote.children()} - members
        return int(found)

    def coordinator(self) -> int:
        return int(json.loads((self.folder / "coordinator.json").read_text())["pid"])

    def lasting_steps(self) -> list[int]:
        """As they were reported, without those that were executed again after the members had said so."""
        steps: list[int] = []
        for entry in self.metrics("step", "rollback"):
            if entry["kind"] == "rollback":
                steps = [step for step in steps if step < entry["step"]]
            else:
                steps.append(entry["step"])
        return steps

    def release(self) -> None:
        """Let it be quick from now on."""
        self._brake.unlink(missing_ok=True)

    def result(self) -> dict[str, Any]:
        self.release()
        outcome = self.run.wait().json
        # Every step was committed and reported exactly once.
        assert sorted(self.lasting_steps()) == list(range(outcome["steps"]))
        assert outcome["reexecuted"] == sum(one["reached"] - one["step"] for one in self.metrics("rollback"))
        assert not [n for n in self.metrics("notice") if "different results" in n["text"]]
        assert outcome["recoveries"] == len([one for one in self.journal("generation") if one["lost"]])
        return outcome

    def check_workers_lost(self, killed: Collection[int] = (), frozen: Collection[int] = ()) -> None:
        check_workers_lost(self.folder, killed, frozen)


def check_workers_lost(run_dir: Path, killed: Collection[int] = (), frozen: Collection[int] = ()) -> None:
    """By the test: killed, or frozen. A busy machine may keep a healthy member silent for so long that it is fenced
    too: of such a loss the journal tells, and no other is excused."""
    journal = run_dir / "journal.jsonl"
    lost, fenced = ({one["worker"] for one in of_kinds(journal, kind)} for kind in ("lost", "fenced"))
    wanted = {*killed, *frozen}
    assert lost - (fenced - wanted) == wanted, f"lost {lost}, fenced {fenced}"
    assert fenced.issuperset(frozen), fenced
    assert wanted <= {worker for one in of_kinds(journal, "generation") for worker in one["lost"]}


def check_servers_lost(
    run_dir: Path, result: Mapping[str, Any], killed: Collection[int] = (), frozen: Collection[int] = ()
) -> None:
    """As `Watched.check_workers_lost`, of servers. Unless healthy ones were fenced too, no step is executed again."""
    fenced = {one["server"] for one in of_kinds(run_dir / "journal.jsonl", "server_fenced")}
    wanted = {*killed, *frozen}
    assert fenced.issuperset(frozen)
    assert len(wanted) <= result["servers_lost"] <= len(wanted | fenced), fenced
    if fenced <= wanted:
        assert result["reexecuted"] == 0


def of_kinds(path: Path, *kinds: str) -> Iterator[dict[str, Any]]:
    """The whole lines of a file, of these kinds. Asked for many times a second: other lines are not even parsed."""
    marks = [f'"{kind}"' for kind in kinds]
    for line in path.read_text().split("\n")[:-1] if path.exists() else []:
        if any(mark in line for mark in marks) and (entry := json.loads(line))["kind"] in kinds:
            yield entry


def steps_of(run_dir: Path) -> int:
    """How many steps are reported. Likewise."""
    path = run_dir / "metrics.jsonl"
    return path.read_text().rpartition("\n")[0].count('"kind":"step"') if path.exists() else 0


def expect_ours(pid: int) -> None:
    assert any("distbelief" in part for part in psutil.Process(pid).cmdline())


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
