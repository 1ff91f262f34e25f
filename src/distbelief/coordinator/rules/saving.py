"""Checkpoints: when the members save one, when it is complete, and what a run waits for at its end.

How it works:
- Checkpoints every N steps need no decision here: members take them by the step number.
- A checkpoint that is wanted at a moment (on demand, every S seconds, before a stop) is given a step a little ahead of
  the members (`_ask`). A member that has already passed that step reports SaveMissed, and a later step is chosen.
- Each member of a generation writes a part. When all parts are written, one writer is asked to seal the checkpoint,
  that is, to write its manifest; if it does not, another one is asked. Then the checkpoint exists.
- If a writer dies before its part is written, the checkpoint is dropped, and another one is asked for.
- A run ends when its last checkpoint is sealed, or after FINAL_S without it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from distbelief.control import messages as m
from distbelief.coordinator.rules.ending import Result, complete, end, record, say
from distbelief.coordinator.rules.regroup import regroup
from distbelief.coordinator.rules.vocabulary import OpenSave, Output, Reply, Report, Send, State

AHEAD_S = 0.3
"""An upper bound for the age of a heartbeat plus the time that a command takes."""
ASK_AGAIN_S = 1.0
SEAL_AGAIN_S = 10.0
FINAL_TRIES = 5
FINAL_S = 600.0
"""The longest wait for the last checkpoint once all steps are done."""
STOP_S = 120.0
"""The longest wait for a checkpoint when the run is to stop; three steps, if those take longer."""


def can_save(state: State) -> bool:
    """Whether members could take a snapshot now."""
    return state.config.saves and state.phase == "training" and not state.paused


# --- asking for one --------------------------------------------------------------------------------------------------


def requested(state: State, event: m.CheckpointRequested, now: float) -> Result:
    """A user wants a checkpoint now."""
    if not state.config.saves:
        return state, [_answer(state, False, "the run was started without checkpoints (--save-every never)")]
    if not can_save(state):
        return state, [_answer(state, False, "no member trains at the moment, so there is no state to save")]
    if state.saves.asked is None:
        state, outputs = _ask(state, now)
    else:
        outputs = []
    step = state.saves.asked
    assert step is not None
    return state, [
        *outputs,
        _answer(state, True, f"a checkpoint of step {step} will be saved, or of one soon after", step),
    ]


def stop_after_save(state: State, reason: str, now: float) -> Result:
    if state.saves.stopping:
        return state, []
    state = replace(state, saves=replace(state.saves, stopping=reason, stopping_at=now))
    text = f"{reason}: the run stops when a checkpoint is saved"
    if reason.startswith("SIG"):  # otherwise a command beside the run has asked for it
        text += "; a second signal stops it at once"
    if state.finished:  # some members have finished, so all will: the last checkpoint follows
        return state, [say(text, now)]
    state, outputs = _ask(state, now)
    return state, [say(text, now), *outputs]


def _ask(state: State, now: float, ahead_s: float = AHEAD_S) -> Result:
    """Choose a step that no member has reached yet."""
    furthest = max((state.progress.steps.get(member.worker, 0) for member in state.members), default=0)
    step_s = state.pulse.step_s
    # Where steps are long, the end of the present step: a member that has just passed it reports SaveMissed.
    if step_s is None:
        margin = 1
    elif step_s >= ahead_s:
        margin = 0
    else:
        margin = math.ceil(ahead_s / max(step_s, 1e-4))
    # States exist only after multiples of the stride, and `step_s` is the time from one multiple to the next.
    step = min(furthest + (1 + margin) * state.config.stride, _last(state))
    state = replace(state, saves=replace(state.saves, asked=step, asked_at=now, ahead_s=ahead_s))
    return state, _tell(state)


def _tell(state: State) -> list[Output]:
    step = state.saves.asked
    assert step is not None
    there = state.saves.open[step].parts if step in state.saves.open else {}
    command = m.SaveAt(state.epoch, step)
    return [Send(member.worker, command) for member in state.members if member.worker not in there]


def missed(state: State, event: m.SaveMissed, now: float) -> Result:
    """A member was already past that step: choose a later one, further ahead."""
    if event.step != state.saves.asked or not state.is_member(event.worker):
        return state, []
    state = _without(state, event.step)
    return _ask(state, now, ahead_s=2 * state.saves.ahead_s)


# --- parts and seals -------------------------------------------------------------------------------------------------


def loaded(state: State, event: m.CheckpointLoaded, now: float) -> Result:
    """No member had the state: the run goes on from the newest usable checkpoint."""
    if event.worker <= state.saves.loaded_by:
        return state, []  # repeated to a coordinator that has taken over; later loads are by later workers
    saves = replace(state.saves, loaded_by=event.worker, sealed=event.step, sealed_at=now, open={})
    state = replace(state, saves=saves)
    text = f"the run goes on from step {event.step} ({event.folder})"
    if not event.step:
        text = f"there is no checkpoint in {event.folder}: the run starts from its first step"
    skipped = [say(f"skipped: {why}", now) for _, why in event.skipped]
    written = record(state, now, "loaded", text, worker=event.worker, step=event.step)
    state, more = complete_if_done(state, now)  # the loaded checkpoint may be the last one
    return state, [written, *skipped, say(text, now), *more]


def part_saved(state: State, event: m.PartSaved, now: float) -> Result:
    saves = state.saves
    members = _members_of(state, event.generation)
    if event.step <= saves.sealed or event.worker not in members:
        return state, []
    save = saves.open.get(event.step)
    if save is None or save.generation < event.generation:
        save = OpenSave(event.step, event.generation, members)
    if save.generation > event.generation or event.worker in save.parts:
        return state, []
    save = replace(save, parts={**save.parts, event.worker: event})
    state = _with(state, save)
    return _seal(state, save, now) if len(save.parts) == len(save.members) else (state, [])


def _seal(state: State, save: OpenSave, now: float) -> Result:
    """Ask a live writer to write the manifest, another writer each time."""
    alive = [worker for worker in save.members if state.workers[worker].exited is None]
    if not alive:
        return _lost(state, save, now)
    later = [worker for worker in alive if save.members.index(worker) > _place(save)]
    sealer = (later or alive)[0]
    parts = [save.parts[worker].part for worker in save.members]
    state = _with(state, replace(save, sealer=sealer, sealer_asked_at=now))
    return state, [Send(sealer, m.SealCheckpoint(state.epoch, save.step, parts))]


def _place(save: OpenSave) -> int:
    return save.members.index(save.sealer) if save.sealer in save.members else -1


def sealed(state: State, event: m.CheckpointSealed, now: float) -> Result:
    if event.step <= state.saves.sealed:
        return state, []
    save = state.saves.open.get(event.step)
    parts = list(save.parts.values()) if save else []
    still_open = {step: save for step, save in state.saves.open.items() if step > event.step}
    asked = state.saves.asked if state.saves.asked is None or state.saves.asked > event.step else None
    saves = replace(state.saves, sealed=event.step, sealed_at=now, open=still_open, asked=asked, complaints=frozenset())
    state = replace(state, saves=saves)
    facts = {
        "step": event.step,
        # A coordinator that has just taken over may not know the parts.
        "size_bytes": sum(part.part.size_bytes for part in parts) or event.size_bytes,
        "parts": len(parts) or event.parts,
        "pause_s": max((part.pause_s for part in parts), default=0.0),
        "write_s": max((part.write_s for part in parts), default=0.0),
    }
    outputs: list[Output] = [
        record(state, now, "checkpoint", f"all parts of step {event.step} are written and sealed", **facts),
        Report({"kind": "checkpoint", **facts, "at": now}),
    ]
    if saves.stopping and asked is None and not state.finished:
        state, more = end(state, "stopped", f"{saves.stopping}; a checkpoint of step {event.step} is saved", now)
    else:
        state, more = complete_if_done(state, now)
    return state, outputs + more


def failed(state: State, event: m.SaveFailed, now: float) -> Result:
    """A failure is reported once for each cause; the run goes on."""
    text = f"step {event.step} is not saved: {event.message}"
    what_next = "" if event.gave_up else "; it is tried again"
    outputs: list[Output] = []
    cause = event.message.rpartition(": ")[2]  # the text before it names a file, which differs each time
    if cause not in state.saves.complaints:
        hint = f" ({event.hint})" if event.hint else ""
        outputs.append(say(f"{text}{what_next}{hint}", now))
        state = replace(state, saves=replace(state.saves, complaints=state.saves.complaints | {cause}))
    if not event.gave_up or event.step <= state.saves.sealed:
        return state, outputs
    state = _without(state, event.step)
    asked = None if event.step == state.saves.asked else state.saves.asked
    # The next checkpoint by the clock is due a whole interval later.
    state = replace(state, saves=replace(state.saves, asked=asked, sealed_at=now))
    if state.saves.stopping and asked is None and not state.finished:
        state, more = _ask(state, now)  # a later step; STOP_S is the limit
        return state, outputs + more
    if event.step == _last(state):
        state = replace(state, saves=replace(state.saves, final_lost=True))
    state, more = complete_if_done(state, now)
    return state, outputs + more


# --- the end ---------------------------------------------------------------------------------------------------------


def complete_if_done(state: State, now: float) -> Result:
    """The run is complete when all members have finished, and its last checkpoint is sealed or impossible."""
    if not state.members or state.finished < len(state.members):
        return state, []
    saves = state.saves
    if not state.config.saves or saves.sealed >= _last(state) or saves.final_lost:
        return complete(state, now)
    if saves.finished_at is None:
        # Asked for like any other checkpoint: a member repeats a PartSaved that was lost.
        state = replace(state, saves=replace(saves, finished_at=now, asked=_last(state), asked_at=now))
    return state, []


# --- time passes -----------------------------------------------------------------------------------------------------


def ticked(state: State, now: float) -> Result:
    if not state.config.saves:
        return state, []
    outputs: list[Output] = []
    for save in list(state.saves.open.values()):
        state, more = _look_after(state, save, now)
        outputs += more
        if state.phase == "ended":
            return state, outputs
    saves = state.saves
    if saves.stopping and now - saves.stopping_at > max(STOP_S, 3 * (state.pulse.step_s or 0.0)):
        text = f"{saves.stopping}; no checkpoint could be saved within {now - saves.stopping_at:.0f} s"
        state, more = end(state, "stopped", text, now)
    elif saves.finished_at is not None and now - saves.finished_at > FINAL_S and not saves.final_lost:
        state = replace(state, saves=replace(saves, final_lost=True))
        outputs.append(say(f"the last checkpoint is not complete after {FINAL_S:.0f} s: the run ends without it", now))
        state, more = complete_if_done(state, now)
    elif saves.asked is not None and now - saves.asked_at > ASK_AGAIN_S:
        state = replace(state, saves=replace(saves, asked_at=now))
        more = _tell(state)
    else:
        state, more = _by_the_clock(state, now)
    return state, outputs + more


def _look_after(state: State, save: OpenSave, now: float) -> Result:
    """A worker that is gone writes no part and no manifest: drop the checkpoint, or ask another writer."""
    missing = [worker for worker in save.members if worker not in save.parts]
    if any(_is_gone(state, worker) for worker in missing):
        return _lost(state, save, now)
    if not missing:
        overdue = now - save.sealer_asked_at > SEAL_AGAIN_S
        if overdue or _is_gone(state, save.sealer):
            return _seal(state, save, now)
    return state, []


def _is_gone(state: State, worker: int) -> bool:
    known = state.workers.get(worker)
    return known is None or known.gone


def _lost(state: State, save: OpenSave, now: float) -> Result:
    """A writer died before its part was written. Another checkpoint is taken as soon as possible."""
    state = _without(state, save.step)
    if save.step != _last(state):
        return _ask(state, now) if state.saves.asked in (None, save.step) and can_save(state) else (state, [])
    if save.generation < state.generation:
        return state, []  # the present generation takes it again
    if state.saves.final_tries >= FINAL_TRIES:
        state = replace(state, saves=replace(state.saves, final_lost=True))
        return complete_if_done(state, now)
    state = replace(state, saves=replace(state.saves, final_tries=state.saves.final_tries + 1))
    # All steps are done; a new generation finds that out and saves the state.
    return regroup(state, "save", "a worker died before its part of the last checkpoint was written", now)


def _by_the_clock(state: State, now: float) -> Result:
    every_s, saves = state.config.save_every_s, state.saves
    if not every_s or saves.asked is not None or state.finished or not can_save(state):
        return state, []
    if saves.sealed_at is None:
        return replace(state, saves=replace(saves, sealed_at=now)), []
    return _ask(state, now) if now - saves.sealed_at >= every_s else (state, [])


# --- parts -----------------------------------------------------------------------------------------------------------


def _last(state: State) -> int:
    assert state.reference is not None
    return state.reference.job.steps


def _members_of(state: State, generation: int) -> tuple[int, ...]:
    """The generation's members by rank; empty if that generation is forgotten."""
    if state.start is None:
        return ()
    known: Mapping[int, list[m.Member]] = {
        state.generation: state.start.members,
        **{past.generation: past.members for past in state.start.past},
    }
    return tuple(member.worker for member in known.get(generation, []))


def _with(state: State, save: OpenSave) -> State:
    return replace(state, saves=replace(state.saves, open={**state.saves.open, save.step: save}))


def _without(state: State, step: int) -> State:
    still_open = {number: save for number, save in state.saves.open.items() if number != step}
    return replace(state, saves=replace(state.saves, open=still_open))


def _answer(state: State, ok: bool, text: str, step: int = -1) -> Reply:
    return Reply(m.Answer(state.epoch, ok, text, step))
