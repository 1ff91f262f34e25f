"""Replays one step of a run in this process: restores the state before it, inspects it, executes it and compares.

The verdict is "identical" if the bits are equal, or "within rounding" if the run promises no more than that.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, Protocol

from distbelief.checkpoint.sources import MODEL
from distbelief.checkpoint.weights import weights_sha256
from distbelief.control.messages import WorkerFailed
from distbelief.errors import DistBeliefError, NonFiniteLoss
from distbelief.replaying.findings import in_state, not_finite
from distbelief.replaying.inspection import Inspection, Question, inspect
from distbelief.replaying.rebuild import (
    Rebuilt,
    Start,
    in_words,
    is_equal_within_rounding,
    is_exact,
    loaded_here,
    nearest,
)
from distbelief.replaying.records import RecordedRun, canary_differs, chosen_step, read_run
from distbelief.strategies.base import Saved, StepResult
from distbelief.strategies.dataparallel.replica import DataParallelReplica
from distbelief.worker.loading import Loaded

# --- the verdict --------------------------------------------------------------------------------------------------

Verdict = Literal["matched", "equal", "differs", "unknown"]

TOLERANCE = 1e-3
"""Relative tolerance of a loss where rounding may differ. The difference is 1e-7 at first and grows with every step of
training.
"""


def judge(found: str | None, recorded: str | None, exact: bool) -> Verdict:
    """Compare this process's result (a fingerprint or a hash) with the run's record.

    Unknown: one of the two is missing, because the step was not committed or cannot be executed; or the run was not
    exact, so its bits depended on its members.

    >>> judge("1f", "1f", exact=True), judge("1f", "2e", exact=True), judge("1f", None, exact=True)
    ('matched', 'differs', 'unknown')
    >>> judge("1f", "2e", exact=False)
    'unknown'
    """
    if not exact or found is None or recorded is None:
        return "unknown"
    return "matched" if found == recorded else "differs"


def judge_within_rounding(found: float | None, recorded: float | None) -> Verdict:
    """`judge` for losses of a run whose members divided the model: they add in another order than one process does.

    >>> judge_within_rounding(2.0, 2.0001), judge_within_rounding(2.0, 2.1), judge_within_rounding(None, 2.0)
    ('equal', 'differs', 'unknown')
    """
    if found is None or recorded is None:
        return "unknown"
    return "equal" if abs(found - recorded) <= TOLERANCE * max(abs(found), abs(recorded), 1e-6) else "differs"


class Progress(Protocol):
    """Receives the progress of a replay."""

    def __call__(self, began_at: int, applied: int, target: int) -> None: ...

    def close(self) -> None:
        """The replay has reached its step. May be called more than once."""


@dataclass(frozen=True)
class Asked:
    run_dir: Path
    step: int | None = None
    """None: the step at which the run failed, or the step that caused the failure."""
    shard: int | None = None
    debug: bool = False
    device: str = ""
    """The device of the replay; empty: a device of the run's kind."""


@dataclass(frozen=True)
class Replayed:
    asked: Asked
    step: int
    start: Start
    began_at: int
    """The first step that was executed on the way."""
    differs_from: int | None
    """The first step on the way whose fingerprint differs from the record."""
    broke_state: bool
    """Whether this step was found to be the first one after which the state is not finite."""
    inspection: Inspection
    result: StepResult | None
    """None: the step could not be executed; `error` has the reason."""
    error: DistBeliefError | None
    recorded: str | None
    committed: bool
    """Whether the run has committed this step."""
    verdict: Verdict
    update: Verdict
    """Whether the parameters after the step are the original ones, too."""
    exact: bool
    other_bits: str
    """The reason to expect other bits here than in the run."""
    failure: WorkerFailed | None
    """The run's failure, if this step was chosen because of it, or if the run failed at this step."""
    clip_norm: float | None
    recorded_loss: float | None = None
    """The recorded loss, for comparison if the run divided the model."""

    @property
    def same(self) -> bool:
        """Whether no difference is known."""
        return "differs" not in (self.verdict, self.update)


def replay(asked: Asked, progress: Progress) -> Replayed:
    run = read_run(asked.run_dir)
    if asked.device:
        run = replace(run, launch=run.launch.with_options(device=asked.device))
    target = chosen_step(run, asked.step)
    with loaded_here(run) as loaded:
        _check(run, loaded, target, asked.shard)
        advance = _Advance(
            run, loaded, target, hunting=asked.step is None and run.failure is not None, progress=progress
        )
        advance.go()
        progress.close()
        step, replica = advance.step, advance.rebuilt.replica
        _check(run, loaded, step, asked.shard)
        stop_at = _debugged(run, loaded, step, asked) if asked.debug else None
        inspection = inspect(loaded, replica, Question(step, asked.shard, stop_at, advance.on_purpose))
        result, error = _execute(replica, step) if inspection.error is None else (None, inspection.error)
        exact, recorded = is_exact(run), run.recorded(step)
        return Replayed(
            asked=asked,
            step=step,
            start=advance.start,
            began_at=advance.began_at,
            differs_from=advance.differs_from,
            broke_state=advance.broke_state,
            inspection=inspection,
            result=result,
            error=in_words(run, error) if error else None,
            recorded=recorded,
            committed=run.was_committed(step),
            verdict=_judge_step(run, result, step),
            recorded_loss=run.loss(step),
            update=_judge_update(run, loaded, replica, step) if result else "unknown",
            exact=exact,
            other_bits=canary_differs(run, loaded.canary) if exact else "",
            failure=run.failure if asked.step is None else run.failure_at(step),
            clip_norm=loaded.job.clip_norm,
        )


