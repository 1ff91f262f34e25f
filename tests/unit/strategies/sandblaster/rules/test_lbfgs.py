"""L-BFGS over vectors in slices: torch's iterates, the same bits for any cuts and after any death of the driver."""

from __future__ import annotations

import doctest
import itertools
import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import torch

from distbelief.errors import DistBeliefError, JobError
from distbelief.strategies.sandblaster.rules import lbfgs as module
from distbelief.strategies.sandblaster.rules.lbfgs import Settings, State, begin, direction, explain, iterate
from distbelief.strategies.sandblaster.vectors import BLOCK, JoinedVectors, SlicedVectors

Loss = Callable[[torch.Tensor], torch.Tensor]

PATIENT = Settings(tolerance_grad=1e-10, tolerance_change=0.0)


class Died(Exception):
    """The driver's own death, in the middle of an iteration."""


class Cluster:
    """Servers that hold slices, and workers that evaluate. It counts commands, and kills the driver at one of them."""

    def __init__(self, loss: Loss, start: torch.Tensor, servers: int = 1) -> None:
        blocks = -(-len(start) // BLOCK)
        edges = sorted({min(blocks * k // servers * BLOCK, len(start)) for k in range(servers)} | {len(start)})
        self.slices = list(itertools.pairwise(edges))
        self.parts = [SlicedVectors(len(start), [where], start.dtype) for where in self.slices]
        self._joined = JoinedVectors(len(start), self.parts)
        self._loss = loss
        self.commands: Counter[str] = Counter()
        self.evaluated: list[torch.Tensor] = []
        self.dies_at = math.inf
        self.write("parameters", start)

    @property
    def size(self) -> int:
        return self._joined.size

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def perform(*arguments: Any) -> Any:
            self._count(name)
            return getattr(self._joined, name)(*arguments)

        return perform

    def _count(self, name: str) -> None:
        if self.commands.total() >= self.dies_at:
            raise Died
        self.commands[name] += 1

    def evaluate(self, point: str, gradient: str) -> float:
        self._count("evaluate")
        x = self.read(point).requires_grad_()
        self.evaluated.append(x.detach().clone())
        loss = self._loss(x)
        loss.backward()
        assert x.grad is not None
        self.write(gradient, x.grad)
        return loss.item()

    def read(self, name: str) -> torch.Tensor:
        return torch.cat([part.tensor(name, w) for part, w in zip(self.parts, self.slices, strict=True)])

    def write(self, name: str, value: torch.Tensor) -> None:
        for part, (first, end) in zip(self.parts, self.slices, strict=True):
            part.tensor(name, (first, end)).copy_(value[first:end])


def train(cluster: Cluster, settings: Settings, iterations: int) -> list[State]:
    states = [begin(cluster, cluster.evaluate, "parameters", settings)]
    while not states[-1].ended and len(states) <= iterations:
        states.append(iterate(states[-1], cluster, cluster.evaluate, settings))
    return states


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def quadratic(x: torch.Tensor) -> torch.Tensor:
    scales = torch.logspace(0, 2, len(x), dtype=x.dtype)
    return 0.5 * (scales * (x - 1) ** 2).sum()


def rosenbrock(x: torch.Tensor) -> torch.Tensor:
    return (100 * (x[1:] - x[:-1] ** 2) ** 2 + (1 - x[:-1]) ** 2).sum()


def logistic(x: torch.Tensor) -> torch.Tensor:
    data, noise = normal(200, 150, seed=1), normal(200, seed=2)
    labels = (data @ normal(150, seed=3) + noise > 0).to(x.dtype)
    scores = data.to(x.dtype) @ x
    return torch.nn.functional.binary_cross_entropy_with_logits(scores, labels) + 0.005 * x.square().sum()


def perceptron(x: torch.Tensor) -> torch.Tensor:
    data = normal(100, 6, seed=4).to(x.dtype)
    target = torch.sin(data.sum(1)) + data[:, 0] * data[:, 1]
    hidden = torch.tanh(data @ x[:120].view(6, 20) + x[120:140])
    return (hidden @ x[140:160] + x[160] - target).square().mean()


PROBLEMS: dict[str, tuple[Loss, torch.Tensor]] = {
    "quadratic": (quadratic, normal(300)),
    "rosenbrock": (rosenbrock, torch.tensor([-1.2, 1.0] * 40, dtype=torch.float64)),
    "logistic": (logistic, torch.zeros(150, dtype=torch.float64)),
    "perceptron": (perceptron, 0.3 * normal(161)),
}
every_problem = pytest.mark.parametrize("problem", PROBLEMS)


def torch_lbfgs(loss: Loss, start: torch.Tensor, settings: Settings, iterations: int) -> list[torch.Tensor]:
    """The points that torch evaluates, and the one where it ends."""
    x = start.clone().requires_grad_()
    optimizer = torch.optim.LBFGS(
        [x],
        lr=settings.lr,
        max_iter=iterations,
        max_eval=100_000,
        history_size=settings.history_size,
        tolerance_grad=settings.tolerance_grad,
        tolerance_change=settings.tolerance_change,
        line_search_fn="strong_wolfe",
    )
    points: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        points.append(x.detach().clone())
        value = loss(x)
        value.backward()
        return value

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    return [*points, x.detach().clone()]


@every_problem
@pytest.mark.parametrize("history_size", [1, 4, 10])
def test_the_points_are_those_of_torch(problem: str, history_size: int) -> None:
    loss, start = PROBLEMS[problem]
    settings = msgspec.structs.replace(PATIENT, history_size=history_size)
    theirs = torch_lbfgs(loss, start, settings, 12)
    cluster = Cluster(loss, start, servers=2)
    last = train(cluster, settings, 12)[-1]
    assert len(cluster.evaluated) == len(theirs) - 1 == last.evaluations
    for mine, other in zip([*cluster.evaluated, cluster.read(last.point)], theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-6, atol=1e-8)


@every_problem
def test_the_minimum_is_that_of_torch(problem: str) -> None:
    loss, start = PROBLEMS[problem]
    settings = Settings(tolerance_grad=1e-8, tolerance_change=0.0)
    iterations = 3000 if problem != "perceptron" else 300
    [*_, theirs] = torch_lbfgs(loss, start, settings, iterations)
    cluster = Cluster(loss, start, servers=2)
    last = train(cluster, settings, iterations)[-1]
    mine = cluster.read(last.point)
    assert last.loss == loss(mine).item()
    if problem == "perceptron":  # no convex function: roundings lead to other valleys after hundreds of iterations
        assert last.loss <= 1.5 * loss(theirs).item() + 1e-6
    else:
        assert last.ended == "gradient"
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


@every_problem
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_bit_depends_on_the_servers(problem: str, dtype: torch.dtype) -> None:
    loss, start = PROBLEMS[problem]
    found = []
    for servers in (1, 2, 5):
        cluster = Cluster(loss, start.to(dtype), servers)
        states = train(cluster, Settings(history_size=4), 25)
        found.append((states, cluster.read(states[-1].point)))
    for states, point in found[1:]:
        assert states == found[0][0]
        assert torch.equal(point, found[0][1])


@every_problem
def test_a_driver_may_die_between_any_two_commands(problem: str) -> None:
    loss, start = PROBLEMS[problem]
    settings = Settings(history_size=2)
    undisturbed = Cluster(loss, start)
    expected = train(undisturbed, settings, 9)
    cluster = Cluster(loss, start)
    states, deaths = [begin(cluster, cluster.evaluate, "parameters", settings)], 0
    for _ in range(9):
        saved = msgspec.msgpack.encode(states[-1])
        for lived in itertools.count():  # each driver gets one command further than the one before
            cluster.dies_at = cluster.commands.total() + lived
            try:
                state = msgspec.msgpack.decode(saved, type=State)
                states.append(iterate(state, cluster, cluster.evaluate, settings))
                break
            except Died:
                deaths += 1
    assert deaths >= 9 * 5
    assert states == expected
    assert torch.equal(cluster.read(states[-1].point), undisturbed.read(expected[-1].point))


def test_an_iteration_whose_first_step_is_good_is_five_commands() -> None:
    loss, start = PROBLEMS["logistic"]
    cluster = Cluster(loss, start)
    state = begin(cluster, cluster.evaluate, "parameters", PATIENT)
    assert cluster.commands == {"copy": 1, "evaluate": 1, "dot": 1, "sum_abs": 1}
    ordinary = 0
    for _ in range(20):
        before, evaluations = cluster.commands.copy(), state.evaluations
        state = iterate(state, cluster, cluster.evaluate, PATIENT)
        trials = state.evaluations - evaluations
        spent = cluster.commands - before
        assert spent["evaluate"] == spent["dot"] == trials
        if trials == 1:
            ordinary += 1
            assert spent == {"combine": 3, "evaluate": 1, "dot": 1}
    assert ordinary >= 15


def test_a_step_that_is_not_the_last_trial_keeps_its_gradient() -> None:
    """The search ends with its best point so far, after another one was tried: everything must belong to the best."""

    def loss(x: torch.Tensor) -> torch.Tensor:  # falls towards a cliff with nothing behind it
        return torch.where(x.sum() < 0.7, -x.sum() + 0.01 * x.square().sum(), math.nan)

    cluster = Cluster(loss, torch.zeros(100, dtype=torch.float64), servers=2)
    settings = Settings(max_evaluations=6)
    first = begin(cluster, cluster.evaluate, "parameters", settings)
    state = iterate(first, cluster, cluster.evaluate, settings)
    while torch.equal(cluster.evaluated[-1], cluster.read(state.point)):
        assert state.iteration < 20
        first, state = state, iterate(state, cluster, cluster.evaluate, settings)
    assert state.loss < first.loss
    x = cluster.read(state.point).requires_grad_()
    value = loss(x)
    value.backward()
    assert value.item() == state.loss
    assert x.grad is not None
    assert torch.equal(cluster.read(state.gradient), x.grad)
    assert products(cluster, state) == pytest.approx(known(state), rel=1e-12, abs=1e-300)


def products(cluster: Cluster, state: State) -> list[float]:
    """The products that a state says it has, computed anew."""
    g = cluster.read(state.gradient)
    s = [past.step * cluster.read(past.direction) for past in state.past]
    y = [cluster.read(past.change) for past in state.past]
    pairs = [(g, g), *((a, g) for a in s), *((b, g) for b in y), *itertools.product(s, y), *itertools.product(y, y)]
    return [float(a @ b) for a, b in pairs]


def known(state: State) -> list[float]:
    return [state.gg, *state.sg, *state.yg, *itertools.chain(*state.sy), *itertools.chain(*state.yy)]


@every_problem
def test_a_state_knows_the_products_of_its_vectors(problem: str) -> None:
    loss, start = PROBLEMS[problem]
    cluster, settings = Cluster(loss, start), Settings(history_size=3)
    state = begin(cluster, cluster.evaluate, "parameters", settings)
    for _ in range(8):
        state = iterate(state, cluster, cluster.evaluate, settings)
        assert products(cluster, state) == pytest.approx(known(state), rel=1e-6, abs=1e-12)
    assert len(state.past) == 3


@every_problem
def test_a_direction_is_that_of_the_inverse_hessian_written_out(problem: str) -> None:
    """The BFGS update of a matrix, pair by pair (Nocedal & Wright, formula 6.17), beginning with (s·y / y·y)·1."""
    loss, start = PROBLEMS[problem]
    cluster, settings = Cluster(loss, start), Settings(history_size=5)
    state = train(cluster, settings, 8)[-1]
    identity = torch.eye(len(start), dtype=torch.float64)
    inverse = identity * (state.sy[-1][-1] / state.yy[-1][-1])
    for past in state.past:
        s, y = past.step * cluster.read(past.direction), cluster.read(past.change)
        v = identity - torch.outer(y, s) / (s @ y)
        inverse = v.T @ inverse @ v + torch.outer(s, s) / (s @ y)
    g = cluster.read(state.gradient)
    terms, slope = direction(state)
    mine = sum(coefficient * cluster.read(name) for coefficient, name in terms)
    assert isinstance(mine, torch.Tensor)
    assert float((mine + inverse @ g).norm() / mine.norm()) < 1e-8
    assert slope == pytest.approx(float(g @ mine), rel=1e-8)


def bent(x: torch.Tensor) -> torch.Tensor:
    """Concave at the start, bounded below: the first pairs have no positive curvature, or hardly."""
    return -torch.exp(-(x - 1.5).square().mean() / 0.1) + 1e-3 * x.square().mean()


def logarithm(x: torch.Tensor) -> torch.Tensor:
    """NaN for most points: every wild step lands there."""
    return (x - torch.log(x)).mean() + 10 * (x * torch.linspace(0, 1, len(x), dtype=x.dtype)).mean()


@pytest.mark.parametrize(
    ("loss", "start"),
    [(bent, 0.8), (bent, 1.1), (logarithm, 1e-3), (logarithm, 5.0), (rosenbrock, 30.0), (rosenbrock, -1e3)],
)
def test_nasty_functions_still_come_to_an_end(loss: Loss, start: float) -> None:
    cluster = Cluster(loss, torch.full((70,), start, dtype=torch.float64), servers=2)
    states = train(cluster, Settings(), 300)
    assert states[-1].ended in ("gradient", "change")
    assert all(later.loss <= sooner.loss for sooner, later in itertools.pairwise(states))
    assert float(cluster.read(states[-1].gradient).abs().max()) < 1e-3


def test_a_function_without_lower_bound_goes_down_for_as_long_as_it_may() -> None:
    cluster = Cluster(lambda x: -x.sum(), torch.zeros(70, dtype=torch.float64))
    states = train(cluster, Settings(), 10)
    assert states[1].loss < -1e20
    assert all(later.loss <= sooner.loss for sooner, later in itertools.pairwise(states))
    assert all(not state.past for state in states)  # no pair has curvature
    assert all(math.isfinite(state.loss) for state in states)


def test_without_a_history_the_first_step_is_that_of_the_gradient_at_hand() -> None:
    cluster = Cluster(lambda x: -x.square().sum(), torch.ones(70, dtype=torch.float64))
    settings = Settings(max_evaluations=3)
    state = begin(cluster, cluster.evaluate, "parameters", settings)
    for _ in range(3):
        state = iterate(state, cluster, cluster.evaluate, settings)
        assert state.past == ()  # negative curvature everywhere
        assert state.first_step == pytest.approx(1.0 / float(cluster.read(state.gradient).abs().sum()))


def test_a_flat_function_ends_before_it_begins() -> None:
    cluster = Cluster(lambda x: 0.0 * x.sum() + 3.0, torch.ones(70, dtype=torch.float64))
    [state] = train(cluster, Settings(), 10)
    assert (state.ended, state.loss, state.evaluations) == ("gradient", 3.0, 1)
    assert iterate(state, cluster, cluster.evaluate, Settings()) is state


def test_a_loss_that_contradicts_its_gradient_is_stuck_and_says_why() -> None:
    class Wrong(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.sum()

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return -torch.ones(70, dtype=torch.float64)

    cluster = Cluster(Wrong.apply, torch.ones(70, dtype=torch.float64))
    states = train(cluster, Settings(), 10)
    assert states[-1].ended == "stuck"
    assert torch.equal(cluster.read(states[-1].point), torch.ones(70, dtype=torch.float64))
    assert "dropout" in explain("stuck")


def test_a_history_that_gives_no_descent_is_forgotten() -> None:
    """Products that contradict each other, as rounding makes them: the iteration goes along the gradient, and leaves
    alone the vectors of the state it began with, to which a new driver may have to go back."""
    loss, start = PROBLEMS["rosenbrock"]
    cluster, settings = Cluster(loss, start), Settings(history_size=3)
    good = train(cluster, settings, 6)[-1]
    bad = msgspec.structs.replace(good, sy=tuple(tuple(-v for v in row) for row in good.sy))
    assert not direction(bad)[1] < 0
    before = {name: cluster.read(name) for past in bad.past for name in (past.direction, past.change)}
    state = iterate(bad, cluster, cluster.evaluate, settings)
    assert len(state.past) == 1
    assert state.loss < bad.loss
    assert all(torch.equal(cluster.read(name), value) for name, value in before.items())


def test_a_search_that_fails_forgets_the_history_and_goes_on() -> None:
    loss, start = PROBLEMS["rosenbrock"]
    cluster, settings = Cluster(loss, start), Settings(history_size=3)
    good = train(cluster, settings, 6)[-1]
    impossible = msgspec.structs.replace(good, loss=good.loss - 1e9)  # no step can go below that
    state = iterate(impossible, cluster, cluster.evaluate, settings)
    assert (state.past, state.point, state.ended) == ((), good.point, "")
    assert iterate(state, cluster, cluster.evaluate, settings).ended == "stuck"


def test_the_tolerances_are_those_of_torch() -> None:
    for name in ("quadratic", "logistic"):
        loss, start = PROBLEMS[name]
        for settings in (Settings(tolerance_grad=1e-2, tolerance_change=0), Settings(tolerance_change=1e-3)):
            *points, theirs = torch_lbfgs(loss, start, settings, 200)
            cluster = Cluster(loss, start)
            last = train(cluster, settings, 200)[-1]
            assert last.ended == ("change" if settings.tolerance_change else "gradient"), name
            assert last.evaluations == pytest.approx(len(points), rel=0.1, abs=2), name
            torch.testing.assert_close(cluster.read(last.point), theirs, rtol=0.1, atol=0.1)


def test_the_first_point_is_left_alone() -> None:
    loss, start = PROBLEMS["quadratic"]
    cluster = Cluster(loss, start, servers=2)
    train(cluster, Settings(history_size=3), 9)
    assert torch.equal(cluster.read("parameters"), start)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_start_without_a_loss_is_refused(bad: float) -> None:
    cluster = Cluster(lambda x: x.sum() * bad, torch.ones(70, dtype=torch.float64))
    with pytest.raises(DistBeliefError, match="the loss at the first point is"):
        begin(cluster, cluster.evaluate, "parameters", Settings())


@pytest.mark.parametrize("wrong", [{"history_size": 0}, {"lr": 0.0}, {"lr": math.nan}, {"max_evaluations": 0}])
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(JobError, match="cannot work with"):
        Settings(**wrong)


def test_states_travel_as_text_too() -> None:
    loss, start = PROBLEMS["perceptron"]
    states = train(Cluster(loss, start), Settings(), 15)
    assert [msgspec.json.decode(msgspec.json.encode(state), type=State) for state in states] == states


def test_examples_run() -> None:
    assert doctest.testmod(module).failed == 0
