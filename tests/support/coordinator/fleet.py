"""A run with parameter servers, as its coordinator sees it: what servers report, and what they are told."""

from __future__ import annotations

from distbelief.control import messages as m
from distbelief.coordinator.rules import state as s
from tests.support.coordinator.play import Run

SLICES = [100, 80, 60]


FACTS = {"threads": "1"}


def ready(server: int, slices: list[int] = SLICES, facts: dict[str, str] = FACTS) -> m.ServerReady:
    return m.ServerReady(server, "here", 200 + server, f"tcp://here:{server}", slices, facts)


def served(servers: int = 2, workers: int = 2) -> Run:
    """They train."""
    run = Run(workers=workers, servers=servers)
    run.feed(*(ready(server) for server in range(servers)))
    return run.started(*range(workers))


def died(*servers: int) -> list[m.ServerExited]:
    return [m.ServerExited(server, -9) for server in servers]


def hired(outputs: list[s.Output]) -> list[int]:
    return [o.command.server for o in outputs if isinstance(o, s.Send) and isinstance(o.command, m.StartServer)]


def killed(outputs: list[s.Output]) -> list[int]:
    return [o.command.server for o in outputs if isinstance(o, s.Send) and isinstance(o.command, m.KillServer)]


def maps(outputs: list[s.Output]) -> list[m.ServerMap]:
    """What servers were told; the members must have been told the same, and both after it was written down."""
    kinds = [
        ("record", o.entry["placement"]["map"]["version"])
        if isinstance(o, s.Record) and o.entry["kind"] == "servers"
        else ("servers", o.command.map.version)
        if isinstance(o, s.SendServer) and isinstance(o.command, m.Serve)
        else ("workers", o.command.map.version)
        if isinstance(o, s.Send) and isinstance(o.command, m.Serve)
        else None
        for o in outputs
    ]
    told = [one for one in kinds if one]
    for at in range(0, len(told), 3):
        assert [kind for kind, _ in told[at : at + 3]] == ["record", "servers", "workers"]
        assert len({version for _, version in told[at : at + 3]}) == 1
    return [o.command.map for o in outputs if isinstance(o, s.SendServer) and isinstance(o.command, m.Serve)]


def settled(run: Run) -> m.ServerMap:
    """All copies that were wanted are made, and those that follow from them."""
    for _ in range(10):
        known = run.state.fleet.map()
        assert known is not None
        for number, recruit in enumerate(known.recruits):
            if recruit >= 0:
                run.feed(m.SliceCopied(known.primaries[number], number, recruit, known.version))
    assert set(known.recruits) == {-1}
    return known
