"""Journals as a coordinator leaves them, without a coordinator."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from distbelief.coordinator import journal


def write(run_dir: Path, *records: dict[str, Any]) -> None:
    with (run_dir / "journal.jsonl").open("ab") as file:
        file.writelines(map(journal._encode, records))
