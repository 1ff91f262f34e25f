"""Measure the cells of a plan: every system in turn, its losses held against one process's, everything written down."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.compare import losses, reference
from bench.compare.launching import run
from bench.compare.plan import CHECKED_STEPS, MOST_CHECKED_STEPS, STEPS_PER_TURN, TURN_S, USUAL_TURN_S, Cell
from bench.compare.records import Measurement, measurement
from bench.compare.results import Results
from bench.compare.store import Store
from bench.compare.system import Start, System
from bench.compare.systems import IDEAL, OURS, SINGLE, SYSTEMS
from bench.compare.turns import take_turns
from bench.machine import Bystanders, Patience
from bench.running import BENCH, TIMEOUT_S, DriverFailed, environment, free_ports
from bench.workloads import WORKLOADS

TRIES = 5
"""torch 2.13 ends one process in five with SIGABRT when DDP is done (docs/log.md); others have days of their own."""
LIMIT_S = {"speed": TIMEOUT_S, "scaling": TIMEOUT_S, "accuracy": 3 * TIMEOUT_S}
"""For one run, on a busy machine."""


class Comparison:
    """`pythons`: system -> its interpreter, for those that can be run here. `tell` is told what happens."""

    def __init__(
        self, results: Results, folder: Path, pythons: Mapping[str, str], counted: bool, tell: Callable[[str], None]
    ) -> None:
        self._results = results
        self._store = Store(folder)
        self._pythons = pythons
        self._counted = counted
        self._tell = tell

    def measure(self, cell: Cell, patience_s: float) -> None:
        """All repetitions of a cell; what a resumed file already holds is not measured again."""
        if cell.part == "turns":
            self._take_turns(cell)
            return
        patience, name = Patience(patience_s), f"{cell.part} {cell.workload} ×{cell.workers}"
        for repetition, system_name in cell.turns():
            system = SYSTEMS[system_name]
            key = (cell.part, cell.workload, cell.workers, system_name, repetition)
            failed = self._results.content["failed"].get(name, {})
            if self._results.has(key) or system_name not in self._pythons or system_name in failed:
                continue
            self._tell(f"{name}, repetition {repetition + 1} of {cell.repetitions}: {system.title}")
            try:
                found = self._in_some_tries(cell, name, system, patience)
                problem = self._problem(cell, system, found)
            except DriverFailed as error:
                self._results.fail(name, system_name, str(error))
                continue
            more = {"warm_up": cell.warm_up, "problem": problem, "retaken": patience.retaken}
            self._results.add(key, {**found.as_json(), **more})

    def _take_turns(self, cell: Cell) -> None:
        known = self._results.content.setdefault("turns", {})
        if cell.workload in known:
            return
        name, bystanders = f"{cell.part} {cell.workload} ×{cell.workers}", Bystanders()
        seconds = TURN_S.get(cell.workload, USUAL_TURN_S)
        self._tell(f"{name}: {', '.join(cell.systems)}, {cell.repetitions} rounds of {seconds:g} s each")
        steps = cell.warm_up + cell.timed * STEPS_PER_TURN * cell.repetitions
        runs = []
        for system in [SYSTEMS[one] for one in cell.systems if one in self._pythons]:
            task = self._store.task(
                cell.workload, cell.workers, steps, cell.warm_up, meet=system.name == IDEAL, broken_off=True
            )
            driver = BENCH / "drivers" / system.driver
            runs.append(
                (system, Start(self._pythons[system.name], driver, Path(task.folder), cell.workers, free_ports))
            )
        try:
            found = take_turns(runs, seconds, cell.repetitions)
        except DriverFailed as error:
            self._results.fail(name, OURS, str(error))
            return
        finally:
            for _, start in runs:
                shutil.rmtree(start.folder, ignore_errors=True)
        at = time.strftime("%Y-%m-%dT%H:%M", time.gmtime())
        known[cell.workload] = {"at": at, "turn_s": seconds, "others": bystanders.share(), "samples_per_s": found}
        self._results.write()

    def _in_some_tries(self, cell: Cell, name: str, system: System, patience: Patience) -> Measurement:
        """A peer that fails now and then is compared all the same, and it is said how often. Ours must not fail."""
        for _ in range(0 if system.kind == "ours" else TRIES - 1):
            try:
                return self._least_disturbed(cell, system, patience)
            except DriverFailed as error:
                self._results.tried_again(name, system.name, str(error))
        return self._least_disturbed(cell, system, patience)

    def _least_disturbed(self, cell: Cell, system: System, patience: Patience) -> Measurement:
        """Measure, and again while others disturb and patience lasts; what was disturbed least, whoever's it is."""
        taken: list[Measurement] = []
        while True:
            started = time.monotonic()
            taken.append(self._once(cell, system))
            if not patience.again(taken[-1].others, time.monotonic() - started):
                return min(taken, key=lambda one: one.others)

    def _once(self, cell: Cell, system: System) -> Measurement:
        workers = 1 if system.name == SINGLE else cell.workers
        task = self._store.task(cell.workload, workers, cell.steps, cell.warm_up, meet=system.name == IDEAL)
        folder = Path(task.folder)
        driver = BENCH / "drivers" / system.driver
        start = Start(self._pythons[system.name], driver, folder, workers, free_ports)
        try:
            return measurement(system, task, run(system, start, self._counted, LIMIT_S[cell.part]))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _problem(self, cell: Cell, system: System, found: Measurement) -> str:
        workers = 1 if system.name == SINGLE else cell.workers
        way = "alike" if system.asynchronous else "start" if system.name == IDEAL else "same"
        return losses.problem(found.losses, self._reference(cell, workers), WORKLOADS[cell.workload].same_end, way)

    def _reference(self, cell: Cell, workers: int) -> list[float]:
        known: dict[str, list[float]] = self._results.content["references"]
        free = any(SYSTEMS[name].asynchronous for name in cell.systems)
        steps = min(cell.steps, MOST_CHECKED_STEPS if free else CHECKED_STEPS)
        name = f"{cell.workload} ×{workers}"
        if len(known.get(name, ())) < steps:
            self._tell(f"{name}: the losses of one process")
            task = self._store.task(cell.workload, workers, steps, 1)
            command = [sys.executable, "-m", "bench.compare.reference", task.folder, str(steps)]
            done = subprocess.run(
                command, env=environment(), capture_output=True, text=True, timeout=TIMEOUT_S, check=False
            )
            if done.returncode:
                raise DriverFailed(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr[-1500:]}")
            known[name] = json.loads((Path(task.folder) / reference.FILE).read_text())
            shutil.rmtree(task.folder, ignore_errors=True)
        return known[name]
