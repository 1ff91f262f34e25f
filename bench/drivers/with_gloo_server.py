"""A parameter server as a careful user writes it on torch.distributed: gloo, point to point, one flat buffer.

torchrun --standalone --nproc-per-node 3 with_gloo_server.py: the last rank is the server. Workers send their gradients
and receive parameters, each as one message; it adds the gradients of all, then steps.
"""

import torch
import torch.distributed as dist

from bench.task import Task


def flat(model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    """All parameters in one buffer, all gradients in another; the model's own are views of them."""
    parameters = list(model.parameters())
    values = torch.cat([p.detach().reshape(-1) for p in parameters])
    gradients = torch.zeros_like(values)
    at = 0
    for parameter in parameters:
        part = slice(at, at + parameter.numel())
        parameter.data = values[part].view(parameter.shape)
        parameter.grad = gradients[part].view(parameter.shape)
        at += parameter.numel()
    return values, gradients


dist.init_process_group("gloo")
rank = dist.get_rank()
task = Task.load()
workers = range(task.workers)
model = task.model()
values, gradients = flat(model)
if rank == task.workers:
    optimizer = task.optimizer(model.parameters())
    received = [torch.empty_like(values) for _ in workers]
    for _ in range(task.steps):
        for one in [dist.irecv(received[worker], worker) for worker in workers]:
            one.wait()
        torch.add(*received[:2], out=gradients) if len(received) > 1 else gradients.copy_(received[0])
        for other in received[2:]:
            gradients.add_(other)
        gradients.mul_(1 / task.workers)
        optimizer.step()
        for one in [dist.isend(values, worker) for worker in workers]:
            one.wait()
else:
    x, y = task.tensors()
    record = task.record(rank)
    for batch in torch.from_numpy(task.batches(rank)):
        gradients.zero_()
        loss = task.loss(model(x[batch]), y[batch])
        loss.backward()
        dist.send(gradients, task.workers)
        dist.recv(values, task.workers)
        record.step(loss.detach(), model=model)
    record.done()
dist.barrier()
dist.destroy_process_group()
