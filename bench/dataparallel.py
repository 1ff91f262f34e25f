"""Data parallelism alone, in a quarter of an hour: our allreduce beside DDP and the ideal, and what its options cost.

    python -m bench.dataparallel --json FILE

A part of `python -m bench`: MLP, CNN and GPT on two workers, in turns of seconds; with one shard per worker and with
four, exact and not, with torch's products and with oneDNN's. Then the launch to the first step, with losses checked,
and the reduce in shared memory beside gloo and memcpy. Other options are those of `python -m bench`.
"""

from __future__ import annotations

import subprocess
import sys

from bench.compare.systems import DDP, DDP_ONEDNN, IDEAL, OURS, OURS_ONEDNN
from bench.running import BENCH

SYSTEMS = (OURS, OURS_ONEDNN, "allreduce-4", "inexact", IDEAL, DDP, DDP_ONEDNN)
ROUNDS, REPETITIONS = 12, 3


def measure(options: list[str]) -> int:
    """`options`: of the command line; what they say goes before what is said here."""
    to_file = ["--json", str(BENCH / "results" / "dataparallel.json")]
    turns = ["turns", "--workloads", "mlp,cnn,gpt", "--systems", ",".join(SYSTEMS), "--repetitions", str(ROUNDS)]
    launch = ["--workloads", "mlp", "--systems", f"{OURS},{IDEAL},{DDP}", "--repetitions", str(REPETITIONS)]
    parts = [turns, ["speed", "bandwidth", *launch, "--resume"]]
    return max(subprocess.call([sys.executable, "-m", "bench", *to_file, *part, *options]) for part in parts)


if __name__ == "__main__":
    try:
        sys.exit(measure(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)  # the program below has said what is kept
