"""Options that several commands have, so that they mean and say the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

JobFile = Annotated[Path, typer.Argument(help="The job file: Python that defines `job`.", show_default=False)]
Strategy = Annotated[
    str,
    typer.Option(
        help="How to learn it: allreduce, ps:sync, ps:async or ps:ssp:staleness=S (parameter servers), sandblaster "
        "(L-BFGS), local_sgd:H, pipeline:K, tensor:K, sharded, or degrees such as dp2.tp2.pp2 and dp2.fsdp2; options "
        "follow after colons, as in allreduce:gloo, ps:sync:servers=3:backups=1, ps:async:adaptive:dc=0.04, "
        "pipeline:4:zbv; with a compression for slow links as in allreduce:int8, ps:async:int8, local_sgd:8:topk=0.01 "
        "or dp2.pp2:bf16."
    ),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Set a hyper-parameter of the job. May be repeated."),
]
Threads = Annotated[int, typer.Option(min=1, help="Threads of each worker; part of the exact result.")]
MinWorkers = Annotated[
    int, typer.Option(min=1, metavar="N", help="With fewer workers alive, wait for more instead of going on.")
]
Listen = Annotated[
    str,
    typer.Option(
        metavar="HOST[:PORT]",
        help="Where other hosts can join: an address or name of this machine, a network card, 0.0.0.0.",
    ),
]
SaveEvery = Annotated[
    str, typer.Option(metavar="500|10m|end|never", help="Steps or time between two checkpoints; the last state too.")
]
Checkpoints = Annotated[
    str, typer.Option(metavar="URL", help="Where checkpoints go: a folder, s3://… Default: RUN/checkpoints.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as one JSON object on stdout.")]
Plain = Annotated[bool, typer.Option("--plain", help="Plain lines even on a terminal.")]
