"""Ray Train: python with_ray.py (it starts Ray on this machine, and the workers)"""

import ray
import torch
from ray.train import RunConfig, ScalingConfig, get_context
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

from bench.task import Task


def train() -> None:
    rank = get_context().get_world_rank()
    task = Task.load()
    model = prepare_model(task.model(), parallel_strategy_kwargs={"gradient_as_bucket_view": True})
    optimizer = task.optimizer(model.parameters())
    x, y = task.tensors()
    record = task.record(rank)
    for batch in torch.from_numpy(task.batches(rank)):
        optimizer.zero_grad()
        loss = task.loss(model(x[batch]), y[batch])
        loss.backward()
        optimizer.step()
        record.step(loss.detach(), model=model)
    record.done()


task = Task.load()
ray.init(num_cpus=task.workers + 1, include_dashboard=False, _node_ip_address="127.0.0.1")
trainer = TorchTrainer(
    train,
    torch_config=TorchConfig(backend="gloo"),
    scaling_config=ScalingConfig(num_workers=task.workers),
    run_config=RunConfig(storage_path=task.folder),
)
trainer.fit()
