"""What somebody asks for with `--on`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Asked:
    """What the user wants, as far as it matters for where the run is."""

    on: str
    name: str
    """Of the job."""
    workers: int | None = None
    run_dir: Path | None = None
    listen: str = ""
    """Where the coordinator is to listen; empty: it is found out."""
    key_file: str = ""
