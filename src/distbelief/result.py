"""The result of a run, for its caller."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Result:
    """The result of a run. `weights_sha256` is the same for any number of workers (in exact strategies)."""

    run_dir: str
    steps: int
    loss: float
    metrics: dict[str, float]
    weights_sha256: str
    samples_per_s: float
    wall_s: float
    workers: int
    recoveries: int
    reexecuted: int = 0
    """Steps that were executed again, because no living process had the state after them."""
    servers: int = 0
    """Parameter servers, in strategies that have them."""
    servers_lost: int = 0
    """Parameter servers that died and were replaced."""
    server_pauses_s: tuple[float, ...] = ()
    """For each lost server, the seconds from its loss to the next step or update."""
    staleness: dict[str, int] = field(default_factory=dict)
    """In asynchronous strategies: staleness -> number of updates."""
    helped: int = 0
    """Shards that other workers computed for late workers, counted by the workers present at the end."""
    pace: dict[str, dict[str, int]] = field(default_factory=dict)
    """In strategies that adapt their pace: n_push and n_fetch of each worker at the end."""
    wire_ratio: float | None = None
    """Bytes of gradients sent, divided by their uncompressed size; None: not compressed."""
    refused: dict[str, int] = field(default_factory=dict)
    """Messages that the coordinator refused, by reason: unauthenticated, replayed, or in another member's name."""

    profile: dict[str, Any] | None = None
    """Summary of the profile, if one was taken; `trace` is the trace file."""

    def state_dict(self) -> dict[str, Any]:
        """The trained weights, for `model.load_state_dict`."""
        from safetensors.torch import load_file

        return load_file(Path(self.run_dir) / "weights.safetensors")


def result_of(record: dict[str, Any], run_dir: Path, started: float) -> Result:
    """The result from the journal's last record."""
    result = record["result"]
    return Result(
        run_dir=str(run_dir),
        steps=result["steps"],
        loss=result["loss"],
        metrics=result["metrics"],
        weights_sha256=result["weights_sha256"],
        samples_per_s=result["samples_per_s"],
        wall_s=time.monotonic() - started,
        workers=result["workers"],
        recoveries=result["recoveries"],
        reexecuted=result.get("reexecuted", 0),  # runs of earlier versions do not have it
        servers=result.get("servers", 0),
        servers_lost=result.get("servers_lost", 0),
        server_pauses_s=tuple(result.get("server_pauses_s", ())),
        staleness=result.get("staleness", {}),
        helped=result.get("helped", 0),
        pace=result.get("pace", {}),
        wire_ratio=result.get("wire_ratio"),
        refused=record.get("refused", {}),
    )
