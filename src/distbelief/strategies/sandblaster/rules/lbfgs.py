"""L-BFGS with a line search, for a driver that never sees a vector: it commands `Vectors` and receives scalars.

The two-loop recursion takes only inner products of the steps s, the changes of the gradient y, and the gradient g. The
driver keeps all of these products, so a direction costs one `combine`. One `dot` brings the products that a new point
adds, and the slope for the line search. An iteration whose first step is good is

    combine direction · combine point · evaluate · combine change · dot

and waits twice: for the evaluation and for the products. The vectors hold the directions d, not the steps s = t·d; the
driver remembers t.

A `State` is a few numbers and the names of the vectors that they belong to. An iteration writes only to vectors that
its state does not name. So a driver may die between any two commands: the next driver repeats the iteration from the
last state, with the same bits. In return, a state must be saved before the next iteration begins.

The line search, in the second half, looks for a step t that meets the strong Wolfe conditions. Along a direction, φ(t)
is the loss at step t and φ'(t) its slope. A step is good if it lowers the loss enough, φ(t) ≤ φ(0) + c₁·t·φ'(0), and
has left most of the slope behind, |φ'(t)| ≤ c₂·|φ'(0)|. The search grows the step until it has bracketed good steps,
then shrinks the bracket (Nocedal & Wright, Numerical Optimization, algorithms 3.5 and 3.6), by cubic interpolation with
the safeguards of torch.optim.LBFGS, so that both try the same points.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from distbelief.errors import DistBeliefError, JobError

Pair = tuple[str, str]
Term = tuple[float, str]
"""A coefficient and a vector."""
Evaluate = Callable[[str, str], float]
"""(name of a point, name of a vector that is to become the gradient there) -> the loss."""

Ended = Literal["", "gradient", "change", "stuck"]

_POINTS = ("point.0", "point.1")
_GRADIENTS = ("gradient.0", "gradient.1", "gradient.2")
_STRAIGHT = 1e-10  # a pair is skipped when the cosine between step and change of gradient is smaller


class Vectors(Protocol):
    """Named vectors that the driver cannot see, of `size` elements each. Only `dot`, `max_abs` and `sum_abs` wait
    for an answer: over a network the other commands may be in flight, if every slice performs them in order."""

    @property
    def size(self) -> int:
        """Elements of every vector."""
        ...

    def dot(self, pairs: Sequence[Pair]) -> list[float]:
        """The inner products of several pairs, in one command."""
        ...

    def combine(self, target: str, terms: Sequence[Term]) -> None:
        """target = Σ coefficient · vector. The target may be one of the vectors, or new."""
        ...

    def copy(self, target: str, source: str) -> None: ...

    def drop(self, names: Sequence[str]) -> None:
        """Delete vectors. Unknown names are no error: the command may be a repetition."""
        ...

    def max_abs(self, names: Sequence[str]) -> list[float]:
        """The largest absolute value of each vector; NaN where it holds one."""
        ...

    def sum_abs(self, names: Sequence[str]) -> list[float]: ...


class Settings(msgspec.Struct, frozen=True):
    """The settings of a search: names and meanings are those of torch.optim.LBFGS."""

    history_size: int = 10
    lr: float = 1.0
    tolerance_grad: float = 1e-7
    tolerance_change: float = 1e-9
    max_evaluations: int = 25
    """The limit of evaluations in one line search."""

    def __post_init__(self) -> None:
        if self.history_size < 1 or self.max_evaluations < 1 or not 0 < self.lr < math.inf:
            raise JobError(
                f"L-BFGS cannot work with history_size={self.history_size}, lr={self.lr}, "
                f"max_evaluations={self.max_evaluations}",
                hint="history_size and max_evaluations are at least 1, lr is above 0; the defaults are 10, 25 and 1.0",
            )


class Past(msgspec.Struct, frozen=True):
    """One pair (s, y) of the history: s = step · direction."""

    direction: str
    change: str
    step: float


class State(msgspec.Struct, frozen=True):
    """The state of the search between two iterations: another driver can continue from it."""

    point: str
    gradient: str
    loss: float
    first_step: float
    """The first step of a search along the plain gradient."""
    gg: float
    past: tuple[Past, ...] = ()
    sg: tuple[float, ...] = ()
    yg: tuple[float, ...] = ()
    sy: tuple[tuple[float, ...], ...] = ()
    """sy[i][j] = sᵢ·yⱼ"""
    yy: tuple[tuple[float, ...], ...] = ()
    iteration: int = 0
    evaluations: int = 0
    ended: Ended = ""


@dataclass(frozen=True)
class _Trial:
    """An evaluated point of the line search, with the products that it would add to the history."""

    step: float
    gradient: str
    loss: float
    slope: float
    slope_at_start: float
    dd: float
    gg: float
    new_dy: float
    new_yy: float
    new_yg: float
    sg: tuple[float, ...]
    """`sg`, `yg`, `sy`, `yy`: the products of every pair of the history with the new gradient g and its change y."""
    yg: tuple[float, ...]
    sy: tuple[float, ...]
    yy: tuple[float, ...]
    dy: tuple[float, ...]
    """The products of the new direction with every change of the history."""


def explain(ended: Ended) -> str:
    """The reason why the search ended, for people."""
    return {
        "": "the search goes on",
        "gradient": "the gradient is below tolerance_grad: this is a minimum",
        "change": "the last iteration changed less than tolerance_change: this is a minimum, or nearly one, unless the "
        "loss is so large that its own rounding hides the change",
        "stuck": "no step along the gradient lowers the loss: this is a minimum as far as its rounding errors show, "
        "or the loss is not a function of the parameters alone (dropout, random data)",
    }[ended]


def begin(vectors: Vectors, evaluate: Evaluate, point: str, settings: Settings) -> State:
    """Evaluate the first point of a search. The vector `point` is read, never written."""
    here, gradient = _POINTS[0], _GRADIENTS[0]
    vectors.copy(here, point)
    loss = evaluate(here, gradient)
    [gg] = vectors.dot([(gradient, gradient)])
    if not (math.isfinite(loss) and math.isfinite(gg)):
        raise DistBeliefError(
            f"the loss at the first point is {loss}, the square of its gradient's norm {gg}: L-BFGS cannot begin there",
            hint="begin with other weights, or warm up with a few steps of another strategy",
        )
    state = State(here, gradient, loss, 0.0, gg, evaluations=1)
    ended: Ended = "gradient" if _below(vectors, gradient, gg, 1.0, settings.tolerance_grad) else ""
    return msgspec.structs.replace(_plain(state, vectors, settings), ended=ended)


def iterate(state: State, vectors: Vectors, evaluate: Evaluate, settings: Settings) -> State:
    """One iteration: a direction, a line search along it, a new pair for the history. Does nothing if `state.ended`."""
    if state.ended:
        return state
    taken = {past.direction for past in state.past}  # a state names them, even if their history is forgotten below
    coefficients, slope = direction(state)
    if state.past and not slope < 0.0:  # rounding made it no descent
        state = _plain(state, vectors, settings)
        coefficients, slope = direction(state)
    if slope > -settings.tolerance_change:
        return msgspec.structs.replace(state, ended="change")
    slot = next(i for i in range(len(taken) + 1) if f"direction.{i}" not in taken)
    new = Past(f"direction.{slot}", f"change.{slot}", 0.0)
    vectors.combine(new.direction, coefficients)
    target = _POINTS[state.point == _POINTS[0]]
    outcome, trials = _search(state, vectors, evaluate, settings, new, target)
    state = msgspec.structs.replace(
        state, iteration=state.iteration + 1, evaluations=state.evaluations + outcome.evaluations
    )
    if outcome.kind == "failed":
        if not state.past:
            return msgspec.structs.replace(state, ended="stuck")
        return _plain(state, vectors, settings)
    accepted = next(trial for trial in reversed(trials) if trial.step == outcome.step)
    if accepted is not trials[-1]:
        _place(state, vectors, new, target, accepted.step)
        vectors.combine(new.change, [(1.0, accepted.gradient), (-1.0, state.gradient)])
    return _moved(state, accepted, msgspec.structs.replace(new, step=accepted.step), target, vectors, settings)


def direction(state: State) -> tuple[list[Term], float]:
    """-H·g as a combination of known vectors, and its product with g. H approximates the inverse Hessian from the
    history, beginning with the scalar s·y / y·y (Nocedal & Wright, algorithm 7.4, with products instead of vectors).

    >>> direction(State("x", "g", loss=1.0, first_step=1.0, gg=4.0))
    ([(-1.0, 'g')], -4.0)
    """
    count = len(state.past)
    on_g, on_y, on_s, alpha = -1.0, [0.0] * count, [0.0] * count, [0.0] * count
    for i in reversed(range(count)):
        alpha[i] = (on_g * state.sg[i] + _sum(on_y, state.sy[i])) / state.sy[i][i]
        on_y[i] -= alpha[i]
    if count:
        scale = state.sy[-1][-1] / state.yy[-1][-1]
        on_g, on_y = on_g * scale, [c * scale for c in on_y]
    for i in range(count):
        product = on_g * state.yg[i] + _sum(on_y, state.yy[i]) + _sum(on_s, [row[i] for row in state.sy])
        on_s[i] += alpha[i] - product / state.sy[i][i]
    slope = on_g * state.gg + _sum(on_y, state.yg) + _sum(on_s, state.sg)
    terms = [(on_g, state.gradient)]
    for past, c_s, c_y in zip(state.past, on_s, on_y, strict=True):
        terms += [(c_s * past.step, past.direction), (c_y, past.change)]
    return terms, slope if all(math.isfinite(c) for c, _ in terms) else math.nan


def _search(
    state: State, vectors: Vectors, evaluate: Evaluate, settings: Settings, new: Past, target: str
) -> tuple[Outcome, list[_Trial]]:
    """Search along the new direction. Returns also the kept trial and the last trial; their gradients exist."""
    free = [name for name in _GRADIENTS if name != state.gradient]
    first = settings.lr if state.past else state.first_step
    # The first trial also brings the exact slope and length of the direction, with which the search begins.
    trial = _try(state, vectors, evaluate, new, target, first, free[0])
    if not trial.slope_at_start < 0.0:
        return Outcome("failed", 0.0, 1), [trial]
    narrowest = settings.tolerance_change / math.sqrt(max(trial.dd, sys.float_info.min))
    search = strong_wolfe(
        state.loss, trial.slope_at_start, first, narrowest=narrowest, evaluations=settings.max_evaluations
    )
    next(search)
    kept: list[_Trial] = []
    while True:
        try:
            ask = search.send((trial.loss, trial.slope))
        except StopIteration as end:
            outcome: Outcome = end.value
            return outcome, [*kept, trial]
        kept = [one for one in (*kept, trial) if one.step == ask.keep][-1:]
        place = next(name for name in free if not kept or name != kept[0].gradient)
        trial = _try(state, vectors, evaluate, new, target, ask.step, place)


def _try(
    state: State, vectors: Vectors, evaluate: Evaluate, new: Past, target: str, step: float, gradient: str
) -> _Trial:
    _place(state, vectors, new, target, step)
    loss = evaluate(target, gradient)
    vectors.combine(new.change, [(1.0, gradient), (-1.0, state.gradient)])
    d, y = new.direction, new.change
    pairs: list[Pair] = [
        (gradient, d),
        (state.gradient, d),
        (d, d),
        (gradient, gradient),
        (d, y),
        (y, y),
        (y, gradient),
    ]
    for p in state.past:
        pairs += [(p.direction, gradient), (p.change, gradient), (p.direction, y), (p.change, y), (d, p.change)]
    slope, at_start, dd, gg, new_dy, new_yy, new_yg, *rest = vectors.dot(pairs)
    if not all(math.isfinite(value) for value in (gg, new_dy, new_yy, new_yg, *rest)):
        slope = math.nan  # no such point may enter the history, whatever its loss
    steps = [p.step for p in state.past]
    sg, sy = (tuple(t * v for t, v in zip(steps, rest[k::5], strict=True)) for k in (0, 2))
    yg, yy, dy = (tuple(rest[k::5]) for k in (1, 3, 4))
    return _Trial(step, gradient, loss, slope, at_start, dd, gg, new_dy, new_yy, new_yg, sg, yg, sy, yy, dy)


def _place(state: State, vectors: Vectors, new: Past, target: str, step: float) -> None:
    vectors.combine(target, [(1.0, state.point), (step, new.direction)])


def _moved(state: State, trial: _Trial, new: Past, target: str, vectors: Vectors, settings: Settings) -> State:
    """The state at an accepted point: its pair joins the history where its curvature is positive."""
    ended: Ended = ""
    if _below(vectors, trial.gradient, trial.gg, 1.0, settings.tolerance_grad):
        ended = "gradient"
    elif abs(trial.loss - state.loss) < settings.tolerance_change or _below(
        vectors, new.direction, trial.dd, abs(new.step), settings.tolerance_change
    ):
        ended = "change"
    state = msgspec.structs.replace(
        _remembered(state, trial, new, settings.history_size),
        point=target,
        gradient=trial.gradient,
        loss=trial.loss,
        gg=trial.gg,
        ended=ended,
    )
    return state if state.past or ended else _plain(state, vectors, settings)


def _remembered(state: State, trial: _Trial, new: Past, most: int) -> State:
    """The history with its products with the new gradient, and the new pair if its curvature s·y is positive."""
    if not trial.new_dy > _STRAIGHT * math.sqrt(trial.dd) * math.sqrt(trial.new_yy):
        return msgspec.structs.replace(state, sg=trial.sg, yg=trial.yg)
    t, old = new.step, slice(max(len(state.past) - most + 1, 0), None)
    sy = [(*row[old], value) for row, value in zip(state.sy[old], trial.sy[old], strict=True)]
    yy = [(*row[old], value) for row, value in zip(state.yy[old], trial.yy[old], strict=True)]
    return msgspec.structs.replace(
        state,
        past=(*state.past[old], new),
        sg=(*trial.sg[old], t * trial.slope),
        yg=(*trial.yg[old], trial.new_yg),
        sy=(*sy, (*(t * value for value in trial.dy[old]), t * trial.new_dy)),
        yy=(*yy, (*trial.yy[old], trial.new_yy)),
    )


def _plain(state: State, vectors: Vectors, settings: Settings) -> State:
    """Forget the history: the next line search goes along the gradient and begins with a short step, since the right
    length is unknown."""
    [length] = vectors.sum_abs([state.gradient])
    first = min(1.0, 1.0 / length) * settings.lr if length > 0.0 else settings.lr
    return msgspec.structs.replace(state, past=(), sg=(), yg=(), sy=(), yy=(), first_step=first)


def _below(vectors: Vectors, name: str, square: float, factor: float, tolerance: float) -> bool:
    """Whether factor · max|v| ≤ tolerance. Asks the servers only if the known norm does not rule it out."""
    if factor * math.sqrt(square / max(vectors.size, 1)) > tolerance:
        return False
    return factor * vectors.max_abs([name])[0] <= tolerance


def _sum(coefficients: Sequence[float], values: Sequence[float]) -> float:
    """A plain left-to-right sum: builtin `sum` rounds differently from one version of Python to the next."""
    total = 0.0
    for coefficient, value in zip(coefficients, values, strict=True):
        total += coefficient * value
    return total


SUFFICIENT_DECREASE = 1e-4  # c₁
CURVATURE = 0.9  # c₂: loose, because a quasi-Newton direction rarely deserves a second evaluation
_GROWTH = 10.0  # the most by which a step grows at once
_RETREAT = 0.1  # how far to go where the step before had no finite loss: such regions begin at unknown scales


@dataclass(frozen=True)
class Ask:
    """A request to evaluate at `step`. `keep` is the best step so far (0: none): its gradient is still needed. The
    gradients of other steps are not."""

    step: float
    keep: float


@dataclass(frozen=True)
class Outcome:
    """`found`: the step meets both conditions. `best`: evaluations ran out, or the bracket became too small; the step
    lowers the loss enough, but its slope is steep. `failed`: no step lowered the loss enough; `step` is 0."""

    kind: Literal["found", "best", "failed"]
    step: float
    evaluations: int


@dataclass(frozen=True)
class _Point:
    step: float
    loss: float
    slope: float

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.slope)


Search = Generator[Ask, tuple[float, float], Outcome]


def strong_wolfe(loss: float, slope: float, first: float, *, narrowest: float = 1e-9, evaluations: int = 25) -> Search:
    """Search from φ(0) = `loss`, φ'(0) = `slope` < 0, beginning with step `first`. The generator yields at most
    `evaluations` `Ask`s and is sent (φ, φ') for each. It does not divide brackets narrower than `narrowest`.

    >>> search = strong_wolfe(1.0, -2.0, first=4.0)    # φ(t) = (1 - t)²
    >>> ask = next(search)
    >>> try:
    ...     while True:
    ...         ask = search.send(((1 - ask.step) ** 2, 2 * (ask.step - 1)))
    ... except StopIteration as end:
    ...     end.value
    Outcome(kind='found', step=1.0, evaluations=2)
    """
    start = _Point(0.0, loss, slope)
    before, step, spent = start, first, 0
    while True:
        if spent == evaluations:
            return _ended(start, before, spent)
        here = _Point(step, *(yield Ask(step, before.step)))
        spent += 1
        if not here.finite or not _decreases(start, here) or (spent > 1 and here.loss >= before.loss):
            return (yield from _zoom(start, before, here, narrowest, evaluations, spent))
        if abs(here.slope) <= -CURVATURE * slope:
            return Outcome("found", step, spent)
        if here.slope >= 0:
            return (yield from _zoom(start, here, before, narrowest, evaluations, spent))
        step = _interpolate(before, here, step + 0.01 * (step - before.step), step * _GROWTH)
        before = here


def _zoom(start: _Point, low: _Point, high: _Point, narrowest: float, evaluations: int, spent: int) -> Search:
    """Good steps lie between `low`, the lowest point that decreases enough, and `high`, towards which `low` slopes."""
    slow = False
    while spent < evaluations and abs(high.step - low.step) > narrowest:
        step, slow = _divide(low, high, slow)
        here = _Point(step, *(yield Ask(step, low.step)))
        spent += 1
        if not here.finite or not _decreases(start, here) or here.loss >= low.loss:
            high = here
            continue
        if abs(here.slope) <= -CURVATURE * start.slope:
            return Outcome("found", step, spent)
        if here.slope * (high.step - low.step) >= 0:
            high = low
        low = here
    return _ended(start, low, spent)


def _ended(start: _Point, low: _Point, spent: int) -> Outcome:
    return Outcome("best" if low is not start else "failed", low.step, spent)


def _decreases(start: _Point, here: _Point) -> bool:
    return here.loss <= start.loss + SUFFICIENT_DECREASE * here.step * start.slope


def _divide(low: _Point, high: _Point, slow: bool) -> tuple[float, bool]:
    """Returns (where to divide a bracket, whether that is close to one of its ends). `slow`: the last division was: a
    second one is not allowed, because the bracket would hardly shrink."""
    if not high.finite:
        share = _RETREAT if low.step == 0.0 else 0.5
        return low.step + share * (high.step - low.step), False
    left, right = min(low.step, high.step), max(low.step, high.step)
    step = _interpolate(low, high, left, right)
    margin = 0.1 * (right - left)
    if min(right - step, step - left) >= margin:
        return step, False
    if slow or step >= right or step <= left:
        return (right - margin if right - step < step - left else left + margin), False
    return step, True


def _interpolate(a: _Point, b: _Point, least: float, most: float) -> float:
    """The minimum of the cubic through two points with their slopes (Nocedal & Wright, formula 3.59), kept between
    `least` and `most`; their middle where the cubic has none."""
    a, b = (a, b) if a.step <= b.step else (b, a)
    width = b.step - a.step
    d1 = a.slope + b.slope - 3.0 * (a.loss - b.loss) / (a.step - b.step)
    square = d1 * d1 - a.slope * b.slope
    if not 0.0 <= square < math.inf:
        return (least + most) / 2.0
    d2 = math.sqrt(square)
    below = b.slope - a.slope + 2.0 * d2
    if below == 0.0:
        return most  # a straight line downwards: as far as is allowed
    return min(max(b.step - width * ((b.slope + d2 - d1) / below), least), most)
