"""torchft: torchft_lighthouse --min_replicas 2, and for each replica REPLICA_GROUP_ID=0 torchrun with_torchft.py"""

import os
from typing import Any

import torch
from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

from bench.task import Task

rank = int(os.environ["REPLICA_GROUP_ID"])
task = Task.load()
module = task.model()
inner = task.optimizer(module.parameters())


def state() -> dict[str, Any]:
    return {"model": module.state_dict(), "optimizer": inner.state_dict()}


def load(found: dict[str, Any]) -> None:
    module.load_state_dict(found["model"])
    inner.load_state_dict(found["optimizer"])


manager = Manager(
    pg=ProcessGroupGloo(),
    load_state_dict=load,
    state_dict=state,
    min_replica_size=task.workers,
    replica_id=f"replica{rank}",
    hostname="127.0.0.1",
    init_sync=False,
)
model = DistributedDataParallel(manager, module, gradient_as_bucket_view=True)
optimizer = Optimizer(manager, inner)
x, y = task.tensors()
record = task.record(rank)
for batch in torch.from_numpy(task.batches(rank)):
    optimizer.zero_grad()
    loss = task.loss(model(x[batch]), y[batch])
    loss.backward()
    optimizer.step()
    record.step(loss.detach(), model=model)
record.done()
manager.shutdown()
