"""State that counts calls, in code that is called with other arguments, at other times, by other workers.

A counter may act late in a run ("every 100 calls"), so counters are moved, and the code is called again. The shards
have such code (shards.py), and also what updates parameters: the job's schedule, a function of the step; its optimizer,
of parameter, gradient and `optimizer.state`; its functions of `after_update`, of the parameter. Workers call these at
other steps, again after a death, and with new objects after a regroup: so each is called twice here, the optimizer also
as a new object with the saved state.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from distbelief.data.sources import seed_everything
from distbelief.strategies.flatmodel.afterupdate import Functions
from distbelief.strategies.flatmodel.tileoptimizer import Recipe, eager_step
from distbelief.strategies.purity import Impurity
from distbelief.strategies.purity.hidden import Place, Snapshot, changes, checksum, key_token, snapshot_of
from distbelief.strategies.purity.rules.findings import Hidden, counts_calls, optimizer_differs, schedule_differs

MOVED_TO = (-2, -1, 10**9)
"""Values for counters. After -2 and -1 come -1 and 0, one of which acts "every n calls"; a billion is beyond any
threshold."""
FIRST_STEPS = 2
"""The schedule is called for these steps only: a later one may mean something to it."""
MOST_TRIED = 4
"""Parameters on which a function of `after_update` is tried."""
_SEED = 5


# --- counters --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Counter:
    """Numbers that change each time: a place with a number, or the elements `keys` of the list or mapping there."""

    place: Place
    keys: tuple[Any, ...] = ()

    @property
    def hidden(self) -> Hidden:
        return Hidden(self.place.name, self.place.owner, "value", self.place.in_loss)

    def move(self, to: int) -> None:
        value = self.place.kept.restored()
        if not self.keys:
            self.place.put(type(value)(to))
        for key in self.keys:
            value[key] = type(value[key])(to)

    def put_back(self) -> None:
        self.place.put_back()


def counters(before: Snapshot, after: Snapshot) -> list[Counter]:
    """The numbers that differ, with their values of the second snapshot."""
    found = []
    for name, place in after.items():
        then, now = before.get(name), place.kept.token
        if then is None or then.kept.token == now:
            continue
        if _is_number(now) and _is_number(then.kept.token):
            found.append(Counter(place))
        elif old := dict(_parts(then.kept.token)):
            new = dict(_parts(now))
            changed = {key for key in old.keys() & new if _is_number(old[key]) and _is_number(new[key])}
            changed = {key for key in changed if old[key] != new[key]}
            value = place.kept.restored()
            keys = value if isinstance(value, dict) else range(len(value))
            if changed:
                found.append(Counter(place, tuple(key for key in keys if key_token(key) in changed)))
    return found


def _is_number(token: Any) -> bool:
    return isinstance(token, tuple) and bool(token) and token[0] in ("int", "float")


def _parts(token: Any) -> Iterable[tuple[Any, Any]]:
    """The tokens of the elements of a list or mapping, by their keys."""
    match token:
        case "list", tuple(elements):
            return ((repr(number), one) for number, one in enumerate(elements))
        case "dict", tuple(elements):
            return elements
    return ()


def acting_later(found: Sequence[Counter], outcome: Callable[[], Any], usual: Any) -> list[Hidden]:
    """The counters that make a difference at another value, as "every 100 calls" and "after 1,000 calls" do.

    `outcome()`: call again what counts; `usual`: its outcome with the counters as they are now, and at the end."""

    def differs_with(moved: Sequence[Counter], to: int) -> bool:
        for one in found:
            one.put_back()
        for one in moved:
            one.move(to)
        try:
            return bool(outcome() != usual)
        except Exception:  # the job's code does not take such a number
            return False

    try:
        for to in MOVED_TO if found else ():
            if differs_with(found, to):
                return [one.hidden for one in found if differs_with([one], to)] or [found[0].hidden]
        return []
    finally:
        for one in found:
            one.put_back()


# --- the schedule ----------------------------------------------------------------------------------------------------


def check_schedule(schedule: Callable[[int], float] | None) -> list[Impurity]:
    if schedule is None:
        return []

    def factors() -> list[str]:
        steps = range(FIRST_STEPS)
        forward = [_factor(schedule, step) for step in steps]
        backward = [_factor(schedule, step) for step in reversed(steps)]
        return [*forward, *reversed(backward)]

    before = snapshot_of(schedule, "schedule")
    once = factors()
    found = counters(before, snapshot_of(schedule, "schedule"))
    if once[:FIRST_STEPS] != once[FIRST_STEPS:] or factors() != once:
        return [schedule_differs([one.hidden for one in found])]
    return [counts_calls("`schedule`", one, "the step") for one in acting_later(found, factors, once)]


def _factor(schedule: Callable[[int], float], step: int) -> str:
    try:
        return float(schedule(step)).hex()
    except Exception as error:  # training says so, at its step
        return type(error).__name__


# --- after_update ----------------------------------------------------------------------------------------------------


def check_after_update(functions: Functions, parameters: Sequence[torch.nn.Parameter]) -> list[Impurity]:
    """`functions`: by parameter number; `parameter_functions` has called them twice."""
    tried: dict[int, int] = {}
    named = {}
    for number, one in ((number, one) for number, several in functions.items() for one in several):
        tried[id(one.function)] = tried.get(id(one.function), 0) + 1
        if tried[id(one.function)] > MOST_TRIED:
            continue

        def changed(change: Callable[[torch.Tensor], str] = one.change, number: int = number) -> int:
            value = parameters[number].detach().clone()
            change(value)
            return checksum(value)

        before = snapshot_of(one.function, "function")
        usual = changed()
        for counter in acting_later(counters(before, snapshot_of(one.function, "function")), changed, usual):
            named[str(one), counter.name] = counts_calls(str(one), counter, "the parameter's value")
    return list(named.values())


# --- the optimizer ---------------------------------------------------------------------------------------------------


def check_optimizer(recipe: Recipe, parameters: Sequence[torch.nn.Parameter]) -> list[Impurity]:
    """Try an optimizer of another class than torch's own element-wise ones on one parameter of each kind."""
    kinds: dict[Any, int] = {}
    if not recipe.elementwise:
        for number, group in recipe.group_of.items():
            one = parameters[number]
            kind = group, one.dim(), one.dtype
            if kind not in kinds or one.numel() < parameters[kinds[kind]].numel():
                kinds[kind] = number
    for number in kinds.values():
        if found := _Trial(recipe, number, parameters[number]).found():
            return [found]
    return []


