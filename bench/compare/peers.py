"""Systems of other people that are not part of torch, each in an environment of its own.

Their settings are what a careful user of each would choose on one machine without a GPU: gloo over loopback, one
thread per worker, gradients reduced in float32, and nothing saved or logged.
"""

from __future__ import annotations

from bench.compare import launchers
from bench.compare.system import System

TENSORFLOW = ("tensorflow-cpu==2.21.0", "tf_keras==2.21.0")
KERAS_2 = {"TF_USE_LEGACY_KERAS": "1", "TF_CPP_MIN_LOG_LEVEL": "2"}

PEERS: tuple[System, ...] = (
    System(
        "accelerate",
        "HF Accelerate",
        "with_accelerate.py",
        launchers.accelerate,
        requirements=("accelerate==1.15.0",),
        check="import accelerate",
        note="its launcher of several processes (--multi_gpu) with Accelerator(cpu=True): with --cpu it would start "
        "one worker and not say so",
    ),
    System(
        "lightning",
        "Lightning",
        "with_lightning.py",
        launchers.itself,
        requirements=("lightning==2.6.6",),
        check="import lightning.pytorch",
        note="the Trainer with DDPStrategy, without logger, progress bar and checkpoints; it starts the other worker",
    ),
    System(
        "ray",
        "Ray Train",
        "with_ray.py",
        launchers.ray,
        requirements=("ray[train]==2.60.0",),
        check="import ray.train.torch",
        variables={"RAY_USAGE_STATS_ENABLED": "0"},
        has_daemons=True,
        note="TorchTrainer with prepare_model (DDP); a local Ray without dashboard is started and ended with each run",
    ),
    System(
        "deepspeed",
        "DeepSpeed ZeRO-0",
        "with_deepspeed.py",
        launchers.deepspeed,
        requirements=("deepspeed==0.19.8",),
        check="import deepspeed",
        setup=launchers.deepspeed_compiled,
        note="ZeRO stage 0 in float32 with torch's optimizer; the operation that it compiles at its first use on a CPU "
        "(minutes) is compiled before the clock starts",
    ),
    System(
        "torchft",
        "torchft",
        "with_torchft.py",
        launchers.torchft,
        requirements=("torchft==0.2.0",),
        check="import torchft",
        note="one replica per worker, each under its own torchrun, its DDP wrapper, a quorum at every step; no first "
        "synchronization (all begin alike)",
    ),
    System(
        "hivemind",
        "hivemind",
        "with_hivemind.py",
        launchers.hivemind,
        requirements=("hivemind==1.1.12",),
        check="import hivemind",
        setup=launchers.hivemind_identity,
        workloads=("mlp", "cnn", "gpt"),
        time_to_accuracy=False,
        first_step=False,
        note="its GradientAverager at every step, in groups of all workers (its Optimizer updates when about a batch "
        "has been added up, and alone when it finds nobody in time); it is made for steps of minutes over the internet",
    ),
    System(
        "horovod",
        "Horovod",
        "with_horovod.py",
        launchers.horovod,
        requirements=("horovod==0.28.1",),
        check="import horovod.torch; horovod.torch.allreduce",
        note="its last release, built by pip against this torch; where that fails it is left out (with torch 2.13 "
        "what comes of it cannot be imported: it asks for C++14, torch's headers for C++17, and no switch helps)",
    ),
    System(
        "tf_mirrored",
        "TF MultiWorkerMirrored",
        "with_tf_mirrored.py",
        launchers.tf_mirrored,
        requirements=TENSORFLOW,
        environment="tensorflow",
        shares_torch=False,
        check="import tensorflow",
        workloads=("mlp", "cnn", "gpt"),
        variables=KERAS_2,
        time_to_accuracy=False,
        first_step=False,
        note="the networks in Keras 2 from the same weights, a loop of one's own (fit of Keras 3 fails under it), ring "
        "over gRPC; one thread within an operation; the other workloads are not written for TensorFlow",
    ),
    System(
        "tf_servers",
        "TF ParameterServer",
        "with_tf_servers.py",
        launchers.tf_servers,
        requirements=TENSORFLOW,
        environment="tensorflow",
        shares_torch=False,
        check="import tensorflow",
        asynchronous=True,
        workloads=("mlp", "cnn"),
        variables=KERAS_2,
        time_to_accuracy=False,
        first_step=False,
        note="one server, nobody waits (it has no synchronous mode), momentum applied where the variable is; a step is "
        "one batch of every worker; its AdamW has no such operation, so gpt is left out",
    ),
)
