"""Whether a run that is over, or that should be, has kept its promises."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from tests.sim.invariants import Broken

if TYPE_CHECKING:
    from tests.sim.cluster import Cluster

PATIENCE_S = 400.0
"""So long after the last fault a run must be over."""
_HEARD_S = 5.0  # within this, an engine has told of every exit several times
_NEAR_THE_END_S = 12.0


def judge(cluster: Cluster) -> None:
    state = cluster.coordinator.state
    if not cluster.status:
        raise Broken(f"the run has not ended {PATIENCE_S:.0f} s after the last fault: {_where(cluster)}")
    if cluster.status != "completed":
        raise Broken(f"the run {cluster.status}: {cluster.coordinator.failure().get('message', '')}")
    _judge_metrics(cluster)
    _judge_checkpoints(cluster)
    _judge_hires(cluster)
    knows = {one.worker: cluster.workers[one.worker] for one in state.members}
    alive = {number: worker.control.generation for number, worker in knows.items() if worker.alive}
    cluster.invariants.completed(state.generation, alive)


def _judge_metrics(cluster: Cluster) -> None:
    steps = cluster.setting.steps
    lines = [line for line in cluster.coordinator.metrics if line["kind"] == "step"]
    told = Counter(line["step"] for line in lines)
    wrong = [one["step"] for one in lines if one["fingerprint"] != cluster.reference.fingerprints[one["step"]]]
    if wrong:
        raise Broken(f"the metrics file has other fingerprints of the steps {wrong} than it must have")
    twice = [step for step, count in told.items() if count > 1]
    if twice:
        raise Broken(f"the metrics file has the steps {twice} more than once")
    missing = [step for step in range(steps) if step not in told]
    # Where messages are lost lines may be missing; and the last ones, when a coordinator dies near the end.
    near = cluster.clock.now - cluster.coordinator_died_at < _NEAR_THE_END_S and missing[-1:] == [steps - 1]
    if missing and not (cluster.network.lost or cluster.network.was_harsh or near):
        raise Broken(f"the metrics file lacks the steps {missing}")


def _judge_checkpoints(cluster: Cluster) -> None:
    """They are on record in the order of their steps, within each life of the run; and the last step is among them."""
    newest = 0
    for entry in cluster.coordinator.records():
        if entry["kind"] == "checkpoint" and entry["step"] <= newest:
            raise Broken(f"a checkpoint of step {entry['step']} is on record after one of step {newest}")
        if entry["kind"] in ("checkpoint", "loaded", "resumed"):
            newest = entry.get("step", 0)
    if cluster.storage and newest != cluster.setting.steps and not cluster.coordinator.state.saves.final_lost:
        raise Broken(f"the run is complete, and its newest checkpoint is of step {newest}")


def _judge_hires(cluster: Cluster) -> None:
    state, coordinator, now = cluster.coordinator.state, cluster.coordinator, cluster.clock.now
    if state.troubles.failed_hires >= 3 and cluster.early_deaths < 3:
        raise Broken(f"hiring was given up after {cluster.early_deaths} deaths of newcomers")
    if now - coordinator.started_at > _HEARD_S:
        ghosts = [w for w in state.hired if cluster.exit_times.get(w, now) < now - _HEARD_S]
        if ghosts:
            raise Broken(f"the coordinator waits for the workers {ghosts} to come, which are dead")


def _where(cluster: Cluster) -> str:
    state = cluster.coordinator.state
    members = []
    for one in state.members:
        worker = cluster.workers.get(one.worker)
        if worker is None:
            members.append(f"{one.worker} (of an earlier life)")
            continue
        words = [name for name in ("alive", "frozen", "waiting") if getattr(worker, name)]
        wait = f", for {worker.blocked.key}" if worker.blocked else ""
        members.append(f"{one.worker} ({' '.join(words)}{wait}): {worker.control}, step {worker.step}")
    return (
        f"phase {state.phase}, generation {state.generation}, paused {state.paused}, finished {state.finished}, "
        f"hired {dict(state.hired)}, target {state.target}, members {members[:10]}"
    )
