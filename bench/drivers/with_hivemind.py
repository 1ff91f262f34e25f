"""hivemind, synchronous: hivemind-dht, and for each peer python with_hivemind.py RANK ADDRESS-OF-HIVEMIND-DHT"""

import itertools
import sys

import hivemind
import torch

from bench.task import Task

rank, meeting_place = int(sys.argv[1]), sys.argv[2]
task = Task.load()
model = task.model()
dht = hivemind.DHT(initial_peers=[meeting_place], host_maddrs=["/ip4/127.0.0.1/tcp/0"], start=True)
optimizer = hivemind.Optimizer(
    dht=dht,
    run_id=task.workload,
    params=model.parameters(),
    optimizer=task.optimizer,
    batch_size_per_step=task.batch_per_worker,
    target_batch_size=task.global_batch,
    matchmaking_time=2.0,
    average_state_every=task.steps + 1,
    averager_opts={"target_group_size": task.workers, "request_timeout": 1.0},
    tracker_opts={"min_refresh_period": 0.1, "default_refresh_period": 0.2},
)
x, y = task.tensors()
record = task.record(rank)
for batch in itertools.cycle(torch.from_numpy(task.batches(rank))):
    optimizer.zero_grad()
    loss = task.loss(model(x[batch]), y[batch])
    loss.backward()
    before = optimizer.local_epoch
    optimizer.step()
    for _ in range(before, min(optimizer.local_epoch, task.steps)):
        record.step(loss.detach())
    if optimizer.local_epoch >= task.steps:
        break
record.done()
optimizer.shutdown()
dht.shutdown()
