"""How each peer is started under kills, and whether it can be: extras of the benchmark, never of the package."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from bench.compare import environments
from bench.compare.systems import SYSTEMS
from bench.recovery.peer import CHECKPOINT_EVERY_STEPS
from bench.running import BENCH, Command

RESTARTS = 1000
"""More than there will ever be kills: torchrun's own count is not what is measured."""


@dataclass(frozen=True)
class Peer:
    title: str
    launcher: Callable[[str, str, Path, int], Command]
    """(interpreter, workload, folder to write to, workers)"""
    system: str = ""
    """Of the comparison, in whose environment it runs; none: in the program's own."""
    environment: Mapping[str, str] = field(default_factory=dict)
    stop: signal.Signals = signal.SIGTERM

    def skipped(self) -> str:
        """Why this peer cannot be measured here; empty when it can."""
        try:
            _python(self.system)
        except environments.Unavailable as error:
            return str(error)
        return ""

    def command(self, workload: str, out: Path, workers: int) -> Command:
        return self.launcher(_python(self.system), workload, out, workers)


@cache
def _python(system: str) -> str:
    if system and system not in SYSTEMS:
        raise environments.Unavailable(f"there is no system '{system}' in bench/compare/peers.py")
    return environments.python_for(SYSTEMS[system]) if system else sys.executable


def torchrun_command(python: str, workload: str, out: Path, workers: int) -> Command:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    launcher += ["--nproc-per-node", str(workers), "--max-restarts", str(RESTARTS)]
    return [python, *launcher, str(BENCH / "recovery" / "peer.py"), workload, "--out", str(out)]


def ray_command(python: str, workload: str, out: Path, workers: int) -> Command:
    return _own(python, "with_ray.py", workload, out, workers)


def torchft_command(python: str, workload: str, out: Path, workers: int) -> Command:
    return _own(python, "with_torchft.py", workload, out, workers)


def _own(python: str, script: str, workload: str, out: Path, workers: int) -> Command:
    return [python, str(BENCH / "recovery" / script), workload, "--workers", str(workers), "--out", str(out)]


# Without this, torchrun's restarts keep the store, where the new gloo group reads the addresses of the dead one and is
# refused (pytorch#135712, #167288; seen here with torch 2.13 and 3 workers: it never trained again).
_NEW_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}

PEERS = {
    "torchrun": Peer(
        f"torchrun, checkpoint every {CHECKPOINT_EVERY_STEPS} steps", torchrun_command, environment=_NEW_STORE
    ),
    "ray": Peer(f"Ray Train, checkpoint every {CHECKPOINT_EVERY_STEPS} steps", ray_command, "ray"),
    "torchft": Peer("torchft, tuned", torchft_command, "torchft"),
}
