"""L-BFGS by a driver that never sees a vector (`sandblaster`): the vectors live on servers, scalars come here.

The two-loop recursion only takes inner products of the steps s, the changes of the gradient y, and the gradient g. The
driver keeps all of these products; so a direction costs one `combine`, and the products that a new point adds come with
one `dot`, which also answers the line search. An iteration whose first step is good is

    combine direction · combine point · evaluate · combine change · dot

and waits twice: for the evaluation and for the products. A step s = t·d is not stored: the direction d is, and t here.

A `State` is a few numbers and the names of the vectors that they belong to. An iteration writes only to vectors that
its state does not name. So a driver may die between any two commands: the next one repeats the iteration from the last
state, with the same bits. In return a state must be saved before the next iteration begins.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from distbelief.errors import DistBeliefError, JobError
from distbelief.strategies.sandblaster.rules.linesearch import Outcome, strong_wolfe
from distbelief.strategies.sandblaster.vectors import Pair, Term, Vectors

Evaluate = Callable[[str, str], float]
"""Takes the name of a point and that of a vector for the gradient there; gives the loss."""

Ended = Literal["", "gradient", "change", "stuck"]

_POINTS = ("point.0", "point.1")
_GRADIENTS = ("gradient.0", "gradient.1", "gradient.2")
_STRAIGHT = 1e-10  # a pair is skipped when the cosine between step and change of gradient is smaller


class Settings(msgspec.Struct, frozen=True):
    """How to search. The names are those of torch.optim.LBFGS, and so are the meanings."""

    history_size: int = 10
    lr: float = 1.0
    tolerance_grad: float = 1e-7
    tolerance_change: float = 1e-9
    max_evaluations: int = 25
    """Of one line search."""

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
    """Where a driver is, between two iterations: all that another one needs to go on."""

    point: str
    gradient: str
    loss: float
    first_step: float
    """Of a search along the plain gradient."""
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
    """A point of the search, with the products that it would add to the history."""

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
    """This and the next three: of every pair of the history with the new gradient g and its change y."""
    yg: tuple[float, ...]
    sy: tuple[float, ...]
    yy: tuple[float, ...]
    dy: tuple[float, ...]
    """Of the new direction with every change of the history."""


def explain(ended: Ended) -> str:
    """Why a driver stopped, for people."""
    return {
        "": "the search goes on",
        "gradient": "the gradient is below tolerance_grad: this is a minimum",
        "change": "the last iteration changed less than tolerance_change: this is a minimum, or nearly one, unless the "
        "loss is so large that its own rounding hides the change",
        "stuck": "no step along the gradient lowers the loss: this is a minimum as far as its rounding errors show, "
        "or the loss is not a function of the parameters alone (dropout, random data)",
    }[ended]


def begin(vectors: Vectors, evaluate: Evaluate, point: str, settings: Settings) -> State:
    """Evaluate where the search begins. The vector `point` is read, never written."""
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
    """One iteration: a direction, a search along it, a new pair for the history. With `state.ended` it does nothing."""
    if state.ended:
        return state
    taken = {past.direction for past in state.past}  # also by a history that is forgotten below: a state names it
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
    """-H·g as a combination of the vectors at hand, and its product with g. H is the inverse Hessian that the history
    gives, beginning with the scalar s·y / y·y (Nocedal & Wright, algorithm 7.4, with products instead of vectors).

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
    """Search along the new direction. Gives the last trial and the one that is kept; their gradients exist."""
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
    """The history and its products with the new gradient; and the new pair, if its curvature s·y is positive."""
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
    """Forget the history: the next search goes along the gradient, and begins with a short step, as its scale is
    unknown."""
    [length] = vectors.sum_abs([state.gradient])
    first = min(1.0, 1.0 / length) * settings.lr if length > 0.0 else settings.lr
    return msgspec.structs.replace(state, past=(), sg=(), yg=(), sy=(), yy=(), first_step=first)


def _below(vectors: Vectors, name: str, square: float, factor: float, tolerance: float) -> bool:
    """Whether factor · max|v| ≤ tolerance. Nothing is asked where the norm, which is known, is already too large."""
    if factor * math.sqrt(square / max(vectors.size, 1)) > tolerance:
        return False
    return factor * vectors.max_abs([name])[0] <= tolerance


def _sum(coefficients: Sequence[float], values: Sequence[float]) -> float:
    """Plain left-to-right sums: builtin `sum` rounds differently from one version of Python to the next."""
    total = 0.0
    for coefficient, value in zip(coefficients, values, strict=True):
        total += coefficient * value
    return total
