"""Data parallelism alone, in half an hour: our allreduce beside DDP and the ideal, and what its options cost.

    python -m bench.dataparallel --json FILE

A part of `python -m bench`: MLP, CNN and GPT on two workers, in turns of seconds; with one shard per worker and with
four, exact and not, with torch's products and with oneDNN's. Whole runs of all of them, for losses and the time to the
first step, and the reduce in shared memory beside gloo and memcpy. Other options are those of `python -m bench`.
"""

from __future__ import annotations

import subprocess
import sys

from bench.compare.systems import DDP, DDP_ONEDNN, IDEAL, OURS, OURS_ONEDNN
from bench.running import BENCH

SYSTEMS = (OURS, OURS_ONEDNN, "allreduce-4", "inexact", IDEAL, DDP, DDP_ONEDNN)
WORKLOADS = "mlp,cnn,gpt"
ROUNDS, REPETITIONS = 12, 2


def measure(options: list[str]) -> int:
    """`options`: of the command line; what they say goes before what is said here."""
    common = ["--json", str(BENCH / "results" / "dataparallel.json"), "--workloads", WORKLOADS]
    common += ["--systems", ",".join(SYSTEMS)]
    whole = ["speed", "bandwidth", *common, "--repetitions", str(REPETITIONS)]
    turns = ["turns", *common, "--repetitions", str(ROUNDS), "--resume"]
    statuses = []
    for part in (whole, turns):
        statuses.append(subprocess.call([sys.executable, "-m", "bench", *part, *options]))
        if statuses[-1] not in (0, 1):  # 1: it has measured, and something is not as it should be
            break
    return next((status for status in statuses if status), 0)


if __name__ == "__main__":
    try:
        sys.exit(measure(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)  # the program below has said what is kept
