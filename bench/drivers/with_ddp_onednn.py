"""DistributedDataParallel on gloo, of a model whose linear layers multiply with oneDNN, as those of
`Job(matmul="onednn")` do: torchrun --standalone --nproc-per-node 2 with_ddp_onednn.py"""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from bench.task import Task
from distbelief.strategies.flatmodel.onednn import use_onednn

dist.init_process_group("gloo")
rank = dist.get_rank()
task = Task.load()
model = task.model()
use_onednn(model)
model = DistributedDataParallel(model, gradient_as_bucket_view=True)
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
