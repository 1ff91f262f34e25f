"""A storm over several hosts: a run on a lab's bad cables, with deaths, freezes, cut cables and hosts that come and go.

    python -m tests.support.storm --hosts 4 --faults 20 --seed 1 --impair "delay 20ms 5ms loss 1%"

It trains a job on as many hosts, strikes it with faults drawn by the seed, lets it end, and compares the weights with
those of one worker alone; every step must be in the metrics exactly once. The exit status says whether all is well.
Needs root, as labs do.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from distbelief.control.keyfiles import new_key
from tests.support.hosts import Lab

JOB = Path(__file__).parents[1] / "e2e" / "jobs" / "small.py"
PORT = 5555
PATIENCE_S = 180.0
CUT_S = (2.0, 25.0)  # shorter and longer than it takes to miss a host
FREEZE_S = (1.0, 20.0)


Fault = Callable[["Storm", random.Random], str]


class Storm:
    """The run on the lab. Host 1 leads, the others each have an agent."""

    def __init__(self, lab: Lab, folder: Path, steps: int, strategy: str, say: Callable[[str], None]) -> None:
        self.lab = lab
        self._folder = folder
        self._say = say
        self._run_dir = folder / "run"
        self._where = f"{lab.address(1)}:{PORT}"
        self._agents: dict[int, subprocess.Popen[str]] = {}
        self._stack = contextlib.ExitStack()
        (folder / "brake").touch()
        new_key(folder / "key")
        hosts = len(lab.hosts)
        self.lead = self._begin(
            *(1, "lead", "coordinator", str(JOB), "--workers", str(hosts - 1), "--listen", self._where, "--key", "key"),
            *("--strategy", strategy, "--run-dir", "run", "--save-every", "20", "--json"),
            *("--set", f"steps={steps}", "--set", "brake_s=0.3"),
        )
        for host in lab.hosts[1:]:
            self.join(host)
        self.wait(lambda: len(self.members()) == hosts - 1, "the run has begun")

    def _begin(self, host: int, name: str, *arguments: str) -> subprocess.Popen[str]:
        log = self._stack.enter_context((self._folder / f"{name}.log").open("a"))
        process = subprocess.Popen(
            [*self.lab.inside(host), sys.executable, "-m", "distbelief.cli.main", *arguments],
            cwd=self._folder,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._stack.callback(_end, process)
        return process

    def join(self, host: int) -> None:
        self._agents[host] = self._begin(host, f"agent{host}", "worker", "--join", self._where, "--key", "key")

    # --- what is seen ------------------------------------------------------------------------------------------------

    def records(self, kind: str) -> list[dict[str, Any]]:
        return [entry for entry in _lines(self._run_dir / "journal.jsonl") if entry["kind"] == kind]

    def members(self) -> list[dict[str, Any]]:
        found = self.records("generation")
        return list(found[-1]["members"]) if found else []

    def steps(self) -> list[int]:
        return [line["step"] for line in _lines(self._run_dir / "metrics.jsonl") if line["kind"] == "step"]

    def wait(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if self.lead.poll() is not None:
                raise SystemExit(f"the run ended before {what}:\n{self.log('lead')}")
            if time.monotonic() > deadline:
                raise SystemExit(f"it never happened that {what}:\n{self.log('lead')}")
            time.sleep(0.05)

    def log(self, name: str) -> str:
        return (self._folder / f"{name}.log").read_text()[-4000:]

    # --- faults ------------------------------------------------------------------------------------------------------

    def kill_worker(self, dice: random.Random) -> str:
        victim = dice.choice(self.members())
        _signal(victim["pid"], signal.SIGKILL)
        return f"killed worker {victim['worker']} on {victim['host']}"

    def freeze_worker(self, dice: random.Random) -> str:
        victim, seconds = dice.choice(self.members()), dice.uniform(*FREEZE_S)
        _signal(victim["pid"], signal.SIGSTOP)
        time.sleep(seconds)
        _signal(victim["pid"], signal.SIGCONT)
        return f"froze worker {victim['worker']} on {victim['host']} for {seconds:.0f} s"

    def kill_coordinator(self, dice: random.Random) -> str:
        with contextlib.suppress(OSError, ValueError):
            _signal(json.loads((self._run_dir / "coordinator.json").read_text())["pid"], signal.SIGKILL)
        return "killed the coordinator"

    def cut_cable(self, dice: random.Random) -> str:
        host, seconds = dice.choice(self.lab.hosts[1:]), dice.uniform(*CUT_S)
        self.lab.cut(host)
        time.sleep(seconds)
        self.lab.mend(host)
        return f"cut the cable of host{host} for {seconds:.0f} s"

    def partition(self, dice: random.Random) -> str:
        """Half of the hosts cannot be reached by the other half, in which the coordinator is."""
        hosts, seconds = list(self.lab.hosts[1 + len(self.lab.hosts) // 2 :]), dice.uniform(*CUT_S)
        for host in hosts:
            self.lab.cut(host)
        time.sleep(seconds)
        for host in hosts:
            self.lab.mend(host)
        return f"cut off {', '.join(f'host{host}' for host in hosts)} for {seconds:.0f} s"

    def lose_host(self, dice: random.Random) -> str:
        """Its agent dies, and its members with it; the cable is out, so nobody is told. Later it is started again."""
        host = dice.choice(self.lab.hosts[1:])
        self.lab.cut(host)
        _end(self._agents[host])
        time.sleep(dice.uniform(0, 5))
        self.lab.mend(host)
        self.join(host)
        return f"host{host} died, and was started again"

    def kill_agent(self, dice: random.Random) -> str:
        host = dice.choice(self.lab.hosts[1:])
        _end(self._agents[host])
        self.join(host)
        return f"the agent of host{host} died, and another one was started"

    def leave(self, dice: random.Random) -> str:
        host = dice.choice(self.lab.hosts[1:])
        self._agents[host].send_signal(signal.SIGTERM)
        self.join(host)
        return f"host{host} was asked to leave, and came again"

    FAULTS = (kill_worker, freeze_worker, kill_coordinator, cut_cable, partition, lose_host, kill_agent, leave)

    def strike(self, dice: random.Random, faults: int) -> None:
        kinds: list[Fault] = []
        for number in range(faults):
            before = len(self.steps())
            kinds = kinds or dice.sample(self.FAULTS, len(self.FAULTS))  # every kind once before any comes again
            what = kinds.pop()(self, dice)
            self._say(f"{number + 1}/{faults}: {what}")
            self.wait(lambda goal=before + 3: len(self.steps()) >= goal, f"steps were committed after: {what}")

    def finish(self) -> dict[str, Any]:
        """Let the run end. Its result."""
        (self._folder / "brake").unlink()
        status = self.lead.wait(3 * PATIENCE_S)
        if status:
            raise SystemExit(f"the run ended with status {status}:\n{self.log('lead')}")
        result: dict[str, Any] = json.loads(self.log("lead").strip().splitlines()[-1])
        return result

    def close(self) -> None:
        self._stack.close()


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    with contextlib.suppress(FileNotFoundError):
        for line in path.read_text().split("\n")[:-1]:
            yield json.loads(line)


def _signal(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()


def alone(folder: Path, steps: int) -> str:
    command = [sys.executable, "-m", "distbelief.cli.main", "train", str(JOB), "--workers", "1", "--json"]
    command += ["--set", f"steps={steps}", "--run-dir", "alone"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    return str(json.loads(done.stdout.strip().splitlines()[-1])["weights_sha256"])


def storm(
    hosts: int, faults: int, seed: int, impair: str, strategy: str, steps: int, say: Callable[[str], None] = print
) -> bool:
    """Whether the weights are those of one worker alone, and every step is there once."""
    with tempfile.TemporaryDirectory() as name, Lab(hosts) as lab:
        folder = Path(name)
        expected = alone(folder, steps)
        for host in lab.hosts:
            if impair:
                lab.impair(host, *impair.split())
        run = Storm(lab, folder, steps, strategy, say)
        with contextlib.closing(run):
            run.strike(random.Random(seed), faults)
            result = run.finish()
            counts = collections.Counter(run.steps())
        odd = [step for step in range(steps) if counts[step] != 1]
        same = result["weights_sha256"] == expected
        say(
            f"weights {'equal' if same else 'DIFFER'}; {result['recoveries']} recoveries; "
            f"{'every step is there once' if not odd else f'steps missing or repeated: {odd[:10]}'}"
        )
        return same and not odd


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, default=4)
    parser.add_argument("--faults", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--impair", default="delay 20ms 5ms loss 1%%".replace("%%", "%"))
    parser.add_argument("--strategy", default="allreduce")
    parser.add_argument("--steps", type=int, help="default: enough for the faults")
    given = parser.parse_args()
    print(
        f"seed {given.seed}: {given.faults} faults on {given.hosts} hosts, cables: {given.impair or 'good'}", flush=True
    )
    say = lambda text: print(text, flush=True)  # noqa: E731
    steps = given.steps or 40 * (given.faults + 1)
    return 0 if storm(given.hosts, given.faults, given.seed, given.impair, given.strategy, steps, say) else 1


if __name__ == "__main__":
    sys.exit(main())
