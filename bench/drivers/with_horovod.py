"""Horovod on gloo: horovodrun --gloo -np 2 python with_horovod.py"""

import horovod.torch as hvd
import torch

from bench.task import Task

hvd.init()
rank = hvd.rank()
task = Task.load()
model = task.model()
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
optimizer = hvd.DistributedOptimizer(task.optimizer(model.parameters()), named_parameters=model.named_parameters())
x, y = task.tensors()
record = task.record(rank)
for batch in torch.from_numpy(task.batches(rank)):
    optimizer.zero_grad()
    loss = task.loss(model(x[batch]), y[batch])
    loss.backward()
    optimizer.step()
    record.step(loss.detach(), model=model)
record.done()
hvd.shutdown()
