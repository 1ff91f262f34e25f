"""The figures of bench.checkpoint as tables for a terminal. It computes nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console

from bench import tables as report


def show(console: Console, systems: Mapping[str, Mapping[str, Any]]) -> None:
    """`systems`: as in the JSON."""
    stalls, rest = {}, {}
    for name, found in systems.items():
        stalls[name] = [*_ms(found["stall_s"]), *_ms(found["seen_s"])]
        if "without_sync_s" in found:
            stalls[f"{name}, not synced"] = [*_ms(found["without_sync_s"]), "", "", ""]
        rest[name] = [
            _ms(found["step_s"])[0],
            *_ms(found["extra_s"]),
            f"{found['write_s']['median']:.2f}",
            f"{found['size_bytes'] / 1e6:,.0f}",
            f"{found['resume_s']['median']:.2f}",
            f"{max(one['others'] for one in found['repetitions']):.0%}",
        ]
    columns = ["stall", "lowest", "highest", "seen", "lowest", "highest"]
    report.show_figures(console, "Training is blocked per save, ms", columns, stalls)
    columns = ["a step, ms", "in all, ms", "lowest", "highest", "written, s", "MB", "to resume, s", "others' CPU"]
    report.show_figures(console, "What else a save costs", columns, rest)


def _ms(found: Mapping[str, float]) -> list[str]:
    values = [found[name] * 1000 for name in ("median", "low", "high")]
    digits = 0 if values[0] >= 100 else 1
    return [f"{value:,.{digits}f}" for value in values]
