"""DistributedDataParallel on gloo: torchrun --standalone --nproc-per-node 2 with_ddp.py"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.task import Task

dist.init_process_group("gloo")
rank = dist.get_rank()
task = Task.load()
model = DistributedDataParallel(task.model(), gradient_as_bucket_view=True)
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
dist.destroy_process_group()
