"""What all systems are given alike, written once: the data and the first weights of a workload; and tasks on them."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from bench import order
from bench.task import Task
from bench.workloads import SEED, WORKLOADS

MOST_EVALUATIONS = 12


class Store:
    """A folder of workloads and tasks, gone with the program."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._tasks = 0

    def task(
        self, workload: str, workers: int, steps: int, warm_up: int, *, meet: bool = False, broken_off: bool = False
    ) -> Task:
        stored = self._stored(workload)
        chosen = WORKLOADS[workload]
        self._tasks += 1
        task = Task(
            workload, workers, steps, warm_up, chosen.batch_per_worker, SEED, asdict(chosen.update), str(stored),
            evaluate_every=max(1, steps // MOST_EVALUATIONS) if chosen.test else 0, meet=meet, broken_off=broken_off,
            folder=str(self._folder / f"task{self._tasks}"),
        )  # fmt: skip
        samples = len(np.load(stored / "y.npy", mmap_mode="r"))
        task.save(Path(task.folder), order.batches(samples, workers, task.batch_per_worker, steps, SEED))
        return task

    def _stored(self, workload: str) -> Path:
        folder = self._folder / workload
        if folder.exists():
            return folder
        chosen = WORKLOADS[workload]
        x, y = chosen.data()
        arrays = {"x": x, "y": y}
        if chosen.test:
            arrays |= dict(zip(("test_x", "test_y"), chosen.test(), strict=True))
        torch.manual_seed(SEED)
        weights = {name: value.numpy() for name, value in chosen.model().state_dict().items()}
        folder.mkdir(parents=True)
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array.numpy())
        np.savez(folder / "initial.npz", **weights)
        return folder
