"""The losses that every synchronous system must have: one process, whole batches, gradients added part by part.

    python -m bench.compare.reference FOLDER STEPS      (the task's folder; writes reference.json there)

A part is one worker's, so BatchNorm sees what it sees at a worker. It is the yardstick of losses, not of speed.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from bench.task import Task

FILE = "reference.json"


def main() -> None:
    task, steps = Task.load(sys.argv[1]), int(sys.argv[2])
    model = task.model()
    optimizer = task.optimizer(model.parameters())
    x, y = task.tensors()
    parts = [torch.from_numpy(task.batches(rank)[:steps]) for rank in range(task.workers)]
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        found = 0.0
        for part in parts:
            loss = task.loss(model(x[part[step]]), y[part[step]]) / task.workers
            loss.backward()  # type: ignore[no-untyped-call]
            found += float(loss.detach())
        optimizer.step()
        losses.append(found)
    (Path(task.folder) / FILE).write_text(json.dumps(losses))


if __name__ == "__main__":
    main()
