"""The automatic cut of a model into units, of which consecutive ones make a stage of a pipeline.

A model is followed in three ways, the gentlest first: torch.fx with whole blocks; torch.fx looking deeper, where there
are too few units; torch.export, which runs the model's Python and keeps only tensor operations. Names in `split`
decide where a stage may begin instead. A cut is never made where a value would have to cross that cannot be sent, nor
between a value and a later change of it in place.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distbelief.errors import JobError
from distbelief.strategies.mesh.cut.borders import Anchor, anchors_at, borders
from distbelief.strategies.mesh.cut.exported import export, label_calls
from distbelief.strategies.mesh.cut.keeping import in_mode
from distbelief.strategies.mesh.cut.recordedpass import Film
from distbelief.strategies.mesh.cut.stages import Stage, build, write
from distbelief.strategies.mesh.cut.tracing import (
    EVERYTHING,
    Inputs,
    Recording,
    flat_inputs,
    has_hooks,
    leaves_around,
    leaves_at,
    met,
    trace,
)
from distbelief.strategies.mesh.cut.values import observe

__all__ = ["Blueprint", "Stage", "Unit", "draw"]

_DEPTHS = (0, 1, 2, 3, EVERYTHING)
_SPLIT_HINT = (
    "name the modules at which stages may begin, so that this code is inside one of them: "
    'Job(split=["blocks.1", "blocks.2"])'
)


@dataclass(frozen=True)
class Unit:
    """What is never cut. `name` is for people; `parameters` are the model's names, the first of each."""

    name: str
    parameters: tuple[str, ...]


class Blueprint:
    """A model and where it may be cut; gives any range of its units as a stage."""

    def __init__(
        self,
        model: torch.nn.Module,
        films: Mapping[bool, Film],
        cuts: Mapping[bool, Sequence[int]],
        refused: Sequence[str],
    ) -> None:
        self._model = model
        self._films = films
        self._cuts = {mode: [0, *cuts[mode], len(film.nodes)] for mode, film in films.items()}
        self.way = "torch.fx" if films[True].recording.device is None else "torch.export"
        self.refused = tuple(refused)
        """Where else it could have been cut, and why it was not."""
        self.units = tuple(self._unit(number) for number in range(len(cuts[True]) + 1))

    def stage(self, first: int, end: int) -> Stage:
        """The units [first, end)."""
        if not 0 <= first < end <= len(self.units):
            raise IndexError(f"units {first} to {end} of {len(self.units)}")
        codes = {}
        for training, film in self._films.items():
            cuts = self._cuts[training]
            mode = "training" if training else "evaluation"
            codes[training] = write(film, cuts[first], cuts[end], f"units {first} to {end - 1} in {mode}")
        return build(self._model, codes)

    def _unit(self, number: int) -> Unit:
        targets: set[str] = set()
        for training, film in self._films.items():
            targets |= film.targets(*self._cuts[training][number : number + 2])
        first, end = self._cuts[True][number : number + 2]
        calls = self._films[True].recording.calls
        paths = list(dict.fromkeys(call.path for call in calls if first <= call.first < end))
        name = " + ".join(paths) if len(paths) < 4 else f"{paths[0]} + … + {paths[-1]}"
        every = self._model.named_parameters(remove_duplicate=False)
        used = {id(p) for n, p in every if any(n == target or n.startswith(f"{target}.") for target in targets)}
        mine = (n for n, p in self._model.named_parameters() if id(p) in used)
        return Unit(name or type(self._model).__name__, tuple(mine))


def draw(
    model: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    split: Sequence[str] = (),
    at_least: int = 1,
) -> Blueprint:
    """Where `model` may be cut: at least at `at_least` - 1 places. Model and example inputs are on meta.

    >>> with torch.device("meta"):
    ...     model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 2))
    ...     blueprint = draw(model, (torch.empty(5, 4),), {}, at_least=2)
    >>> [unit.name for unit in blueprint.units]
    ['0', '1', '2']
    >>> blueprint.stage(1, 3).receives
    ('_0',)
    """
    if has_hooks(model):
        raise JobError(
            "the model itself has forward hooks, which no stage of it can run",
            hint="register them on modules inside the model",
        )
    attempt = _Attempt(model, (args, dict(kwargs)), bool(split))
    found = _named(attempt, tuple(split)) if split else _automatic(attempt, at_least)
    if found is None:
        raise JobError(
            f"the model cannot be cut into stages, because its code cannot be followed: {attempt.failures[0]}",
            hint=_SPLIT_HINT,
            details="\n".join(attempt.failures),
        )
    if len(found.units) < at_least:
        raise _too_few(found, attempt, at_least, bool(split))
    return found


