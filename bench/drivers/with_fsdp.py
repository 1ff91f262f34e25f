"""FSDP2 (fully_shard) on gloo: torchrun --standalone --nproc-per-node 2 with_fsdp.py"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from bench.task import Task

dist.init_process_group("gloo")
rank = dist.get_rank()
task = Task.load()
model = task.model()
mesh = init_device_mesh("cpu", (task.workers,))
for block in task.blocks(model):
    fully_shard(block, mesh=mesh)
fully_shard(model, mesh=mesh)
optimizer = task.optimizer(model.parameters(), fused=task.update["kind"] == "adamw")  # DTensor has no fused SGD
x, y = task.tensors()
record = task.record(rank)
for batch in torch.from_numpy(task.batches(rank)):
    optimizer.zero_grad()
    loss = task.loss(model(x[batch]), y[batch])
    loss.backward()
    optimizer.step()
    record.step(loss.detach(), model=model)
record.done()
dist.destroy_process_group()
