"""Compares a run with faults to the same run without faults. Pure: records in, verdict out.

All times are the wall clock of one machine: in the notes of faults, the journal and the metrics.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Record = dict[str, Any]

Promise = Literal["bits", "rounding", "nothing"]
"""The promise of a strategy about the weights of two runs of one job: the same bits, equality within rounding (a
strategy that divides the model adds in another order on other members), or nothing.
"""

ENDS_A_WORKER = ("kill worker", "freeze worker", "cut worker")
"""After these faults the coordinator may remove the worker: it is fenced, or counted as lost."""
PLANNED = {"leave worker": ("leave",), "join": ("join",), "scale": ("join", "leave")}
"""The causes of the generation that answers a request."""


@dataclass(frozen=True)
class Note:
    """A fault as it was injected."""

    kind: str
    text: str
    at: float
    worker: int | None = None
    server: int | None = None


@dataclass(frozen=True)
class Evidence:
    """The results of a completed run."""

    run_dir: str
    steps: int
    weights_sha256: str
    metrics: Sequence[Record] = ()
    journal: Sequence[Record] = ()


@dataclass(frozen=True)
class Closeness:
    """The distance between the weights of a run with faults and the run without, for strategies that promise equality
    within rounding."""

    equal: bool
    """Whether rounding can explain the difference."""
    relative: float
    """The worst tensor's largest difference, relative to its largest number."""
    noisy: bool = False
    """Rounding alone makes such a difference after this number of steps: the comparison says nothing."""


@dataclass(frozen=True)
class FaultOutcome:
    kind: str
    text: str
    at_step: int
    """Committed steps at the time of the fault."""
    noticed_ms: float | None
    """None: the fault needs no detection, or no reaction."""
    next_commit_ms: float | None
    shards_recomputed: int | None
    """None: no generation was needed as an answer."""


@dataclass(frozen=True)
class Verdict:
    weights_equal: bool
    steps_lost: int
    exactly_once: bool
    goodput: float | None
    """Samples per second of the committed steps, divided by the value of the run without faults; None for runs of one
    step."""
    promise: Promise = "bits"
    closeness: Closeness | None = None
    """None: bits were compared."""
    reexecuted: int = 0
    """Steps that were committed and executed again, because the only holder of a part of the model had died."""
    steps_differing: int = 0
    """Steps that are recorded once, with another result than in the run without faults."""
    faults: tuple[FaultOutcome, ...] = field(default_factory=tuple)

    @property
    def sound(self) -> bool:
        complete = self.steps_lost == self.steps_differing == 0 and self.exactly_once
        return complete and (self.weights_equal or self.promise == "nothing")


def judge(
    twin: Evidence,
    faulty: Evidence,
    notes: Sequence[Note],
    promise: Promise = "bits",
    closeness: Closeness | None = None,
) -> Verdict:
    """Judge a run. `closeness` is required for strategies that promise equality within rounding: hashes cannot show
    that."""
    expected, found = _lasting(twin.metrics, promise), _lasting(faulty.metrics, promise)
    # Fingerprints are compared where the strategy promises the same bits; a twin that lacks a step proves nothing.
    fingerprints = {int(r["step"]): r.get("fingerprint") for r in expected} if promise == "bits" else {}
    times = Counter(int(record["step"]) for record in found)
    lost = {step for step in range(twin.steps) if times[step] != 1}
    differing = {
        int(r["step"]) for r in found if fingerprints.get(int(r["step"]), r.get("fingerprint")) != r.get("fingerprint")
    }
    once = set(times) == set(range(twin.steps)) and all(count == 1 for count in times.values())
    speeds = _samples_per_s(_steps(twin.metrics)), _samples_per_s(_steps(faulty.metrics))
    same_bits = bool(faulty.weights_sha256) and faulty.weights_sha256 == twin.weights_sha256
    return Verdict(
        weights_equal=same_bits if closeness is None else closeness.equal,
        steps_lost=len(lost),
        steps_differing=len(differing - lost),
        exactly_once=once and _samples(found) == _samples(expected),
        goodput=speeds[1] / speeds[0] if speeds[0] and speeds[1] else None,
        promise=promise,
        closeness=closeness,
        reexecuted=0 if promise == "bits" else _reexecuted(faulty.metrics),
        faults=tuple(_outcome(note, notes, faulty, promise) for note in notes),
    )


def together(verdicts: Sequence[Verdict]) -> Verdict:
    """Several runs with faults, against one run without, as one verdict: a promise holds if it held in every run."""
    goodputs = [verdict.goodput for verdict in verdicts if verdict.goodput is not None]
    distances = [verdict.closeness for verdict in verdicts if verdict.closeness is not None]
    return Verdict(
        weights_equal=all(verdict.weights_equal for verdict in verdicts),
        steps_lost=sum(verdict.steps_lost for verdict in verdicts),
        steps_differing=sum(verdict.steps_differing for verdict in verdicts),
        exactly_once=all(verdict.exactly_once for verdict in verdicts),
        goodput=statistics.median(goodputs) if goodputs else None,
        promise=verdicts[0].promise,
        closeness=max(distances, key=lambda one: (not one.equal, one.relative), default=None),
        reexecuted=sum(verdict.reexecuted for verdict in verdicts),
        faults=tuple(fault for verdict in verdicts for fault in verdict.faults),
    )


