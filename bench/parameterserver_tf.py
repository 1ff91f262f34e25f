"""TensorFlow's ParameterServerStrategy on the dense workloads: run by a Python that has TensorFlow, not by ours.

    python bench/parameterserver_tf.py chief --cluster '{"chief": [...], "worker": [...], "ps": [...]}' \\
        --data DATA.npz --batch 16 --lr 0.005 --steps 50 --warm-up 5 --out DIR
    python bench/parameterserver_tf.py worker|ps --index N --cluster …

DATA.npz has the samples (x, y) and the first weights (w0, b0, w1, …) of a network of dense layers with ReLU between
them. A step is one batch of every worker, as in the other drivers; here no worker waits for another (there is no
synchronous mode). The server applies momentum where the variable is, by the operation that TensorFlow has for it.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import numpy as np
import tensorflow as tf

MOMENTUM = 0.9


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("chief", "worker", "ps"))
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--cluster", type=json.loads, required=True)
    parser.add_argument("--data", type=Path)
    parser.add_argument("--batch", type=int, default=0)
    parser.add_argument("--lr", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=0)
    parser.add_argument("--warm-up", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    cluster = tf.train.ClusterSpec(args.cluster)
    if args.role != "chief":
        settings = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1)
        tf.distribute.Server(cluster, args.role, args.index, protocol="grpc", config=settings, start=True).join()
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        cluster, task_type="chief", task_id=0, rpc_layer="grpc"
    )
    measured = train(tf.distribute.ParameterServerStrategy(resolver), args, len(args.cluster["worker"]))
    (args.out / "tensorflow.json").write_text(json.dumps(measured))
    os._exit(0)  # the other roles are ended by who started them; waiting for them would take a minute


def train(strategy: Any, args: argparse.Namespace, workers: int) -> dict[str, Any]:
    content = np.load(args.data)
    x, y = content["x"], content["y"]
    names = [name for layer in range(len(content.files) // 2 - 1) for name in (f"w{layer}", f"b{layer}")]
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        values = [tf.Variable(content[name]) for name in names]
        moments = [tf.Variable(np.zeros_like(content[name])) for name in names]

    def samples() -> Any:
        return tf.data.Dataset.from_tensor_slices((x, y)).shuffle(len(x)).repeat().batch(args.batch).prefetch(2)

    batches = iter(coordinator.create_per_worker_dataset(samples))

    @tf.function
    def step(iterator: Any) -> Any:
        images, classes = next(iterator)
        with tf.GradientTape() as tape:
            hidden = images
            for layer in range(0, len(values), 2):
                hidden = tf.matmul(hidden, values[layer], transpose_b=True) + values[layer + 1]
                hidden = tf.nn.relu(hidden) if layer + 2 < len(values) else hidden
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(classes, hidden))
        for value, moment, gradient in zip(values, moments, tape.gradient(loss, values), strict=True):
            tf.raw_ops.ResourceApplyMomentum(
                var=value.handle, accum=moment.handle, lr=args.lr, grad=gradient, momentum=MOMENTUM
            )
        return loss

    def run(count: int) -> list[float]:
        results = [coordinator.schedule(step, args=(batches,)) for _ in range(count * workers)]
        coordinator.join()
        return [float(one.fetch()) for one in results]

    first = run(args.warm_up)
    started = time.perf_counter()
    losses = run(args.steps - args.warm_up)
    return {"seconds": time.perf_counter() - started, "losses": first + losses}


if __name__ == "__main__":
    main()
