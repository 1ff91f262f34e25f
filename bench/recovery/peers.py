"""How each peer is started under kills, and whether it can be: extras of the benchmark, never of the package."""

from __future__ import annotations

import importlib.util
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from bench.recovery.peer import CHECKPOINT_EVERY_STEPS
from bench.running import BENCH, Command

RESTARTS = 1000
"""More than there will ever be kills: torchrun's own count is not what is measured."""


@dataclass(frozen=True)
class Peer:
    title: str
    command: Callable[[str, Path, int], Command]
    """(workload, folder to write to, workers)"""
    needs: str
    """The package that must be there."""
    environment: Mapping[str, str] = field(default_factory=dict)
    stop: signal.Signals = signal.SIGTERM

    def skipped(self) -> str:
        """Why this peer cannot be measured here; empty when it can."""
        if importlib.util.find_spec(self.needs) is None:
            return f"'{self.needs}' is not installed (pip install {_PACKAGES[self.needs]})"
        return ""


def torchrun_command(workload: str, out: Path, workers: int) -> Command:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    launcher += ["--nproc-per-node", str(workers), "--max-restarts", str(RESTARTS)]
    return [sys.executable, *launcher, str(BENCH / "recovery" / "peer.py"), workload, "--out", str(out)]


def ray_command(workload: str, out: Path, workers: int) -> Command:
    return _own("with_ray.py", workload, out, workers)


def torchft_command(workload: str, out: Path, workers: int) -> Command:
    return _own("with_torchft.py", workload, out, workers)


def _own(script: str, workload: str, out: Path, workers: int) -> Command:
    return [sys.executable, str(BENCH / "recovery" / script), workload, "--workers", str(workers), "--out", str(out)]


_PACKAGES = {"torch": "torch", "ray": "'ray[train]'", "torchft": "torchft"}

# Without this, torchrun's restarts keep the store, where the new gloo group reads the addresses of the dead one and is
# refused (pytorch#135712, #167288; seen here with torch 2.13 and 3 workers: it never trained again).
_NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

PEERS = {
    "torchrun": Peer(
        f"torchrun, checkpoint every {CHECKPOINT_EVERY_STEPS} steps", torchrun_command, "torch", _NEW_STORE
    ),
    "ray": Peer(f"Ray Train, checkpoint every {CHECKPOINT_EVERY_STEPS} steps", ray_command, "ray"),
    "torchft": Peer("torchft, tuned", torchft_command, "torchft"),
}
