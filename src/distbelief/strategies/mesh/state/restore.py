"""Gives a member's new part its values when a generation begins: from the other members, from snapshots, from a
checkpoint, or from the job's initial values. `rules/agreement.py` decides which.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
import torch

from distbelief.checkpoint.lazy import LazyTensors, outlines_of
from distbelief.checkpoint.parts import dtype_name
from distbelief.checkpoint.rules.boxes import Box, sizes
from distbelief.checkpoint.sources import MODEL
from distbelief.checkpoint.tensorforms import form
from distbelief.strategies.base import BeginFrom, RolledBack, Saved
from distbelief.strategies.flatmodel.namedtensors import require_fit, tied, transient
from distbelief.strategies.mesh.init.deferred import DeferredModel
from distbelief.strategies.mesh.rules import agreement
from distbelief.strategies.mesh.rules.agreement import StateReport, StateSource, decision_on
from distbelief.strategies.mesh.rules.boxes import moves
from distbelief.strategies.mesh.state.member import MeshMember, transfer_boxes
from distbelief.strategies.mesh.state.memberstate import Forms, MemberState, Pieces
from distbelief.strategies.mesh.state.snapshots import Snapshots
from distbelief.transport.gloo.group import TorchGroup

_TOLD = 64  # the last steps that members report to each other: more than are committed between two heartbeats


def exchange_reports(group: TorchGroup, report: StateReport) -> list[StateReport]:
    """Collective: returns every member's report, by rank."""
    decoder = msgspec.msgpack.Decoder(StateReport)
    return [decoder.decode(theirs) for theirs in group.gather(msgspec.msgpack.encode(report))]


def report_of(old: MemberState | None, snapshots: Snapshots) -> StateReport:
    """The report about the state of the last generation (if any) and the snapshots in this worker's memory."""
    kept = [(one.step, dict(one.boxes)) for one in snapshots.kept]
    reached = max([one.step for one in snapshots.kept], default=0)
    if old is None:
        return StateReport(snapshots=kept, reached=reached)
    history = list(old.history)[-_TOLD:]
    return StateReport(
        old.applied, old.pending, old.last, old.boxes(), kept, max(reached, old.applied), history, old.note
    )


def restore_state(
    member: MeshMember, old: MemberState | None, snapshots: Snapshots, begin_from: BeginFrom, deferred: DeferredModel
) -> RolledBack | None:
    """Collective: give every member's new part its values. Returns the rollback if committed steps were lost."""
    world, state = member.groups.world, member.state
    reports = exchange_reports(world, report_of(old, snapshots))
    choice = agreement.choose(reports, {name: shape for name, (_, shape) in member.forms.items()})
    into = dict(state.part.tensors())
    kept = {name: torch.zeros(sizes(box), dtype=dtype) for name, dtype, _, box in state.optimizer.forms()}
    into.update({name: (box, kept[name]) for name, _, _, box in state.optimizer.forms()})
    rolled_back = None
    step = choice.step
    if choice.origin == "outside":
        step = _from_outside(member, into, begin_from, deferred)
        if choice.reached > step:
            rolled_back = RolledBack(choice.reached, step, "checkpoint")
    else:
        own: list[Mapping[str, tuple[Box, torch.Tensor]]] = []
        if choice.origin == "members" and old is not None:
            catch_up(old, reports, choice.step)
            own = [old.tensors()] if old.applied == choice.step else []
        elif choice.origin == "snapshots":
            own = [one.pieces for one in snapshots.kept if one.step == choice.step]
            if choice.reached > choice.step:
                rolled_back = RolledBack(choice.reached, choice.step, "snapshots")
        fetch_boxes(world, choice, own, member.held, into)
        state.history.extend(agreement.merged_history(reports, choice.step))
        state.note = max((p.note for p in reports if p.note[0] <= choice.step), default=state.note)
    _fill_plain_attributes(member, deferred)
    state.optimizer.load(kept)
    state.keep_buffers()
    state.applied = step
    return rolled_back


