"""The workloads for TensorFlow's drivers: the same networks in Keras, with the same first weights, loss and optimizer.

The torch ones are part of the workloads, so these do not count as a TensorFlow user's code either. Written for Keras 2
(the package tf_keras, TF_USE_LEGACY_KERAS=1): Keras 3 does not train under ParameterServerStrategy.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from bench.task import Task

Values = Mapping[str, NDArray[Any]]
"""Weights by their names in torch, where a layer's are (outputs, inputs, …)."""
Layers = tf.keras.layers
HEADS = 8


def inputs(task: Task) -> tuple[NDArray[Any], NDArray[Any]]:
    """Samples and targets; images as (height, width, channels): TensorFlow's only order on a CPU."""
    x, y = task.data()
    return np.ascontiguousarray(np.moveaxis(x, 1, -1) if x.ndim == 4 else x), np.asarray(y)


def model(task: Task) -> Any:
    """Inside the strategy's scope."""
    return {"mlp": mlp, "cnn": cnn, "gpt": gpt}[task.workload](task.initial())


def optimizer(task: Task) -> Any:
    """The older SGD is one operation where the variable is; the newer one would move the moments to the workers.

    Keras's Adam adds epsilon before the bias is corrected, torch's after: 3e-4 in the losses of the first steps.
    """
    update = task.update
    if update["kind"] == "sgd":
        return tf.keras.optimizers.legacy.SGD(update["lr"], update["momentum"])
    return tf.keras.optimizers.AdamW(update["lr"], update["weight_decay"], epsilon=1e-8)


def loss(targets: Any, output: Any) -> Any:
    """The mean over the samples given."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(targets, output))


def mlp(first: Values) -> Any:
    return tf.keras.Sequential([dense(first, "0", "relu"), dense(first, "2", "relu"), dense(first, "4")])


def cnn(first: Values) -> Any:
    channels, size = first["3.weight"].shape[0], 7
    by_channel = first["7.weight"].reshape(-1, channels, size, size)  # torch flattens (channels, height, width)
    moved = {"7.weight": np.moveaxis(by_channel, 1, -1).reshape(len(by_channel), -1), "7.bias": first["7.bias"]}
    return tf.keras.Sequential(
        [
            convolution(first, "0"), Layers.MaxPool2D(2), convolution(first, "3"), Layers.MaxPool2D(2),
            Layers.Flatten(), dense(moved, "7", "relu"), dense(first, "9"),
        ]
    )  # fmt: skip


def gpt(first: Values) -> Any:
    length, _ = first["places.weight"].shape
    symbols = tf.keras.Input((length,), dtype=tf.int64)
    x = embedding(first, "symbols")(symbols) + embedding(first, "places")(tf.range(length)[None])
    for number in range(sum(name.endswith("norm1.weight") for name in first)):
        block = f"blocks.{number}"
        seen = attention(dense(first, f"{block}.queries_keys_values")(norm(first, f"{block}.norm1")(x)))
        x = x + dense(first, f"{block}.mixed")(seen)
        hidden = dense(first, f"{block}.feed_forward.0", tf.nn.gelu)(norm(first, f"{block}.norm2")(x))
        x = x + dense(first, f"{block}.feed_forward.2")(hidden)
    return tf.keras.Model(symbols, dense(first, "out.1")(norm(first, "out.0")(x)))


def attention(queries_keys_values: Any) -> Any:
    """Every place sees those before it and itself."""
    _, length, width = queries_keys_values.shape
    parts = tf.reshape(queries_keys_values, (-1, length, 3, HEADS, width // 3 // HEADS))
    query, key, value = tf.unstack(tf.transpose(parts, (2, 0, 3, 1, 4)))
    likeness = tf.matmul(query, key, transpose_b=True) / float(query.shape[-1]) ** 0.5
    later = tf.linalg.band_part(tf.ones((length, length)), -1, 0) == 0
    seen = tf.matmul(tf.nn.softmax(tf.where(later, likeness.dtype.min, likeness)), value)
    return tf.reshape(tf.transpose(seen, (0, 2, 1, 3)), (-1, length, width // 3))


def dense(first: Values, name: str, activation: str | Callable[[Any], Any] | None = None) -> Any:
    kernel, bias = first[f"{name}.weight"].T, first[f"{name}.bias"]
    return Layers.Dense(len(bias), activation, kernel_initializer=exactly(kernel), bias_initializer=exactly(bias))


def convolution(first: Values, name: str) -> Any:
    kernel, bias = np.transpose(first[f"{name}.weight"], (2, 3, 1, 0)), first[f"{name}.bias"]
    return Layers.Conv2D(
        len(bias), 3, padding="same", activation="relu",
        kernel_initializer=exactly(kernel), bias_initializer=exactly(bias),
    )  # fmt: skip


def embedding(first: Values, name: str) -> Any:
    table = first[f"{name}.weight"]
    return Layers.Embedding(*table.shape, embeddings_initializer=exactly(table))


def norm(first: Values, name: str) -> Any:
    scale, shift = first[f"{name}.weight"], first[f"{name}.bias"]
    return Layers.LayerNormalization(epsilon=1e-5, gamma_initializer=exactly(scale), beta_initializer=exactly(shift))


def exactly(values: NDArray[Any]) -> Any:
    return tf.constant_initializer(values)
