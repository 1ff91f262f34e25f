"""The speed of one run, one worker of which is made slow while it trains. Knows nothing of ratios and goals."""

from __future__ import annotations

import contextlib
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path

import psutil

from bench.machine import Bystanders
from bench.recovery.watch import LAUNCH_LIMIT_S, EndedEarly, OurFiles, started, wait_for
from bench.running import Command, DriverFailed

FACTOR = 3
FIRST_STEPS = 5
SLOWED_RANK = 1
PERIOD_S = 0.015
STILL_LIMIT_S = 90.0

Slower = Callable[[int], AbstractContextManager[None]]
"""Makes the process with this number slow, as long as the block lasts."""


@dataclass(frozen=True)
class Size:
    repetitions: int
    window_s: float
    """How long the speed is measured."""
    adapt_s: float
    """The least time from the slowing to the measurement where balancing is on."""
    still_s: float
    """No assignment may have changed for so long."""


@dataclass(frozen=True)
class Speed:
    samples_per_s: float
    shards: list[int]
    """Of each worker, by rank, while it was measured."""
    shard_ms: list[float | None]
    """By rank, what each worker itself measured for a shard: whether the slow one was slow is seen, not assumed."""
    changes: int
    """New assignments since the slowing."""
    first_change_s: float | None
    others: float
    """The share of the machine's processor time that others had."""


@contextlib.contextmanager
def limited(pid: int) -> Iterator[None]:
    """Let this process run for 1 / FACTOR of the time, in turns too short to be taken for a freeze."""
    process, done = psutil.Process(pid), threading.Event()

    def turns() -> None:
        with contextlib.suppress(psutil.NoSuchProcess):
            while not done.is_set():
                process.suspend()
                done.wait(PERIOD_S * (1 - 1 / FACTOR))
                process.resume()
                done.wait(PERIOD_S / FACTOR)

    thread = threading.Thread(target=turns, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        with contextlib.suppress(psutil.NoSuchProcess):
            process.resume()


def speed(command: Command, batch: int, slower: Slower | None, size: Size) -> Speed:
    """Samples per second of one run, one worker of which is made slow."""
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as slowing:
        run_dir = Path(folder) / "run"
        files, bystanders = OurFiles(run_dir), Bystanders()
        with started([*command, "--run-dir", str(run_dir)], {}) as process:

            def trains() -> bool | None:
                files.poll()
                return len(files.commits) >= FIRST_STEPS or None

            wait_for(process, trains, LAUNCH_LIMIT_S, "the first steps")
            before = max(files.members)
            pids = files.members[before]
            victim = pids[min(SLOWED_RANK, len(pids) - 1)]
            if slower is not None:
                slowing.enter_context(slower(victim))
            slowed_at = time.time()
            adapt_s = size.adapt_s if "--balance" in command else 0.0

            def still() -> bool | None:
                files.poll()
                last_change = max(slowed_at, files.decided_at[max(files.members)])
                now = time.time()
                return (now > slowed_at + adapt_s and now > last_change + size.still_s) or None

            wait_for(process, still, STILL_LIMIT_S, "an assignment that does not change")
            generation, first = max(files.members), len(files.commits)
            busy = files.busy(generation)
            time.sleep(size.window_s)
            files.poll()
            if max(files.members) != generation or victim not in files.members[generation]:
                raise EndedEarly("the members or their shards changed while the speed was measured")
            slowing.close()  # before the end: a stopped process would not hear of it
        window = [commit.at for commit in files.commits[first:]]
    if len(window) < 3:
        raise DriverFailed(f"{' '.join(command)}: {len(window)} steps in {size.window_s:g} s are too few for a speed")
    changes = [at for number, at in files.decided_at.items() if number > before]
    return Speed(
        samples_per_s=batch * (len(window) - 1) / (window[-1] - window[0]),
        shards=files.shards[generation],
        shard_ms=[_per_shard_ms(*pair) for pair in zip(busy, files.busy(generation), strict=True)],
        changes=len(changes),
        first_change_s=min(changes) - slowed_at if changes else None,
        others=bystanders.share(),
    )


def _per_shard_ms(before: tuple[float, int], after: tuple[float, int]) -> float | None:
    shards = after[1] - before[1]
    return (after[0] - before[0]) / shards * 1000 if shards else None
