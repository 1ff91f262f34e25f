"""A batch script for Slurm. It trains, saves before its time is up, goes back into the queue, and resumes. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from distbelief.errors import DistBeliefError

NOTICE_S = 120
"""How long before the end of its time Slurm signals the script: long enough to save a checkpoint."""
_TIME = re.compile(r"\d+|\d+:\d\d|\d+:\d\d:\d\d|\d+-\d+(:\d\d){0,2}")
_NAME = re.compile(r"[\w.,+-]+")

_SCRIPT = """\
#!/bin/bash
{directives}
#
# Written by `distbelief slurm`. Options of sbatch win over those above: sbatch --account=ours run.sbatch
#
# {notice_s} seconds before the time is up Slurm sends USR1 to this script. The run is then told to stop, which saves a
# checkpoint, and the job goes back into the queue. When it starts again, also after a preemption or a lost node, it
# goes on from the newest checkpoint.

set -u
run={run_dir}
if grep -qs '"kind":"generation"' "$run/journal.jsonl"; then # it has trained
    command=({program} resume "$run" --on slurm --workers {workers} --plain)
else
    command=({program} train {arguments})
fi

again=
trap 'again=yes; scancel --signal=TERM "$SLURM_JOB_ID.0"' USR1

srun --no-kill --kill-on-bad-exit=0 "${{command[@]}}" &
step=$!
wait "$step"
status=$?
if [ -n "$again" ]; then # the signal has ended the first wait, but not the step
    wait "$step"
    status=$?
fi
if [ -n "$again" ] && [ "$status" -eq 143 ]; then # it was stopped, and is neither complete nor broken
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
"""


@dataclass(frozen=True)
class Batch:
    """The resources that the script asks Slurm for."""

    name: str
    nodes: int
    workers_per_node: int = 1
    threads: int = 1
    gpus: bool = False
    """Whether each worker has a GPU."""
    time: str = ""
    partition: str = ""

    def __post_init__(self) -> None:
        if self.time and not _TIME.fullmatch(self.time):
            raise DistBeliefError(
                f"--time {self.time!r} is no time of Slurm's",
                hint="minutes, or hours:minutes:seconds as in 12:00:00, or days-hours as in 2-0",
            )
        if self.partition and not _NAME.fullmatch(self.partition):
            raise DistBeliefError(f"--partition {self.partition!r} is no name of a partition", hint="see `sinfo`")

    @property
    def workers(self) -> int:
        return self.nodes * self.workers_per_node

    def directives(self) -> list[str]:
        asked = {
            "job-name": re.sub(r"[^\w.-]", "-", self.name),
            "nodes": self.nodes,
            "ntasks-per-node": 1,  # the agent of the node; it starts the workers
            "cpus-per-task": self.workers_per_node * self.threads,
            "gpus-per-node": self.workers_per_node if self.gpus else "",
            "time": self.time,
            "partition": self.partition,
            "signal": f"B:USR1@{NOTICE_S}",
            "open-mode": "append",
        }
        with_values = [f"#SBATCH --{name}={value}" for name, value in asked.items() if value]
        return [*with_values, "#SBATCH --requeue", "#SBATCH --no-kill"]


def script(batch: Batch, program: Sequence[str], job_file: str, run_dir: str, options: Sequence[str]) -> str:
    """`program`: how `distbelief` is called there. `run_dir`: empty: each job has its own. `options`: `train`'s."""
    folder = shlex.quote(run_dir) if run_dir else f'runs/{shlex.quote(batch.name)}-slurm-"$SLURM_JOB_ID"'
    arguments = shlex.join([job_file, "--on", "slurm", "--workers", str(batch.workers), "--plain", *options])
    return _SCRIPT.format(
        directives="\n".join(batch.directives()),
        workers=batch.workers,
        notice_s=NOTICE_S,
        run_dir=folder,
        program=shlex.join(program),
        arguments=f'{arguments} --run-dir "$run"',
    )
