"""Ray Train under kills: the loop of recovery/peer.py in a TorchTrainer that restarts without limit, with Ray's own
checkpoints.

    PYTHONPATH=. python bench/recovery/with_ray.py mlp --workers 3 --out DIR
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import ray  # type: ignore[import-not-found]
import ray.train  # type: ignore[import-not-found]
import torch
from ray.train.torch import TorchConfig, TorchTrainer  # type: ignore[import-not-found]

from bench.recovery.peer import State, StepLog, train
from bench.workloads import WORKLOADS

FILE = "state.pt"


def load() -> State | None:
    checkpoint = ray.train.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        state: State = torch.load(Path(folder) / FILE, weights_only=True)
    return state


def save(state: State) -> None:
    """All ranks report, as Ray wants it; rank 0 has the checkpoint."""
    metrics = {"steps": state["steps"]}
    if ray.train.get_context().get_world_rank() != 0:
        ray.train.report(metrics)
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.save(state, Path(folder) / FILE)
        ray.train.report(metrics, checkpoint=ray.train.Checkpoint.from_directory(folder))


def loop(config: dict[str, str]) -> None:
    train(WORKLOADS[config["workload"]], StepLog(Path(config["out"])), load, save)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("--workers", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    # More processors than there may be: Ray only counts them, and the workers share what is there, as all drivers' do.
    ray.init(
        address="local",
        num_cpus=args.workers + 1,
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(args.out / "session"),
        runtime_env={"env_vars": {"PYTHONPATH": os.environ["PYTHONPATH"], "OMP_NUM_THREADS": "1"}},
    )
    trainer = TorchTrainer(
        loop,
        train_loop_config={"workload": args.workload, "out": str(args.out)},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ray.train.ScalingConfig(num_workers=args.workers),
        run_config=ray.train.RunConfig(
            storage_path=str(args.out / "ray"),
            failure_config=ray.train.FailureConfig(max_failures=-1),
            checkpoint_config=ray.train.CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    main()
