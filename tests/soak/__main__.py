"""`python -m tests.soak --minutes 30`: a run of two hosts under a random fault every 20 seconds, beside its twin.

At the end the run is stopped, and the twin, to which nothing happens, trains to the same step: every step, the weights
and the whole state must have the same bits. What the run's processes hold must have stayed flat, and nothing of it may
be left. The exit status is 0 if all is as promised, 1 if not. Needs root; `make soak MINUTES=30`.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TextIO

from distbelief.chaos.falseclock import library
from distbelief.coordinator import metricsfile
from tests.soak.cluster import Broken, Cluster
from tests.soak.faults import ALONE, KINDS, Struck
from tests.soak.rules.draw import rounds
from tests.soak.rules.judging import Sample, Strike, Trend, growth, trends
from tests.soak.sampling import bytes_of, measure, temporary_files, where_everything_is
from tests.soak.verdict import compare, complaints, steps_of, table, train_twin
from tests.support.hosts import why_not
from tests.support.runs.command import left_in_shared_memory, processes_of

CALM_S = 30.0
"""At the start nothing strikes: the time per step without faults is measured."""
STUCK_S = 240.0
"""A run without a new step for this long, or without all its members, does not recover."""
SAMPLES = 30
NAP_S = 0.08
SAVE_EVERY = "10s"


class Soak:
    """One soak: strikes, waits for recoveries, measures. `run` returns when the run was stopped after its time."""

    def __init__(self, cluster: Cluster, chosen: argparse.Namespace, log: Log) -> None:
        self.strikes: list[Strike] = []
        self.samples: list[Sample] = []
        self.calm_step_s = 0.0
        self.wall_s = 0.0
        self._cluster = cluster
        self._length_s = 60.0 * chosen.minutes
        self._every_s = chosen.every
        self._dice = random.Random(chosen.seed)
        kinds = [kind for kind in KINDS if kind != "set clock" or library()]
        kinds = [kind for kind in kinds if not chosen.only or any(word in kind for word in chosen.only.split(","))]
        self._rounds = rounds(chosen.seed, kinds, ALONE)
        self._log = log
        self._started = 0.0
        self._sampled = 0.0

    def run(self) -> None:
        cluster = self._cluster
        cluster.begin()
        self._wait_whole(0)
        self._started = time.monotonic()
        first = cluster.step()
        self._log(f"whole: 4 workers on 2 hosts, step {first}; nothing strikes for {CALM_S:.0f} s")
        while time.monotonic() < self._started + CALM_S:
            self._look()
        self.calm_step_s = (time.monotonic() - self._started) / max(cluster.step() - first, 1)
        self._log(f"{self.calm_step_s * 1000:.0f} ms per step without faults")
        due = time.monotonic()
        while (now := time.monotonic()) < self._started + self._length_s:
            self._look()
            if now >= due:
                self._sample()
                self._strike(next(self._rounds))
                due = max(due + self._every_s, time.monotonic())
        self.wall_s = time.monotonic() - self._started
        self._sample()
        self._log(f"the time is over: step {cluster.step()}; the run is stopped")
        cluster.stop()

    def _look(self) -> None:
        self._cluster.check_alive()
        time.sleep(0.1)

    def _strike(self, kinds: Sequence[str]) -> None:
        """Let them strike, and wait until the run has recovered."""
        cluster, began = self._cluster, time.monotonic()
        before, known = cluster.step(), len(cluster.follower.records)
        watch = Watch(cluster.run_dir, before + 2)
        struck: list[Struck] = []
        for kind in kinds:
            struck.append(KINDS[kind](cluster, self._dice))
            self._log(f"step {before}: {kind} ({struck[-1].detail})")
        lasting = [(began + one.for_s, one.undo) for one in struck if one.undo is not None]
        while True:
            for one in [one for one in lasting if time.monotonic() >= one[0]]:
                lasting.remove(one)
                one[1]()
            if watch.took_s is not None and not lasting:
                break
            self._look()
            if time.monotonic() > began + max((one.for_s for one in struck), default=0) + STUCK_S:
                raise Broken(f"no new step for {time.monotonic() - began:.0f} s")
        self._wait_whole(cluster.step())
        whole_s = time.monotonic() - began
        at_s = began - self._started
        loaded = [int(one["step"]) for one in cluster.follower.records[known:] if one["kind"] == "loaded"]
        again = sum(max(0, before - step) for step in loaded)
        made = [
            Strike(kind, one.detail, at_s, before, watch.took_s, whole_s, 0 if number else again, len(kinds) > 1)
            for number, (kind, one) in enumerate(zip(kinds, struck, strict=True))
        ]
        self.strikes += made
        self._log(f"    next step after {watch.took_s:.1f} s, all members after {whole_s:.1f} s")

    def _wait_whole(self, step: int) -> None:
        """All wanted members are there, and have committed steps together."""
        began, since = time.monotonic(), -1
        while True:
            whole, now = self._cluster.is_whole(), self._cluster.step()
            since = (now if since < 0 else since) if whole else -1
            if since >= 0 and now >= max(since, step) + 2:
                return
            if time.monotonic() > began + STUCK_S:
                members = [(one["worker"], one["host"], one["pid"]) for one in self._cluster.members()]
                raise Broken(f"not all members were there within {STUCK_S:.0f} s: {members}, step {now}")
            self._look()

    def _sample(self) -> None:
        if time.monotonic() < self._sampled + self._length_s / SAMPLES:
            return
        self._sampled = time.monotonic()
        cluster = self._cluster
        self.samples.append(measure(cluster.by_role(), cluster.temporary))
        shown = [(name, value) for name, value in sorted(self.samples[-1].items()) if not name.startswith("processes")]
        self._log("    held: " + ", ".join(f"{name} {value:.0f}" for name, value in shown))


class Watch(threading.Thread):
    """Sees when the run has committed so many steps, also while a fault is being carried out."""

    def __init__(self, run_dir: Path, steps: int) -> None:
        super().__init__(daemon=True)
        self.took_s: float | None = None
        self._began = time.monotonic()
        self._metrics = metricsfile.Tail(run_dir / metricsfile.NAME, recent_bytes=1 << 16)
        self._steps = steps
        self.start()

    def run(self) -> None:
        while time.monotonic() < self._began + 2 * STUCK_S:
            if any(one["kind"] == "step" and one["step"] + 1 >= self._steps for one in self._metrics.read()):
                self.took_s = time.monotonic() - self._began
                return
            time.sleep(0.1)


class Log:
    """Plain lines, with the time since the start; to stdout and to a file."""

    def __init__(self, path: Path | None) -> None:
        self._began = time.monotonic()
        self._file: TextIO | None = path.open("w") if path else None

    def __call__(self, text: str) -> None:
        now = time.monotonic() - self._began
        for line in text.splitlines():
            shown = f"{int(now // 60):3}:{int(now % 60):02} {line}"
            print(shown, flush=True)
            if self._file:
                print(shown, file=self._file, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--every", type=float, default=20.0, metavar="SECONDS", help="from one fault to the next")
    parser.add_argument("--seed", type=int, default=None, help="default: a new one, which is printed")
    parser.add_argument("--only", default="", metavar="WORDS", help="only kinds with one of these words, by commas")
    parser.add_argument("--log", type=Path, default=None, metavar="FILE", help="the printed lines, also there")
    parser.add_argument("--keep", action="store_true", help="keep the folder of the run, also after success")
    chosen = parser.parse_args()
    problem = (
        why_not() if os.geteuid() == 0 else "the soak needs root: hosts are network namespaces, and a disk is mounted"
    )
    if problem:
        print(f"error: {problem}", file=sys.stderr)
        return 1
    chosen.seed = random.SystemRandom().randrange(10**6) if chosen.seed is None else chosen.seed
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # on either signal nothing is left behind
    signal.signal(signal.SIGINT, signal.default_int_handler)
    log = Log(chosen.log)
    clock = "" if library() else "; libfaketime is not installed, so the clock is not set (`make launchers`)"
    log(f"a soak of {chosen.minutes:g} min, a fault every {chosen.every:g} s, seed {chosen.seed}{clock}")
    folder = Path(tempfile.mkdtemp(prefix="distbelief-soak-"))
    sound = False
    try:
        sound = soak(folder, chosen, log)
    finally:
        if sound and not chosen.keep:
            shutil.rmtree(folder)
        else:
            log(f"the run's files are in {folder}")
    return 0 if sound else 1


def soak(folder: Path, chosen: argparse.Namespace, log: Log) -> bool:
    shared_memory = set(os.listdir("/dev/shm"))
    wrong: list[str] = []
    with Cluster(folder, NAP_S, SAVE_EVERY) as cluster:
        one = Soak(cluster, chosen, log)
        try:
            one.run()
        except Broken as broken:
            wrong.append(str(broken))
            log(f"BROKEN: {broken}")
            log("\n".join([*where_everything_is(cluster.by_role()), *cluster.last_lines()]))
        left = [" ".join(process.cmdline()) for process in processes_of(cluster.mark)] if not wrong else []
        left += [str(path) for path in temporary_files(cluster.temporary)]
        # The disk goes with the cluster: what it has is kept for the comparison, and for people.
        shutil.copytree(cluster.run_dir, folder / "run", ignore=shutil.ignore_patterns("join.sock"))
    left += sorted(left_in_shared_memory(shared_memory))
    wrong += [f"left behind: {what}" for what in left]
    if not one.strikes:
        return False
    run_dir = folder / "run"
    if not wrong:
        log("the twin, to which nothing happens, trains to the same step")
        twin = train_twin(folder / "twin", run_dir)
        wrong += compare(twin, run_dir)
    wrong += complaints(run_dir, folder / "said")
    grown = [*trends(one.samples), *growth_of(run_dir, one.strikes)]
    wrong += [
        f"not flat: {trend.name}, from {trend.first:.0f} to {trend.last:.0f}" for trend in grown if not trend.flat
    ]
    log("\n".join(table(one.strikes, grown, run_dir, one.calm_step_s, one.wall_s)))
    log("\n".join([f"WRONG: {line}" for line in wrong] or ["all is as promised"]))
    return not wrong


def growth_of(run_dir: Path, strikes: Sequence[Strike]) -> list[Trend]:
    logs = bytes_of([run_dir / "journal.jsonl", *(run_dir / "logs").glob("*")])
    return growth(bytes_of(run_dir.glob("metrics*")), steps_of(run_dir), logs, len(strikes))


if __name__ == "__main__":
    sys.exit(main())
