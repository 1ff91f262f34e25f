"""Starts TensorFlow's ParameterServerStrategy (bench/parameterserver_tf.py) under a Python that has TensorFlow."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from drivers import BENCH, TIMEOUT_S, DriverFailed, Measured, Task, environment
from machine import Bystanders
from workloads import SEED, WORKERS, WORKLOADS

DENSE = ("mlp", "wide", "wide8")
"""The workloads that it knows."""


def measure(task: Task, python: str) -> Measured:
    """One server, two workers; and the chief, which only says who does what."""
    workload = WORKLOADS[task.workload]
    torch.manual_seed(SEED)
    model = workload.model()
    rate = workload.optimizer(model.parameters()).param_groups[0]["lr"]
    x, y = workload.data()
    arrays = {"x": x.numpy(), "y": y.numpy()}
    for number, layer in enumerate(one for one in model.modules() if isinstance(one, torch.nn.Linear)):
        arrays |= {f"w{number}": layer.weight.detach().numpy(), f"b{number}": layer.bias.detach().numpy()}
    ports = _free_ports(WORKERS + 2)
    cluster = {"chief": ports[:1], "ps": ports[1:2], "worker": ports[2:]}
    program = [python, str(BENCH / "parameterserver_tf.py")]
    where = ["--cluster", json.dumps({role: [f"127.0.0.1:{port}" for port in some] for role, some in cluster.items()})]
    variables = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    began, bystanders = time.time(), Bystanders()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        np.savez(Path(folder) / "data.npz", **arrays)  # type: ignore[arg-type]
        for role, index in [("ps", 0), *(("worker", number) for number in range(WORKERS))]:
            command = [*program, role, "--index", str(index), *where]
            member = subprocess.Popen(command, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(member.wait)
            stack.callback(member.kill)
        chief = [*program, "chief", *where, "--data", f"{folder}/data.npz", "--batch", str(workload.batch_per_worker)]
        chief += ["--lr", str(rate), "--steps", str(task.steps), "--warm-up", str(task.warm_up), "--out", folder]
        done = subprocess.run(chief, env=variables, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        if done.returncode:
            raise DriverFailed(f"TensorFlow: {done.stderr[-2000:]}")
        found = json.loads((Path(folder) / "tensorflow.json").read_text())
    others = bystanders.share()
    return Measured(task.timed_samples / found["seconds"], found["losses"], time.time() - began, others)


def has_tensorflow(python: str) -> bool:
    if not python or not os.access(python, os.X_OK):
        return False
    look = [python, "-c", "import importlib.util as u, sys; sys.exit(u.find_spec('tensorflow') is None)"]
    return subprocess.run(look, check=False).returncode == 0


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [int(one.getsockname()[1]) for one in sockets]