def _automatic(attempt: _Attempt, at_least: int) -> Blueprint | None:
    best: Blueprint | None = None
    for films in (attempt.traced, attempt.exported):
        seen: list[frozenset[str]] = []
        for depth in _DEPTHS:
            leaves = leaves_at(attempt.model, depth)
            if leaves in seen:
                continue
            seen.append(leaves)
            recorded = films(leaves)
            if recorded is None:
                break
            for every_call in (False, True) if depth == 0 else (True,):
                blueprint = _cut(attempt.model, recorded, at_least, every_call)
                if best is None or len(blueprint.units) > len(best.units):
                    best = blueprint
                if len(best.units) >= at_least:
                    return best
    return best


def _cut(model: torch.nn.Module, films: Mapping[bool, Film], at_least: int, every_call: bool) -> Blueprint:
    anchors = anchors_at(model, [film.recording.calls for film in films.values()], every_call)
    cuts, refused = borders(films, anchors, at_least if every_call else None)
    return Blueprint(model, films, cuts, refused)


def _named(attempt: _Attempt, split: Sequence[str]) -> Blueprint | None:
    modules = dict(attempt.model.named_modules(remove_duplicate=False))
    for name in split:
        if not name or name not in modules:
            near = difflib.get_close_matches(name, [path for path in modules if path], n=3, cutoff=0.4)
            raise JobError(
                f"split: the model has no module {name!r}",
                hint=f"did you mean {' or '.join(map(repr, near))}?" if near else "see model.named_modules()",
            )
    leaves = leaves_around(attempt.model, split)
    films = attempt.traced(leaves) or attempt.exported(leaves)
    if films is None:
        return None
    for name in split:
        if any(all(call.path != name for call in film.recording.calls) for film in films.values()):
            raise JobError(
                f"split: no stage can begin at {name!r}, because the model never calls this module",
                hint="name modules whose forward runs; a list of modules is not one of them, its elements are",
            )
    order = [call.path for call in films[True].recording.calls]
    anchors = [Anchor(name, 0) for name in sorted(set(split), key=order.index) if order.index(name) > 0]
    cuts, refused = borders(films, anchors)
    if refused:
        raise JobError(f"split: {refused[0]}", hint="name a module before or behind it")
    return Blueprint(attempt.model, films, cuts, ())


def _too_few(found: Blueprint, attempt: _Attempt, at_least: int, named: bool) -> JobError:
    names = " | ".join(unit.name for unit in found.units)
    count = len(found.units)
    units = f"{count} units" if count > 1 else "only one unit"
    fits = f"pipeline:{count} fits" if count > 1 else "use data parallelism, or sharded"
    hint = f"{fits}; or name more modules in `split`" if named else f"{fits}; or a model with more layers"
    return JobError(
        f"the model cannot be cut into {at_least} stages, it has {units}: {names}",
        hint=hint,
        details="\n".join((*found.refused, *attempt.failures)),
    )


class _Attempt:
    """The model and its example inputs, followed in one way or another; remembers why a way failed.

    Where the user has named modules, these may do whatever they want inside, also look at values.
    """

    def __init__(self, model: torch.nn.Module, inputs: Inputs, named: bool) -> None:
        self.model = model
        self._named = named
        self.failures: list[str] = []
        self._inputs = inputs
        self._export: Mapping[bool, Film] | None = None

    def traced(self, leaves: frozenset[str]) -> Mapping[bool, Film] | None:
        return self._films("torch.fx", lambda: trace(self.model, self._inputs, leaves))

    def exported(self, leaves: frozenset[str]) -> Mapping[bool, Film] | None:
        if self._export is None:
            self._export = self._films("torch.export", lambda: export(self.model, self._inputs))
        if self._export is None:
            return None
        return {mode: film.relabelled(label_calls(film.recording, leaves)) for mode, film in self._export.items()}

    def _films(self, way: str, record: Callable[[], Recording]) -> Mapping[bool, Film] | None:
        films = {}
        for training in (True, False):
            with in_mode(self.model, training):
                try:
                    recording = record()
                    facts = observe(self.model, recording, flat_inputs(*self._inputs)[0], self._named)
                except Exception as error:  # whatever the model's own code raises when it is followed
                    self.failures.append(f"{way}: {met(error)}")
                    return None
                modes = {path: module.training for path, module in self.model.named_modules(remove_duplicate=False)}
            films[training] = Film(recording, facts, modes)
        return films
