"""How long a run stands still for each parameter server that it loses: from the loss to the next step. Pure.

A death is heard of from the engine, within milliseconds. One that froze is lost from its last sign of life on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from distbelief.control.messages import StepReport
from distbelief.coordinator.rules.ending import Result, record
from distbelief.coordinator.rules.servers.fleetstate import Fleet, ServerProcess
from distbelief.coordinator.rules.vocabulary import Output, State


def lost(fleet: Fleet, server: ServerProcess, now: float) -> Fleet:
    at = server.heard_at if server.fenced else now
    return replace(fleet, lost_at={**fleet.lost_at, server.number: at})


def applied(state: State, reports: Sequence[StepReport], now: float) -> Result:
    """Steps were applied, or updates: whatever was lost before one of them is over."""
    outputs: list[Output] = []
    for server, at in state.fleet.lost_at.items():
        later = [report.at for report in reports if report.at > at]
        if later:
            pause_s = min(later) - at
            left = {number: when for number, when in state.fleet.lost_at.items() if number != server}
            fleet = replace(state.fleet, lost_at=left, pauses=(*state.fleet.pauses, pause_s))
            state = replace(state, fleet=fleet)
            reason = f"the first step after the loss of server {server} came {pause_s:.2f} s after it"
            outputs.append(record(state, now, "server_pause", reason, server=server, pause_s=pause_s))
    return state, outputs
