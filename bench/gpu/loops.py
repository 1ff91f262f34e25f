"""The peers on one accelerator: each as its user would write the loop. Started as a process:

    python -m bench.gpu.loops SYSTEM FILE --steps N --warm-up K --batch B

It writes the losses of all steps, the seconds of those after the warm-up, and when the first step had ended.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.gpu import job

DEVICE = torch.device("cuda")


class Clock:
    """Times the steps without making the host wait for the device, but twice."""

    def __init__(self, steps: int, warm_up: int) -> None:
        self.steps, self.warm_up = steps, warm_up
        self.losses: list[torch.Tensor] = []
        self.first_step_at = 0.0
        self._started = 0.0

    def step(self, loss: torch.Tensor) -> None:
        self.losses.append(loss.detach())
        if len(self.losses) == 1:
            torch.cuda.synchronize()
            self.first_step_at = time.time()
        if len(self.losses) == self.warm_up:
            torch.cuda.synchronize()
            self._started = time.perf_counter()

    def found(self) -> dict[str, Any]:
        torch.cuda.synchronize()
        seconds = time.perf_counter() - self._started
        peak = torch.cuda.max_memory_allocated()
        losses = [float(loss) for loss in self.losses]
        return {"losses": losses, "seconds": seconds, "first_step_at": self.first_step_at, "allocated_bytes": peak}


def batches(steps: int, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    x, y = (tensor.pin_memory() for tensor in job.data())
    for step in range(steps):
        first = step * size % len(x)
        yield x[first : first + size], y[first : first + size]


def bare(clock: Clock, size: int) -> None:
    torch.manual_seed(job.SEED)
    model = job.GPT().to(DEVICE)
    optimizer = job.optimizer(model.parameters())
    forward = torch.compile(model)
    for x, y in batches(clock.steps, size):
        x, y = x.to(DEVICE, non_blocking=True), y.to(DEVICE, non_blocking=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = job.loss(forward(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        clock.step(loss)


def accelerate(clock: Clock, size: int) -> None:
    from accelerate import Accelerator
    from accelerate.utils import TorchDynamoPlugin

    accelerator = Accelerator(mixed_precision="bf16", dynamo_plugin=TorchDynamoPlugin(backend="inductor"))
    torch.manual_seed(job.SEED)
    model = job.GPT()
    model, optimizer = accelerator.prepare(model, job.optimizer(model.parameters()))
    for x, y in batches(clock.steps, size):
        x, y = x.to(accelerator.device, non_blocking=True), y.to(accelerator.device, non_blocking=True)
        with accelerator.autocast():
            loss = job.loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        clock.step(loss)


def lightning(clock: Clock, size: int) -> None:
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(job.SEED)
            self.model = job.GPT()
            self.compiled = [torch.compile(self.model)]  # in a list: it is no other module of this one

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            x, y = batch
            loss = job.loss(self.compiled[0](x), y)
            clock.step(loss)  # of the step before it, for timing: the update follows
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return job.optimizer(self.parameters())

    x, y = job.data()
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=size, pin_memory=True)
    trainer = pl.Trainer(
        accelerator="gpu", devices=1, precision="bf16-mixed", max_steps=clock.steps, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), loader)


SYSTEMS: dict[str, Callable[[Clock, int], None]] = {"bare": bare, "accelerate": accelerate, "lightning": lightning}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("system", choices=SYSTEMS)
    parser.add_argument("file", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--warm-up", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    given = parser.parse_args()
    clock = Clock(given.steps, given.warm_up)
    SYSTEMS[given.system](clock, given.batch)
    given.file.write_text(json.dumps(clock.found()))


if __name__ == "__main__":
    main()
