"""`python -m tests.fuzz --frames 1000000`: a real run of parameter servers under siege, beside its twin that
is left alone. The exit status is 0 if they have the same weights, and nothing has grown or died."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.fuzz.kvsiege import besiege
from tests.fuzz.siege import JOB, Siege

GROWTH_MB = 24.0
"""What a process may grow by between two measures: allocators and logs, not frames."""
ROUNDS = 10


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=100_000)
    parser.add_argument("--strategy", default="ps:sync:tcp")
    parser.add_argument("--listen", default="127.0.0.1", help="beyond loopback, servers encrypt too")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kv", action="store_true", help="a key-value service instead of a run")
    chosen = parser.parse_args()
    if chosen.kv:
        return report_kv(chosen)
    with tempfile.TemporaryDirectory() as folder:
        return report(chosen, Path(folder))


def report(chosen: argparse.Namespace, folder: Path) -> int:
    expected = undisturbed(folder / "twin", chosen.steps)
    (folder / "siege").mkdir()
    siege = Siege(folder / "siege", chosen.strategy, chosen.listen, chosen.steps, chosen.seed)
    try:
        started, total = time.monotonic(), 0
        siege.attack(chosen.frames // ROUNDS)  # whatever is only made once is there after this
        before = siege.measure()
        while total < chosen.frames:
            siege.attack(chosen.frames // ROUNDS)
            total = sum(siege.sent.values())
            print(f"{total:,} frames in {time.monotonic() - started:.0f} s, step {siege.steps()}", flush=True)
        after = siege.measure()
        doors, result = len(siege.doors()), siege.result()
        refused = siege.refused()
    finally:
        siege.close()
    grown = {name: after.rss_mb.get(name, 0) - mb for name, mb in before.rss_mb.items()}
    gone = sorted(before.rss_mb.keys() - after.rss_mb.keys())
    same = result["weights_sha256"] == expected
    print(json.dumps({
        "doors": doors, "sent": siege.sent, "refused by the coordinator": refused, "rss_mb before": before.rss_mb,
        "rss_mb after": after.rss_mb, "connections": [before.connections, after.connections], "gone": gone,
        "same weights": same, "recoveries": result["recoveries"], "steps": result["steps"],
    }, indent=1))  # fmt: skip
    sound = same and not gone and result["recoveries"] == 0 and max(grown.values()) < GROWTH_MB
    print("unharmed" if sound else "HARMED")
    return 0 if sound else 1


def report_kv(chosen: argparse.Namespace) -> int:
    besiege(chosen.frames // ROUNDS, chosen.seed)  # what is only made once, in this process
    sent, grown = besiege(chosen.frames, chosen.seed)
    print(json.dumps({"sent": sent, "grown by MB": grown}, indent=1))
    print("unharmed" if max(grown.values()) < GROWTH_MB else "HARMED")
    return 0 if max(grown.values()) < GROWTH_MB else 1


def undisturbed(folder: Path, steps: int) -> str:
    folder.mkdir()
    command = [sys.executable, "-m", "distbelief.cli.main", "train", str(JOB), "--workers", "1", "--json"]
    done = subprocess.run(
        [*command, "--set", f"steps={steps}"], cwd=folder, capture_output=True, text=True, check=True, timeout=300
    )
    return str(json.loads(done.stdout.splitlines()[-1])["weights_sha256"])


if __name__ == "__main__":
    sys.exit(main())
