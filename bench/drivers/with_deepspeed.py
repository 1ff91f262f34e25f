"""DeepSpeed, ZeRO stage 0 (whole weights everywhere): deepspeed --num_accelerators 2 with_deepspeed.py"""

import deepspeed
import torch
import torch.distributed as dist

from bench.task import Task

deepspeed.init_distributed(dist_backend="gloo")
rank = dist.get_rank()
task = Task.load()
model = task.model()
optimizer = task.optimizer(model.parameters())
config = {"train_micro_batch_size_per_gpu": task.batch_per_worker, "zero_optimization": {"stage": 0}}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
x, y = task.tensors()
record = task.record(rank)
for batch in torch.from_numpy(task.batches(rank)):
    loss = task.loss(engine(x[batch]), y[batch])
    engine.backward(loss)
    engine.step()
    record.step(loss.detach(), model=engine)
record.done()
dist.destroy_process_group()
