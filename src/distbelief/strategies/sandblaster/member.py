"""A member of a `sandblaster` run: every member computes portions, and the member of rank 0 drives the search.

The vectors and the state of the search are on the servers. So a death costs no step: the driver of the next generation
goes on from the kept state, and the computed portions of the interrupted evaluation stay.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import torch

from distbelief.errors import DistBeliefError
from distbelief.shards import Schedule
from distbelief.steadyclock import CLOCK
from distbelief.strategies.base import Applied, Seat, StepResult, Takeover
from distbelief.strategies.base import Fetch as FetchBatch
from distbelief.strategies.flatmodel.compute import ShardComputer
from distbelief.strategies.flatmodel.namedtensors import whole_entries
from distbelief.strategies.flatmodel.tileoptimizer import Recipe
from distbelief.strategies.ps.protocol.frames import Framed
from distbelief.strategies.ps.protocol.messages import Inspect, Note, PartialSum, Question, SliceState
from distbelief.strategies.ps.rules.slicing import parameter_stretch
from distbelief.strategies.ps.tables.remote import RemoteTables
from distbelief.strategies.ps.worker.exchange import ServerExchange
from distbelief.strategies.ps.worker.member import AlreadyCopied, ParameterServerMember
from distbelief.strategies.sandblaster.evaluation import PortionSums, ShownValues
from distbelief.strategies.sandblaster.messages import (
    Begin,
    Computed,
    Heard,
    Keep,
    Portions,
    ReadVectors,
    SearchGiven,
    SearchKnown,
    Stepped,
    StepsDone,
    Take,
    Total,
    first_number,
)
from distbelief.strategies.sandblaster.rules.lbfgs import Settings, State, begin, explain, iterate
from distbelief.strategies.sandblaster.saved import START, STATE, VectorPortion, state_bytes, state_of, vectors_of
from distbelief.strategies.sandblaster.vectors import ServedVectors
from distbelief.transport.abort import Aborted
from distbelief.transport.shm.segment import Segment

TRIALS = 256
"""An upper bound of the evaluations in a step: evaluations are numbered by step and trial."""
SHORTEST_NAP_S = 0.001
LONGEST_NAP_S = 0.02


class SearchingMember(ParameterServerMember):
    """See `Replica`."""

    def __init__(
        self, computer: ShardComputer, recipe: Recipe, schedule: Schedule, seat: Seat, exchange: ServerExchange,
        fetch: FetchBatch, settings: Settings,
    ) -> None:  # fmt: skip
        super().__init__(computer, recipe, schedule, seat, exchange, fetch, RemoteTables([], [], range(0)))
        self._settings = settings
        self._search = len(self._slices)
        self._stretches = [parameter_stretch(computer.layout, shape)[1] for shape in self._slices]
        size, _ = parameter_stretch(computer.layout, self._slices[0])
        self._sums = PortionSums(computer, exchange, fetch, size, self._buffers)
        self._vectors = ServedVectors(self._client, len(self._slices), size, seat.generation, exchange.abort)
        self._shown = ShownValues(computer, exchange, self._slices, self._take)
        self._state: State | None = None
        self._trial = 0
        self.clock: Callable[[], float] = CLOCK.now
        self._lines = [
            f"L-BFGS over {schedule.samples} samples in {schedule.shards} portions, with "
            f"{settings.history_size} pairs of history; the job's optimizer is not used"
        ]
        self._join()

    @property
    def _drives(self) -> bool:
        return self.exchange.rank == 0

    def _join(self) -> None:
        """Take up the state of the servers at the beginning of a generation."""
        exchange, first = self.exchange, first_number(self._seat.generation)
        self._client.restart()
        self._check_slices(besides=1)
        exchange.gather(b"")  # every member has left the previous generation
        if self._drives:  # from now on messages of earlier drivers are void
            self._tell(Begin(self._seat.worker, first, exchange.size))
        exchange.gather(b"")
        found: list[SearchKnown] = []
        self._client.ask([partial(_look, self._search)], exchange.abort, lambda framed: found.append(framed.message))
        known = found[0]
        self._applied, self._note, self._state = known.steps, known.note, state_of(known.state)
        for done in known.past:
            self._remember(done)
        if self._drives:
            self._vectors.show(self._state.point if self._state else START)
        self._shown.insist(first)
        exchange.gather(b"")  # all members know the state before any goes on
        self._note_rollback()

    def taken_over(self) -> Takeover | None:
        return None

    def keep_note(self, content: bytes) -> None:
        self._note = (self._applied, content)
        if self._drives:
            self._client.change(self._search, Note(self._applied, content), self.exchange.abort)

    def plan_lines(self) -> Sequence[str]:
        lines, self._lines = self._lines, []
        return lines

    # --- a step ------------------------------------------------------------------------------------------------------

    def compute(self, step: int) -> None:
        self.exchange.begin(step)

    def commit(self, step: int) -> StepResult:
        started, before_s = time.perf_counter(), self._sums.spent_s
        stepped = self._drive(step) if self._drives else self._serve(step)
        self._state = state_of(stepped.state)
        self._shown.insist(stepped.number)
        self._applied = self._reached[0] = stepped.done.end
        self._remember(stepped.done)
        self.exchange.gather(b"")  # the next step shows another point: all have this one
        self.exchange.forget_past()
        self.comm_s += time.perf_counter() - started - (self._sums.spent_s - before_s)
        if self._state and self._state.ended:
            left = stepped.done.end - stepped.done.first - 1
            self._lines.append(
                f"L-BFGS has ended after {step + 1} iterations: {explain(self._state.ended)}"
                + (f"; the {left} steps that are left change nothing" if left else "")
            )
        *before, last = (StepResult(one.loss, one.samples, one.fingerprint) for one in self._applied_by(stepped.done))
        return replace(last, before=before)

    def _drive(self, step: int) -> Stepped:
        state, self._trial = self._state, 0
        evaluate = partial(self._evaluate, step)
        if state is None:
            state = begin(self._vectors, partial(self._evaluate_first, step), START, self._settings)
            self._keep(step, state, 0)
            self._vectors.drop([START])
        after = iterate(state, self._vectors, evaluate, self._settings)
        return self._keep(self._seat.steps if after.ended else step + 1, after, after.evaluations - state.evaluations)

    def _keep(self, steps: int, state: State, evaluations: int) -> Stepped:
        """End the step: keep a state from which any driver can go on, after all vectors that it names are safe."""
        self._vectors.show(state.point)
        self._vectors.settle()
        samples, now = evaluations * self._schedule.samples, self.clock()
        keep = Keep(self._seat.worker, self._vectors.number, steps, state_bytes(state), state.loss, samples, now)
        self._tell(keep)
        return Stepped(keep.number, keep.state, StepsDone(self._applied, steps, state.loss, samples, now))

    def _tell(self, content: Begin | Keep) -> None:
        """Send as the driver. A driver that was replaced stops here: the vector slices may not know that it was."""
        given = self._client.change(self._search, content, self.exchange.abort)
        assert isinstance(given, SearchGiven)
        if given.what != Heard(counts=True):
            raise Aborted("another member drives the search")

    def _evaluate_first(self, step: int, point: str, gradient: str) -> float:
        return self._evaluation(step, 0, point, gradient)

    def _evaluate(self, step: int, point: str, gradient: str) -> float:
        """Evaluate a trial. Its number names the same point for every driver that repeats the step."""
        self._trial += 1
        return self._evaluation(step, (step + 1) * TRIALS + self._trial, point, gradient)

    def _evaluation(self, step: int, evaluation: int, point: str, gradient: str) -> float:
        # The search slice learns of an evaluation before the vector slices, so a portion that it calls computed is on
        # all of them.
        self._tell(Begin(self._seat.worker, self._vectors.number + 1, self.exchange.size, evaluation))
        self._vectors.show(point, evaluation)
        total = self._work(step, evaluation)
        assert isinstance(total, Total)
        self._vectors.finish(evaluation, gradient, 1.0 / total.weight if total.weight else 0.0)
        return total.loss / total.weight if total.weight else 0.0

    def _serve(self, step: int) -> Stepped:
        done = self._work(step)
        assert isinstance(done, Stepped)
        return done

    def _work(self, step: int, until: int = -1) -> Total | Stepped:
        """Compute portions until the step is done, or until evaluation `until` is complete (driver)."""
        computed: Computed | None = None
        nap_s = SHORTEST_NAP_S
        while True:
            take = Take(self._seat.generation, self._seat.worker, step, self.clock(), computed)
            given = self._client.change(self._search, take, self.exchange.abort)
            assert isinstance(given, SearchGiven)
            computed = None
            match given.what:
                case Portions():
                    computed = self._compute(step, given.what)
                    nap_s = SHORTEST_NAP_S
                case Stepped():
                    return given.what
                case Total(evaluation=evaluation) if evaluation == until:
                    return given.what
                case _:
                    self._client.nap(nap_s)
                    nap_s = min(2 * nap_s, LONGEST_NAP_S)

    def _compute(self, step: int, portions: Portions) -> Computed | None:
        """Compute a node and push its sum to all slices. None: the evaluation was completed without it."""
        if not self._shown.bring(portions.number):
            return None
        losses = self._sums.compute(step, portions.node, self._shown.are_over)
        if losses is None:
            return None
        slot, name = self.exchange.slot(0)
        content = PartialSum(portions.evaluation, *portions.node, b"", b"", b"", name)
        for shape, (first, end) in zip(self._slices, self._stretches, strict=True):
            if first < end:
                payload = None if name else slot.view(shape.first_byte, shape.value_bytes)
                self._client.push(shape.number, content, payload)
        self._client.settle(self.exchange.abort)  # before the slot is written again
        return Computed(portions.evaluation, portions.node, losses)

    # --- results and checkpoints -------------------------------------------------------------------------------------

    def _remember(self, done: StepsDone) -> None:
        self._past.extend(one for one in self._applied_by(done) if not self._past or self._past[-1].step < one.step)

    def _applied_by(self, done: StepsDone) -> Iterator[Applied]:
        for step in range(done.first, done.end):
            samples = done.samples if step == done.first else 0
            told = hashlib.blake2b(f"{step} {done.loss!r} {samples}".encode(), digest_size=8).hexdigest()
            yield Applied(step, done.loss, samples, told, self._seat.generation, done.at)

    def portions(self) -> Sequence[VectorPortion]:
        """Each member saves a share of the slices, with the vectors that the state names."""
        size, vectors = self.exchange.size, vectors_of(self._state)
        outside = whole_entries(self._outside())
        return [
            VectorPortion(self._computer.layout, self._slices[rank::size], vectors, outside if rank == 0 else [])
            for rank in range(size)
        ]

    def _outside(self) -> dict[str, torch.Tensor]:
        state = bytearray(state_bytes(self._state))
        return {**super()._outside(), **({STATE: torch.frombuffer(state, dtype=torch.uint8)} if state else {})}

    def copy_portion(self, applied: int, into: Segment) -> AlreadyCopied:
        """The copy is consistent: the next step writes to no vector that this state names, and cannot end before this
        member takes part in it."""
        started, rank, size = time.perf_counter(), self.exchange.rank, self.exchange.size
        portion, shapes, vectors = self.portions()[rank], self._slices[rank::size], vectors_of(self._state)
        for shape in shapes:
            values = self._values.tensor(torch.uint8, shape.first_byte, shape.value_bytes)
            into.tensor(torch.uint8, portion.starts[shape.number], shape.value_bytes).copy_(values)

        def read(framed: Framed) -> None:
            message: SliceState = framed.message
            shape = self._slices[message.slice]
            size_bytes = len(vectors) * portion.vector_bytes(shape)
            if len(framed.payload) != size_bytes:
                raise DistBeliefError(f"slice {shape.number} gave {len(framed.payload)} bytes, not {size_bytes}")
            at = portion.starts[shape.number] + shape.value_bytes
            into.tensor(torch.uint8, at, size_bytes).copy_(torch.frombuffer(framed.payload, dtype=torch.uint8))

        self._whole.restore()
        wanted = [shape.number for shape in shapes if vectors and portion.vector_bytes(shape)]
        questions = [partial(_read, number, self._shown.number, vectors) for number in wanted]
        self._client.ask(questions, self.exchange.abort, read)
        return AlreadyCopied(self._outside() if rank == 0 else {}, time.perf_counter() - started)


def _look(number: int, ticket: int) -> Question:
    return Inspect(ticket, number)


def _read(number: int, after: int, names: list[str], ticket: int) -> Question:
    return ReadVectors(ticket, number, after, names)
