"""hivemind, averaging at every step: hivemind-dht, and for each peer python with_hivemind.py RANK ADDRESS-OF-IT"""

import sys

import hivemind
import torch
from hivemind.optim.grad_averager import GradientAverager

from bench.task import Task

rank, meeting_place = int(sys.argv[1]), sys.argv[2]
task = Task.load()
model = task.model()
optimizer = task.optimizer(model.parameters())
dht = hivemind.DHT(initial_peers=[meeting_place], host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
averager = GradientAverager(
    model.parameters(),
    dht=dht,
    prefix=task.workload,
    reuse_grad_buffers=True,
    target_group_size=task.workers,
    min_group_size=task.workers,
    min_matchmaking_time=2.0,
    request_timeout=1.0,
    start=True,
)
x, y = task.tensors()
record = task.record(rank)
for batch in torch.from_numpy(task.batches(rank)):
    loss = task.loss(model(x[batch]), y[batch])
    loss.backward()
    averager.accumulate_grads_(task.batch_per_worker)
    averager.step(timeout=120.0)
    with averager.use_averaged_gradients():
        optimizer.step()
    record.step(loss.detach(), model=model)
record.done()
averager.shutdown()
dht.shutdown()
