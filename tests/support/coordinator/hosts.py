"""A run over several hosts, as its coordinator sees it."""

from __future__ import annotations

from distbelief.control import messages as m
from distbelief.coordinator.rules import state as s
from tests.support.coordinator.play import Run, sends


def offer(host: str, nonce: str, room: int = 1, grows: bool = False) -> m.HostOffered:
    return m.HostOffered(host, nonce, room, grows)


def placed(outputs: list[s.Output]) -> dict[int, str]:
    return {c.worker: c.host for _, c in sends(outputs) if isinstance(c, m.StartWorker)}


def spread(workers: int = 3, rooms: dict[str, int] | None = None, **config: object) -> Run:
    """A run whose launching process has no member; hosts a and b have come and were asked for its workers."""
    rooms = rooms or {"a": 2, "b": 1}
    run = Run(workers=workers, transport="gloo", local_workers=0, takes_hosts=True, **config)
    run.feed(m.EngineAttached("here", room=0, server_room=0))
    for host, room in rooms.items():
        run.feed(offer(host, f"nonce {host}", room))
        run.feed(m.EngineAttached(host, room=room))
    return run


def trained(run: Run) -> Run:
    """All three workers have come, from the hosts that they were asked of."""
    for worker, host in run.state.placed.items():
        run.join(worker, host=host)
    run.ready(*range(3))
    assert run.state.phase == "training"
    return run
