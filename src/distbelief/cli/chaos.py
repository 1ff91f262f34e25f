"""`distbelief chaos JOB`: run a job under faults and beside its fault-free twin, and say whether it made a difference.

Users run it on their own job before they trust it. The checks here start no process.
"""

from __future__ import annotations

import contextlib
import json as json_text
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer

from distbelief.chaos.falseclock import require_library
from distbelief.chaos.rules.schedule import Fault, check, parse
from distbelief.cli.failures import MACHINE_OUTPUT, UsageError
from distbelief.cli.options import JobFile, Settings
from distbelief.cli.train import check_job_file, parse_settings

if TYPE_CHECKING:
    from distbelief.chaos.rules.verdict import Evidence, Promise, Verdict
    from distbelief.chaos.trial import FaultyRun, Plan

WORKERS = 4


def chaos(
    ctx: typer.Context,
    job: JobFile,
    faults: Annotated[
        str,
        typer.Option(metavar="SENTENCES", help='As in "kill worker every 3s, join at step 80".', show_default=False),
    ] = "",
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Worker processes to begin with. Default: 4, or as many as the strategy needs.",
            show_default=False,
        ),
    ] = None,
    random: Annotated[
        int, typer.Option(metavar="N", min=0, help="Instead of --faults: N random schedules, one after another.")
    ] = 0,
    seed: Annotated[int, typer.Option(help="The seed of all random choices.")] = 0,
    strategy: Annotated[str, typer.Option(help="The strategy, as for `train`.")] = "allreduce",
    settings: Settings = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="The folder of both runs. Default: runs/chaos-NAME-ID.", show_default=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the verdict as one JSON object on stdout.")] = False,
) -> None:
    """Train a job under faults and beside its fault-free twin, and compare the two."""
    ctx.meta[MACHINE_OUTPUT] = json
    check_job_file(job)
    values = parse_settings(settings or [])
    from distbelief.strategies import parse as parse_strategy

    how = parse_strategy(strategy)
    workers = workers or how.usual_workers(WORKERS)
    schedule = wanted_faults(faults, random, workers, how.servers)

    from distbelief.chaos.fulldisk import check_own_disk
    from distbelief.chaos.report import as_json, print_table  # after the checks, which need none of it
    from distbelief.chaos.rules.verdict import together
    from distbelief.chaos.trial import Plan, run_twin

    plan = Plan(job, values, workers, strategy, run_dir or _new_run_dir(job))
    if any(fault.kind == "fill disk" for fault in schedule):
        check_own_disk(plan.run_dir)
    stream = sys.stderr if json else sys.stdout
    # With --json, only the object goes to stdout, even if the job prints.
    with contextlib.redirect_stdout(stream):
        _say(stream, "the fault-free twin:")
        twin = run_twin(plan, stream)
        tried = list(_trials(plan, twin, schedule, random, seed, stream))
        verdict = together([verdict for _, _, verdict in tried])
        missed = [fault for _, faulty, _ in tried for fault in faulty.missed]
        print_table(verdict, missed, stream)
    if json:
        runs = {"twin": twin.run_dir, "faults": [faulty.evidence.run_dir for _, faulty, _ in tried]}
        schedules = [_schedule(text, faulty, verdict) for text, faulty, verdict in tried]
        whole = {**as_json(verdict), "not_carried_out": missed, "runs": runs, "schedules": schedules}
        typer.echo(json_text.dumps(whole, allow_nan=False))
    if not verdict.sound:
        raise typer.Exit(1)


def wanted_faults(text: str, random: int, workers: int, servers: int = 0) -> tuple[Fault, ...]:
    """The checked faults of `--faults`; none for random schedules, which need the number of steps first."""
    if bool(text) == bool(random):
        raise UsageError(
            "give either --faults or --random" if text else "no faults were given",
            hint='as in --faults "kill worker every 3s, freeze worker 2 at step 40 for 5s", or --random 5',
        )
    if random:
        return ()
    found = parse(text)
    check(found, workers, servers)
    if any(fault.kind == "set clock" for fault in found):
        require_library()
    return found


def _trials(
    plan: Plan, twin: Evidence, schedule: tuple[Fault, ...], random: int, seed: int, stream: TextIO
) -> Iterator[tuple[str, FaultyRun, Verdict]]:
    """Each schedule with its run and verdict; a bad verdict is the last."""
    from distbelief.chaos.inject import random_schedule
    from distbelief.chaos.report import totals
    from distbelief.chaos.rules.schedule import write
    from distbelief.chaos.rules.verdict import judge
    from distbelief.chaos.trial import how_close, readers_of, run_under_faults
    from distbelief.strategies import parse as parse_strategy

    promise = _promise(plan.strategy)
    for number in range(random or 1):
        if random:
            servers = parse_strategy(plan.strategy).servers
            text = random_schedule(seed + number, plan.workers, twin.steps, servers, readers_of(twin))
            name = f"faults-{number + 1}"
            _say(stream, f"schedule {number + 1} of {random} (--random 1 --seed {seed + number}): {text}")
        else:
            text, name = write(schedule), "faults"
            _say(stream, f"under faults: {text}")
        faulty = run_under_faults(plan, name, parse(text), seed + number, stream)
        closeness = how_close(plan, twin, faulty.evidence, stream) if promise == "rounding" else None
        verdict = judge(twin, faulty.evidence, faulty.notes, promise, closeness)
        if random:
            _say(stream, "; ".join(f"{label} {value}" for label, value in totals(verdict)))
        yield text, faulty, verdict
        if not verdict.sound:
            return


def _promise(strategy: str) -> Promise:
    from distbelief.strategies import parse as parse_strategy

    if parse_strategy(strategy).exact:
        return "bits"
    return "rounding" if parse_strategy(strategy).wish else "nothing"


def _schedule(text: str, faulty: FaultyRun, verdict: Verdict) -> dict[str, Any]:
    return {
        "schedule": text,
        "run_dir": faulty.evidence.run_dir,
        "weights_equal": verdict.weights_equal,
        "steps_lost": verdict.steps_lost,
        "steps_differing": verdict.steps_differing,
        "exactly_once": verdict.exactly_once,
        "goodput": None if verdict.goodput is None else round(verdict.goodput, 4),
        "reexecuted": verdict.reexecuted,
        "carried_out": [{"fault": note.text, "worker": note.worker, "at": note.at} for note in faulty.notes],
    }


def _new_run_dir(job: Path) -> Path:
    return Path("runs") / f"chaos-{job.stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def _say(stream: TextIO, line: str) -> None:
    print(line, file=stream, flush=True)