def _from_outside(
    member: MeshMember, into: Mapping[str, tuple[Box, torch.Tensor]], begin_from: BeginFrom, deferred: DeferredModel
) -> int:
    """Load a checkpoint, or else the job's initial values. Rank 0 looks first, so that all members take the same
    one."""
    world, state = member.groups.world, member.state
    saved = begin_from() if world.rank == 0 else None
    told = int(world.gather(str(saved.step if saved else -1).encode())[0])
    if told < 0:
        _fill(into, deferred.values([name.removeprefix(MODEL) for name in into if name.startswith(MODEL)]))
        return 0
    if world.rank != 0:
        saved = begin_from(told)
    assert saved is not None
    if saved.step != told:
        raise RuntimeError(f"rank 0 has found a checkpoint of step {told}, and this member one of step {saved.step}")
    _require_fit(member, saved)
    not_saved = [name for name in into if name.startswith(MODEL) and name not in saved.tensors]  # transient buffers
    _fill(into, deferred.values([name.removeprefix(MODEL) for name in not_saved]))
    _load(into, saved)
    state.history.extend(saved.history)
    state.note = (saved.step, saved.note) if saved.note else state.note
    return saved.step


def _fill_plain_attributes(member: MeshMember, deferred: DeferredModel) -> None:
    """Give values to tensors that modules keep as plain attributes. They are not part of the state."""
    for name, value in deferred.values(deferred.plain_attributes):
        owner, _, key = name.rpartition(".")
        for stage in member.state.part.stages.values():
            if owner in (one for one, _ in stage.module.named_modules()):
                setattr(stage.module.get_submodule(owner), key, value)


def _fill(into: Mapping[str, tuple[Box, torch.Tensor]], values: Iterable[tuple[str, torch.Tensor]]) -> None:
    for name, value in values:
        box, memory = into[f"{MODEL}{name}"]
        memory.copy_(value.detach()[tuple(slice(start, end) for start, end in box)])


def _load(into: Mapping[str, tuple[Box, torch.Tensor]], saved: Saved) -> None:
    wanted = {name: box for name, (box, _) in into.items() if name in saved.tensors}
    if isinstance(saved.tensors, LazyTensors):
        for name, value in saved.tensors.read_boxes(wanted).items():
            into[name][1].copy_(value)
        return
    for name, box in wanted.items():
        into[name][1].copy_(saved.tensors[name][tuple(slice(start, end) for start, end in box)])


def _require_fit(member: MeshMember, saved: Saved) -> None:
    """Check every name and shape before writing anything."""
    weights_alone = all(name.startswith(MODEL) for name in saved.tensors)
    others = {f"{MODEL}{name}" for name in tied(member.model)}
    passing = {f"{MODEL}{name}" for name in transient(member.model)} if weights_alone else set()
    wanted = {
        name: form
        for name, form in member.forms.items()
        if not (weights_alone and not name.startswith(MODEL)) and not (name in passing and name not in saved.tensors)
    }
    given = {name: outline for name, outline in outlines_of(saved.tensors).items() if name not in others}
    require_fit(_as_text(given), _as_text(wanted))


def _as_text(forms: Forms) -> dict[str, str]:
    return {name: form(dtype_name(dtype), shape) for name, (dtype, shape) in forms.items()}


def catch_up(state: MemberState, reports: Sequence[StateReport], top: int) -> None:
    """Apply the pending step if other members have applied it: this member was interrupted inside the vote."""
    decision = decision_on(top - 1, reports)
    if decision is not None and state.applied == top - 1 and state.pending == top - 1:
        state.apply(decision)


def fetch_boxes(
    group: TorchGroup, choice: StateSource, own: Sequence[Pieces], wanted: Sequence[Mapping[str, Box]], into: Pieces
) -> None:
    """Transfer the chosen state to the members that want it. `own`: this member's holdings, in the order of its
    report."""
    numbers = [number for number, holding in enumerate(choice.holdings) if holding.rank == group.rank]
    mine = dict(zip(numbers, own, strict=True))
    transfer_boxes(group, moves(choice.holdings, wanted), mine, into)
