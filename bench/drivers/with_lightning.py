"""Lightning's Trainer: python with_lightning.py (it starts the other workers itself)"""

from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy

from bench.task import Task

task = Task.load()


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = task.model()
        self.x, self.y = task.tensors()

    def training_step(self, batch: torch.Tensor) -> torch.Tensor:
        return task.loss(self.model(self.x[batch]), self.y[batch])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return task.optimizer(self.model.parameters())

    def on_train_start(self) -> None:
        self.record = task.record(self.global_rank)

    def on_train_batch_end(self, outputs: Any, batch: torch.Tensor, batch_idx: int) -> None:
        self.record.step(outputs["loss"], model=self.model)

    def on_train_end(self) -> None:
        self.record.done()


trainer = Trainer(
    accelerator="cpu",
    devices=task.workers,
    strategy=DDPStrategy(process_group_backend="gloo", gradient_as_bucket_view=True),
    max_epochs=1,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    logger=False,
)
trainer.fit(Module(), torch.from_numpy(task.batches(trainer.global_rank)))
