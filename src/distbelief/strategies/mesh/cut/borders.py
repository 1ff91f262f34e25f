"""Where a recorded forward pass may be cut: at calls of modules that training and evaluation have in common.

Pure but for the graphs it reads. Between the call before and the call at which a stage is to begin there is often some
code of no cost; the cut goes where the fewest values cross.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from distbelief.strategies.mesh.cut.recordedpass import Film
from distbelief.strategies.mesh.cut.tracing import Call, is_block
from distbelief.strategies.mesh.cut.values import Unsendable, parts


@dataclass(frozen=True)
class Anchor:
    """The call of a module (the first, second, …) with which a unit begins."""

    path: str
    occurrence: int


@dataclass(frozen=True)
class _Place:
    position: int
    crossing: int


def anchors_at(model: torch.nn.Module, modes: Sequence[Sequence[Call]], every_call: bool) -> list[Anchor]:
    """Where units may begin: at every block, and where what is between blocks begins; or at every call there is.

    Without blocks, at every layer that has parameters. What comes first belongs to the first unit anyhow.
    """
    numbered = list(_numbered(modes[0]))
    if every_call:
        return numbered[1:]
    has_parameters = {call.path: any(True for _ in model.get_submodule(call.path).parameters()) for call in modes[0]}
    blocks = {call.path for call in modes[0] if is_block(model, call.path)}
    groups: list[list[Anchor]] = []
    for anchor in numbered:
        alone = anchor.path in blocks or (not blocks and has_parameters[anchor.path])
        follows = groups and (groups[-1][0].path in blocks) == (anchor.path in blocks)
        if alone or not (groups and follows):
            groups.append([anchor])
        else:
            groups[-1].append(anchor)
    weighty = [group for group in groups if group[0].path in blocks or any(has_parameters[a.path] for a in group)]
    return [group[0] for group in weighty[1:]]


def borders(
    films: Mapping[bool, Film], anchors: Sequence[Anchor], at_least: int | None = None
) -> tuple[dict[bool, list[int]], list[str]]:
    """Per mode the positions of the cuts (the same number in each), and the places that cannot be cut, with reasons.

    With `at_least`, not all of them: none that more values cross than is needed for so many units.
    """
    found: list[tuple[Anchor, dict[bool, _Place]]] = []
    refused: list[str] = []
    calls = {
        mode: dict(zip(_numbered(film.recording.calls), film.recording.calls, strict=True))
        for mode, film in films.items()
    }
    for anchor in anchors:
        places: dict[bool, _Place] = {}
        try:
            for mode, film in films.items():
                if anchor not in calls[mode]:
                    raise Unsendable(f"{anchor.path} is not called in {'training' if mode else 'evaluation'}")
                places[mode] = _place(film, calls[mode][anchor])
                if found and places[mode].position <= found[-1][1][mode].position:
                    raise Unsendable("training and evaluation do not call modules in the same order")
        except Unsendable as reason:
            refused.append(f"a stage cannot begin at {anchor.path}: {reason}")
            continue
        found.append((anchor, places))
    if at_least is not None:
        found = _fewer_values(found, at_least)
    return {mode: [places[mode].position for _, places in found] for mode in films}, refused


def _fewer_values(
    found: list[tuple[Anchor, dict[bool, _Place]]], at_least: int
) -> list[tuple[Anchor, dict[bool, _Place]]]:
    """Only the cuts that the fewest values cross, as far as enough of them are left."""
    counts = [max(place.crossing for place in places.values()) for _, places in found]
    for most in sorted(set(counts)):
        low = [one for one, count in zip(found, counts, strict=True) if count <= most]
        if len(low) + 1 >= at_least:
            return low
    return found


def _place(film: Film, call: Call) -> _Place:
    """The best cut between the call before and this one. Raises with the reason where there is none."""
    before = max((other.end for other in film.recording.calls if other.end <= call.first), default=0)
    places, reasons = [], []
    for position in range(call.first, before - 1, -1):
        try:
            places.append(_Place(position, _crossing(film, position)))
        except Unsendable as reason:
            reasons.append(reason)
    if not places:
        raise reasons[0]
    return min(places, key=lambda place: place.crossing)


def _crossing(film: Film, position: int) -> int:
    for first, last in film.facts.tied:
        if first < position <= last:
            raise Unsendable(f"{film.nodes[last].name} changes in place what {film.nodes[first].name} made")
    sent = 0
    for node in film.crossing(position):
        try:
            sent += len(list(parts(film.facts.values[node])))
        except Unsendable as what:
            raise Unsendable(
                f"the value {node.name} would have to be sent and is {what}, not a tensor or an int"
            ) from None
    if not sent:
        raise Unsendable("nothing that was computed before is used from there on")
    return sent


def _numbered(calls: Sequence[Call]) -> Iterator[Anchor]:
    times: Counter[str] = Counter()
    for call in calls:
        yield Anchor(call.path, times[call.path])
        times[call.path] += 1
