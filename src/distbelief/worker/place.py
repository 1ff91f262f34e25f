"""Where a worker lives: what it was told, and what it can reach from there."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from distbelief.strategies.ps.protocol.client import ServerClient
from distbelief.transport.shm.segment import Memory, Segment, SegmentClient
from distbelief.worker.link import ControlLink
from distbelief.worker.saving import Saver
from distbelief.worker.spec import WorkerSpec

if TYPE_CHECKING:
    from distbelief.worker.profiling.profiler import Profiler  # loaded for those who want a profile


@dataclass(frozen=True)
class Place:
    """Where a worker lives: what it was told, its line to the coordinator, and the memory that it can reach."""

    spec: WorkerSpec
    link: ControlLink
    segments: SegmentClient | None
    """None on another host than the engine's."""
    saver: Saver | None = None
    own_memory: dict[str, Segment] = field(default_factory=dict)
    """What it keeps for itself from one generation to the next."""
    device_memory: dict[str, Memory] = field(default_factory=dict)
    """The same, on its accelerator."""
    client: ServerClient | None = None
    """Of the parameter servers, where there are any."""
    profile: Profiler | None = None
