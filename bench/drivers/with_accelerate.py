"""HF Accelerate: accelerate launch --multi_gpu --num_processes 2 with_accelerate.py"""

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs

from bench.task import Task

accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)])
rank = accelerator.process_index
task = Task.load()
model = task.model()
model, optimizer = accelerator.prepare(model, task.optimizer(model.parameters()))
x, y = task.tensors()
record = task.record(rank)
for batch in torch.from_numpy(task.batches(rank)):
    optimizer.zero_grad()
    loss = task.loss(model(x[batch]), y[batch])
    accelerator.backward(loss)
    optimizer.step()
    record.step(loss.detach(), model=model)
record.done()
accelerator.end_training()
