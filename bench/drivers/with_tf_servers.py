"""TensorFlow's ParameterServerStrategy: for each chief, worker and server TF_CONFIG='{…}' python with_tf_servers.py"""

import numpy as np
import tensorflow as tf

from bench import tensorflow_models as models
from bench.task import Task

tf.config.threading.set_intra_op_parallelism_threads(1)
resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()
if resolver.task_type != "chief":
    cluster, role, number = resolver.cluster_spec(), resolver.task_type, resolver.task_id
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1)
    tf.distribute.Server(cluster, role, number, protocol="grpc", config=config).join()
strategy = tf.distribute.ParameterServerStrategy(resolver)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
task = Task.load()
with strategy.scope():
    model = models.model(task)
    optimizer = models.optimizer(task)


def samples() -> tf.data.Dataset:
    x, y = (tf.constant(values) for values in models.inputs(task))
    parts = np.concatenate([task.batches(rank) for rank in range(task.workers)])
    batches = tf.data.Dataset.from_tensor_slices(parts).shuffle(len(parts)).repeat()
    return batches.map(lambda batch: (tf.gather(x, batch), tf.gather(y, batch))).prefetch(2)


def replica_step(x: tf.Tensor, y: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = models.loss(y, model(x, training=True))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


@tf.function
def step(iterator: tf.data.Iterator) -> tuple[tf.Tensor, tf.Tensor]:
    loss = strategy.run(replica_step, args=next(iterator))
    with tf.control_dependencies([loss]):
        return tf.timestamp(), loss


iterator = iter(coordinator.create_per_worker_dataset(samples))
record = task.record(0)
for steps in (task.warm_up, task.steps - task.warm_up):
    results = [coordinator.schedule(step, args=(iterator,)) for _ in range(steps * task.workers)]
    coordinator.join()
    done = sorted((float(at), float(loss)) for at, loss in coordinator.fetch(results))
    for first in range(0, len(done), task.workers):
        times, losses = zip(*done[first : first + task.workers], strict=True)
        record.step(np.mean(losses), at=times[-1])
record.done()
