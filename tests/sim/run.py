"""`make sim SEEDS=…`: simulate many seeds, or one again."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from tests.sim.cluster import Outcome, run
from tests.sim.scale import table
from tests.sim.seeds import parse_seeds


def main() -> int:
    parser = argparse.ArgumentParser(prog="make sim", description=__doc__)
    parser.add_argument("--seeds", default="1-200", help="one (1234), several (1,5,9) or a range (1-10000)")
    parser.add_argument("--members", type=int, default=None, help="workers at the start; left out: a few, by the seed")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--keep-going", action="store_true", help="do not stop at the first broken promise")
    parser.add_argument("--scale", action="store_true", help="measure the coordinator's time per event instead")
    arguments = parser.parse_args()
    if arguments.scale:
        table()
        return 0
    started = time.perf_counter()
    outcomes = simulate(parse_seeds(arguments.seeds), arguments.members, arguments.jobs)
    done, broken = 0, 0
    kinds, events, virtual_s = Counter[str](), 0, 0.0
    for outcome in outcomes:
        done += 1
        kinds += outcome.faults
        events += outcome.events
        virtual_s += outcome.virtual_s
        if outcome.broken:
            broken += 1
            print(report(outcome, arguments.members), flush=True)
            if not arguments.keep_going:
                break
    took_s = time.perf_counter() - started
    print(f"{done} seeds, {broken} with a broken promise, in {took_s:.1f} s")
    print(f"{events} events in {virtual_s:.0f} virtual seconds")
    print("faults: " + ", ".join(f"{count} × {kind}" for kind, count in kinds.most_common()))
    return 1 if broken else 0


def simulate(seeds: list[int], members: int | None, jobs: int) -> Iterator[Outcome]:
    if jobs == 1:
        yield from map(partial(run, members=members), seeds)
        return
    with ProcessPoolExecutor(jobs) as pool:
        yield from pool.map(partial(run, members=members), seeds, chunksize=max(1, min(20, len(seeds) // (4 * jobs))))


def report(outcome: Outcome, members: int | None) -> str:
    """What broke, the last events before it, and how to see it again."""
    lines = [f"seed {outcome.seed}: {outcome.broken}", "the last events:", *(f"  {line}" for line in outcome.story)]
    again = f"make sim SEEDS={outcome.seed}" + (f" MEMBERS={members}" if members is not None else "")
    return "\n".join([*lines, f"see it again with: {again}"])


if __name__ == "__main__":
    sys.exit(main())
