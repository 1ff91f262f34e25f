"""The ways of dividing a model that are compared: what DistBelief is asked for, and what it is held against."""

from __future__ import annotations

from dataclasses import dataclass

MEMBERS = 2


@dataclass(frozen=True)
class System:
    strategy: str
    peer: str
    """In words."""
    stages: int = 1


SYSTEMS = {
    "gpipe": System(f"pipeline:{MEMBERS}:gpipe", "torch.distributed.pipelining.ScheduleGPipe", MEMBERS),
    "1f1b": System(f"pipeline:{MEMBERS}:1f1b", "torch.distributed.pipelining.Schedule1F1B", MEMBERS),
    "interleaved": System(
        f"pipeline:{MEMBERS}:interleaved", "torch.distributed.pipelining.ScheduleInterleaved1F1B", 2 * MEMBERS
    ),
    "zbv": System(f"pipeline:{MEMBERS}:zbv", "torch.distributed.pipelining.ScheduleZBVZeroBubble", 2 * MEMBERS),
    "sharded": System("sharded", "FSDP2, fully_shard around every block and the model"),
    "tensor": System(f"tensor:{MEMBERS}", "DTensor, parallelize_module with the same plan"),
}