class _Advance:
    """Executes the steps from the nearest checkpoint to the state before the requested step. When `hunting`, stops at
    the first step after which the state is not finite: the run failed later, but this step is the cause."""

    def __init__(self, run: RecordedRun, loaded: Loaded, target: int, hunting: bool, progress: Progress) -> None:
        self._run = run
        self._target = target
        self._hunting = hunting
        self._progress = progress
        self.on_purpose = {name for name, buffer in loaded.prepared.model.named_buffers() if not_finite(buffer)}
        start = nearest(run, target, self._suits)
        self.rebuilt = Rebuilt(loaded, start.saved, until=target + 2)
        self.start = replace(start, saved=None)  # the saved state is large and no longer needed
        self.began_at = self.step = self.rebuilt.replica.steps_applied()
        self.differs_from: int | None = None
        self.broke_state = False

    def _suits(self, saved: Saved) -> bool:
        return not self._hunting or _is_finite(saved, self.on_purpose)

    def go(self) -> None:
        if self._hunting and self._is_broken():
            return
        exact = is_exact(self._run)
        while self.step < self._target:
            replica = self.rebuilt.replica
            if self._hunting:
                self.rebuilt.keep()
            result, error = _execute(replica, self.step)
            if result is None:
                if self._hunting:
                    return
                assert error is not None
                raise _stranded(self._run, self.step, self._target, error)
            if self._hunting and self._is_broken():
                self.broke_state = True
                self.rebuilt.rewind()
                return
            recorded = self._run.recorded(self.step)
            if self.differs_from is None and judge(result.fingerprint, recorded, exact) == "differs":
                self.differs_from = self.step
            self.step += 1
            self._progress(self.began_at, self.step, self._target)

    def _is_broken(self) -> bool:
        self.rebuilt.replica.synchronise()
        return bool(in_state(self.rebuilt.replica.model, self.on_purpose))


def _is_finite(saved: Saved, on_purpose: Collection[str]) -> bool:
    kept = {f"{MODEL}{name}" for name in on_purpose}
    model = (tensor for name, tensor in saved.tensors.items() if name.startswith(MODEL) and name not in kept)
    return not any(map(not_finite, model))


def _execute(replica: DataParallelReplica, step: int) -> tuple[StepResult | None, Exception | None]:
    try:
        replica.compute(step)
        return replica.commit(step), None
    except Exception as error:  # the job's own error, or a loss that is not finite: the replay exists to show it
        return None, error


def _judge_step(run: RecordedRun, result: StepResult | None, step: int) -> Verdict:
    if is_equal_within_rounding(run):
        return judge_within_rounding(result.loss if result else None, run.loss(step))
    return judge(result.fingerprint if result else None, run.recorded(step), is_exact(run))


def _judge_update(run: RecordedRun, loaded: Loaded, replica: DataParallelReplica, step: int) -> Verdict:
    """Judge the update. A step's fingerprint covers its losses, which come before its update; the next step's losses
    show it."""
    if step + 1 == loaded.steps:
        replica.synchronise()
        return judge(weights_sha256(replica.model), run.weights_sha256 or None, is_exact(run))
    recorded = run.recorded(step + 1)
    if recorded is None:
        return "unknown"
    result, _ = _execute(replica, step + 1)
    if result is None and is_exact(run):
        return "differs"
    return _judge_step(run, result, step + 1)


def _debugged(run: RecordedRun, loaded: Loaded, step: int, asked: Asked) -> int:
    """The shard for the debugger: the requested one, else the one at which the run failed, else the first."""
    if asked.shard is not None:
        return asked.shard
    failure = run.failure_at(step)
    return failure.shard if failure and 0 <= failure.shard < loaded.schedule.occupied(step) else 0


def _check(run: RecordedRun, loaded: Loaded, step: int, shard: int | None) -> None:
    if step >= loaded.steps:
        raise DistBeliefError(
            f"step {step} is not among those of the run: it has {loaded.steps}", hint="steps are counted from 0"
        )
    if shard is None:
        return
    if not 0 <= shard < loaded.schedule.shards:
        raise DistBeliefError(
            f"there is no shard {shard}: the steps of {run.run_dir} have {loaded.schedule.shards} shards",
            hint="shards are counted from 0",
        )
    if shard >= loaded.schedule.occupied(step):
        raise DistBeliefError(
            f"shard {shard} of step {step} has no samples: it is the last step of an epoch",
            hint=f"this step has the shards 0 … {loaded.schedule.occupied(step) - 1}",
        )


def _stranded(run: RecordedRun, step: int, target: int, error: Exception) -> DistBeliefError:
    if not isinstance(error, NonFiniteLoss):
        return in_words(run, error, f"step {step}, on the way to step {target}: ")
    return DistBeliefError(
        f"step {target} cannot be reached: here {error.message}",
        hint=f"the run has committed that step, so something is different here: replay it with --step {step}",
    )