def _outcome(note: Note, notes: Sequence[Note], run: Evidence, promise: Promise) -> FaultOutcome:
    answers = _answers(note, notes, run.journal)
    answer = next((r for r in answers if r["kind"] == "generation"), None)
    steps = _steps(run.metrics)
    before = [r for r in run.metrics if float(r.get("at", math.inf)) < note.at]
    following = [r for r in steps if float(r["at"]) >= note.at]
    if answer is not None and note.kind not in ("join", "scale"):
        # Members do not wait for a new worker while it loads, so `join` and `scale` are excluded here. The generation
        # after the fault may complete and report a step that was in progress when the fault struck.
        following = [
            r for r in following if int(r["generation"]) >= int(answer["generation"]) and r["at"] >= answer["at"]
        ]
    commits_at = min((float(r["at"]) for r in following), default=None)
    return FaultOutcome(
        kind=note.kind,
        text=note.text,
        at_step=len(_lasting(before, promise)),
        noticed_ms=_ms(note.at, float(answers[0]["at"]) if answers else None),
        next_commit_ms=_ms(note.at, commits_at),
        shards_recomputed=None if answer is None else _recomputed(run.metrics, int(answer["generation"])),
    )


def _answers(note: Note, notes: Sequence[Note], journal: Sequence[Record]) -> list[Record]:
    """The records that answer a fault, in order. A later fault of the same worker has its own answers."""
    until = min(
        (n.at for n in notes if n.at > note.at and n.worker is not None and n.worker == note.worker), default=math.inf
    )
    after = [r for r in journal if note.at <= float(r.get("at", -math.inf))]
    if note.kind == "kill coordinator":
        before = max((int(r.get("epoch", 0)) for r in journal if float(r.get("at", math.inf)) < note.at), default=0)
        return [r for r in after if int(r.get("epoch", 0)) > before][:1]
    if note.kind == "kill server":
        return [r for r in after if r.get("kind") == "servers" and note.server in r["gone"]][:1]
    if note.kind == "drop terminal":
        ended = [r for r in after if r.get("kind") == "ended"][:1]
        return ended + [r for r in after if r.get("kind") == "generation" and ended and r["at"] >= ended[0]["at"]][:1]
    if note.kind in PLANNED:
        return [r for r in after if _heard(r, note)][:1] + [r for r in after if _granted(r, note)][:1]
    if note.kind not in ENDS_A_WORKER:
        return []
    given_up = [r for r in after if _gives_up(r, note.worker)]
    # The journal may record a death after the next fault of the same worker, but an unanswered fault must not
    # be given the answer to that one.
    return given_up if note.kind == "kill worker" else [r for r in given_up if float(r["at"]) < until]


def _heard(record: Record, note: Note) -> bool:
    """Whether the record is the coordinator's confirmation of the request."""
    if note.kind == "leave worker":
        return record.get("kind") == "leaves" and record.get("worker") == note.worker
    return record.get("kind") == "scaled"


def _granted(record: Record, note: Note) -> bool:
    return record.get("kind") == "generation" and record.get("cause") in PLANNED[note.kind]


def _gives_up(record: Record, worker: int | None) -> bool:
    match record.get("kind"):
        case "generation":
            return worker in record.get("lost", ())
        case "fenced" | "lost":
            return worker == record.get("worker")
    return False


def _recomputed(metrics: Sequence[Record], generation: int) -> int:
    """Shards recomputed by a generation. Without a recovery record, the generation took over no unfinished step."""
    found = (r for r in metrics if r.get("kind") == "recovery" and int(r["generation"]) == generation)
    return sum(int(r["recomputed"]) for r in found)


def _steps(metrics: Sequence[Record]) -> list[Record]:
    return [record for record in metrics if record.get("kind") == "step"]


def _lasting(metrics: Sequence[Record], promise: Promise) -> list[Record]:
    """The steps that count. After a recorded rollback, the steps that the members had done beyond its target do not
    count."""
    if promise == "bits":  # no rollback is allowed
        return _steps(metrics)
    kept: list[Record] = []
    for record in metrics:
        if record.get("kind") == "rollback":
            kept = [one for one in kept if int(one["step"]) < int(record["step"])]
        elif record.get("kind") == "step":
            kept.append(record)
    return kept


def _reexecuted(metrics: Sequence[Record]) -> int:
    back = [record for record in metrics if record.get("kind") == "rollback"]
    return sum(max(int(record["reached"]) - int(record["step"]), 0) for record in back)


def _samples(steps: Sequence[Record]) -> int:
    return sum(int(record["samples"]) for record in steps)


def _samples_per_s(steps: Sequence[Record]) -> float | None:
    """Samples per second from the first commit to the last. Each step counts once: repeated steps cost time but add no
    samples."""
    once = {int(record["step"]): record for record in steps}
    times = [float(record["at"]) for record in steps]
    if len(once) < 2 or not max(times) > min(times):
        return None
    first = min(once)
    return sum(int(r["samples"]) for step, r in once.items() if step != first) / (max(times) - min(times))


def _ms(since: float, until: float | None) -> float | None:
    return None if until is None else round((until - since) * 1000, 3)
