"""TensorFlow's MultiWorkerMirroredStrategy: for each worker TF_CONFIG='{…}' python with_tf_mirrored.py"""

import tensorflow as tf

from bench import tensorflow_models as models
from bench.task import Task

tf.config.threading.set_intra_op_parallelism_threads(1)
strategy = tf.distribute.MultiWorkerMirroredStrategy()
rank = strategy.cluster_resolver.task_id
task = Task.load()
with strategy.scope():
    model = models.model(task)
    optimizer = models.optimizer(task)
x, y = (tf.constant(values) for values in models.inputs(task))


def replica_step(batch: tf.Tensor) -> tf.Tensor:
    with tf.GradientTape() as tape:
        loss = models.loss(tf.gather(y, batch), model(tf.gather(x, batch), training=True))
        share = loss / task.workers
    gradients = tape.gradient(share, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
    return loss


@tf.function
def step(batch: tf.Tensor) -> tf.Tensor:
    return strategy.run(replica_step, args=(batch,))


record = task.record(rank)
for batch in tf.constant(task.batches(rank)):
    record.step(step(batch))
record.done()
