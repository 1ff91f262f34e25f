"""Journals of earlier releases: each is resumed to the state that the release which wrote it saw, or refused in one
sentence.

`journals/before-rooms-allreduce.jsonl` and `-ps.jsonl` are journals of two real runs that were stopped by SIGINT (most
records of checkpoints left out), written before modules were arranged by feature. `before-rooms-decisions.jsonl` has
one run per line: its configuration, its records, and the state to which the code that wrote the records replayed them.
Its runs have every kind of record that the unit tests of that time produced.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from distbelief.coordinator.journal import Journal
from distbelief.coordinator.rules import state as s
from distbelief.coordinator.rules.replay import resumed
from distbelief.errors import DistBeliefError

JOURNALS = Path(__file__).parents[1] / "journals"
DECISIONS = [json.loads(line) for line in (JOURNALS / "before-rooms-decisions.jsonl").read_text().splitlines()]


def summary(state: s.State) -> dict[str, Any]:
    """What a journal says of a run, as plain values. The recorded states were made by this function."""
    fleet = state.fleet
    known = fleet.placement.map if fleet.placement else None
    return {
        "phase": state.phase,
        "generation": state.generation,
        "target": state.target,
        "next_worker": state.next_worker,
        "hired": sorted(state.hired),
        "placed": {str(worker): host for worker, host in sorted(state.placed.items())},
        "guests": sorted(state.arriving),
        "workers": {
            str(w.number): [w.host, w.pid, w.gpu, w.ready, w.refused, w.leaving, w.left, w.estranged, w.exited]
            for w in state.workers.values()
        },
        "seats": {str(worker): rank for worker, rank in state.seats.items()},
        "lost": list(state.lost),
        "offers": {nonce: [one.host, one.grows, one.added] for nonce, one in state.offers.items()},
        "counts": [state.recoveries, state.rolled_back, state.reexecuted, state.taken_over, state.progress.redone],
        "saves": [state.saves.sealed, state.saves.loaded_by],
        "reference": state.reference.worker if state.reference else None,
        "plan": list(state.plan),
        "status": state.outcome.status if state.outcome else "",
        "fleet": {
            "numbers": [fleet.target, fleet.next_server, fleet.version, fleet.life, fleet.sealed, fleet.kills],
            "hired": sorted(fleet.hired),
            "placed": {str(server): host for server, host in sorted(fleet.placed.items())},
            "there": {
                str(one.number): [one.host, one.address, one.fenced, one.leaving] for one in fleet.there.values()
            },
            "gone": sorted(fleet.gone),
            "slices": list(fleet.slices),
            "map": [list(known.primaries), list(known.backups)] if known else None,
            "lost_at": {str(server): at for server, at in fleet.lost_at.items()},
            "pauses": list(fleet.pauses),
            "paces": {str(worker): list(pace) for worker, pace in fleet.paces.items()},
        },
    }


@pytest.mark.parametrize("run", DECISIONS)
def test_records_of_an_earlier_release_give_the_state_that_it_saw(run: dict[str, Any]) -> None:
    config = s.RunConfig(**run["config"])
    assert summary(s.resume(config, 1, 0.0, run["records"])) == run["state"]


def test_the_records_of_earlier_releases_have_all_kinds() -> None:
    kinds = {entry["kind"] for run in DECISIONS for entry in run["records"]}
    assert len(kinds) == 27
    assert {"reference", "generation", "hired", "host", "grown", "lost", "servers", "rolled_back", "ended"} <= kinds


@pytest.mark.parametrize(("name", "servers", "step"), [("allreduce", 0, 1597), ("ps", 2, 411)])
def test_a_run_of_an_earlier_release_is_resumed(name: str, servers: int, step: int, tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    shutil.copy(JOURNALS / f"before-rooms-{name}.jsonl", path)
    strategy = "ps:sync:servers=2" if servers else "allreduce"
    config = s.RunConfig(workers=2, servers=servers, strategy=strategy)
    with Journal.open(path) as journal:
        assert journal.epoch == 2
        stopped = s.resume(config, journal.epoch, 1.0, journal.replayed)
        assert (stopped.phase, stopped.saves.sealed, stopped.generation) == ("ended", step, 1)
        again = s.resume(config, 2, 1.0, [*journal.replayed, resumed(stopped, strategy, 1.0)])
    assert (again.phase, again.generation, sorted(again.hired)) == ("gathering", 1, [2, 3])
    assert sorted(again.fleet.hired) == ([2, 3] if servers else [])
    assert again.reference is not None
    assert again.reference.job.name == "digits"


@pytest.mark.parametrize(
    "damage",
    [
        {"kind": "generation", "generation": 1},
        {"kind": "reference", "worker": 0, "job": {"name": "digits"}, "canary": {}},
        {"kind": "scaled", "leaving": 3, "target": 2},
    ],
)
def test_a_record_of_another_version_is_refused_in_one_sentence(damage: dict[str, Any]) -> None:
    with pytest.raises(DistBeliefError) as info:
        s.resume(s.RunConfig(workers=2), 1, 0.0, [{"kind": "epoch"}, damage])
    assert info.value.message.startswith(
        f"the journal's record 2, of kind '{damage['kind']}', was written by another version: "
    )
    assert "job.json" in info.value.hint


def test_unknown_kinds_of_later_versions_are_ignored() -> None:
    config = s.RunConfig(workers=2)
    assert s.resume(config, 1, 0.0, [{"kind": "invented"}]) == s.resume(config, 1, 0.0, [])