class _Trial:
    """An optimizer of a copy of one parameter."""

    def __init__(self, recipe: Recipe, number: int, parameter: torch.Tensor) -> None:
        self._made = recipe, number, parameter
        self._value = torch.nn.Parameter(parameter.detach().clone())
        self._optimizer = recipe.make([(number, self._value)])
        self._rates = [group.get("lr") for group in self._optimizer.param_groups]
        self._name = recipe.kind.__name__

    def found(self) -> Impurity | None:
        before = self._snapshot()
        self._step(0)
        saved = self._saved()
        first = self._snapshot()
        self._step(1)
        usual = self._content()
        fresh = _Trial(*self._made)
        fresh._load(saved)
        fresh._step(1)
        if fresh._content() != usual:
            suspects = [one.name for _, one in changes(before, first)] + self._changed_options(fresh)
            return optimizer_differs(self._name, suspects)

        def again() -> Any:
            self._load(saved)
            self._step(1)
            return self._content()

        late = acting_later(counters(first, self._snapshot()), again, usual)
        return counts_calls(f"the optimizer {self._name}", late[0], "its state") if late else None

    def _step(self, number: int) -> None:
        for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
            if rate is not None:
                group["lr"] = rate  # as each step of a run sets it
        generator = torch.Generator(self._value.device).manual_seed(number)
        gradient = torch.empty_like(self._value, requires_grad=False)
        self._value.grad = gradient.normal_(generator=generator).mul_(0.01)
        seed_everything(_SEED)
        eager_step(self._optimizer)()

    def _saved(self) -> tuple[torch.Tensor, dict[str, Any]]:
        state = self._optimizer.state.get(self._value, {})
        return self._value.detach().clone(), {key: _copied(one) for key, one in state.items() if one is not None}

    def _load(self, saved: tuple[torch.Tensor, dict[str, Any]]) -> None:
        value, state = saved
        with torch.no_grad():
            self._value.copy_(value)
        if state:
            self._optimizer.state[self._value] = {key: _copied(one) for key, one in state.items()}

    def _content(self) -> Any:
        state = self._saved()[1]
        return checksum(self._value), {key: _bits(one) for key, one in state.items()}

    def _snapshot(self) -> Snapshot:
        found = snapshot_of(self._optimizer, "optimizer")
        return {name: one for name, one in found.items() if name not in ("optimizer.state", "optimizer.param_groups")}

    def _changed_options(self, fresh: _Trial) -> list[str]:
        pairs = zip(self._optimizer.param_groups, fresh._optimizer.param_groups, strict=True)
        return [
            f"param_groups[{number}][{key!r}]"
            for number, (mine, other) in enumerate(pairs)
            for key in mine
            if key not in ("params", "lr") and repr(mine[key]) != repr(other.get(key))
        ]


def _copied(entry: Any) -> Any:
    return entry.detach().clone() if isinstance(entry, torch.Tensor) else entry


def _bits(entry: Any) -> Any:
    return checksum(entry) if isinstance(entry, torch.Tensor) else repr(entry)
