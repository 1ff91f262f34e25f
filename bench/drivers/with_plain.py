"""One plain PyTorch process: the loop that everybody begins with. Started N times at once, it is the ideal.

python with_plain.py [RANK]
"""

import sys

import torch

from bench.task import Task

rank = int(sys.argv[1]) if len(sys.argv) > 1 else 0
task = Task.load()
model = task.model()
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
