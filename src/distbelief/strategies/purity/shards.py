"""Computes the canary's shard several times, after other shards, and compares the results and what they leave behind.

    A, B, A, A      A: the canary's shard. B: another shard, at slightly other weights.

Buffers are restored before each shard, as they are in training; nothing else is. So A must have the same result each
time, and the parameters must keep their bytes. B is computed at other weights because a teacher that follows the
weights does not move while both are equal. The third A follows an A: state with a period of two calls differs there.

If the results differ, experiments find the cause: A is computed again with hidden state put back. If they are equal,
and numbers count the calls, A is computed again with these counters moved.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from distbelief.shards import shard_seed
from distbelief.strategies.base import Fetch
from distbelief.strategies.flatmodel.compute import Rehearsal, ShardComputer
from distbelief.strategies.purity import Checked, Impurity
from distbelief.strategies.purity.calls import Counter, acting_later, counters
from distbelief.strategies.purity.hidden import Place, changes, checksum, snapshot
from distbelief.strategies.purity.rules.findings import Hidden, Written, hidden, unexplained, written

CANARY = (0, 0, 1)
"""Step, first shard, end shard of A: what the canary computes."""
OTHER = (1, 0, 1)
"""Step, first shard, end shard of B. A batch of another step has other samples even if a step has one shard."""
MOST_EXPERIMENTS = 12
NUDGE = 1.125

Rehearse = Callable[[Any, int], Rehearsal]
Outcome = tuple[tuple[Any, ...], dict[str, int]]
Mark = tuple[int, int, int]
"""Identity, address and version of a parameter. An in-place write raises the version, unless it is through `.data`."""


def check_purity(computer: ShardComputer, rehearse: Rehearse, fetch: Fetch) -> Checked:
    """`rehearse(batch, samples)`: compute the canary's shard. Before training; the model keeps its values."""
    check = _Check(computer, rehearse, fetch)
    return Checked(check.fingerprint, check.impurities())


class _Check:
    def __init__(self, computer: ShardComputer, rehearse: Rehearse, fetch: Fetch) -> None:
        self._computer = computer
        self._rehearse = rehearse
        self._fetch = fetch
        self._buffers = {name for name, _ in computer.model.named_buffers()}
        self._hidden = self._snapshot()
        self._marks = self._present_marks()
        self._bytes = {name: checksum(one) for name, one in computer.model.named_parameters()}
        first = rehearse(*fetch(*CANARY))
        self.fingerprint = first.fingerprint()
        self._outcome = _outcome(first)
        self._touched = first.result.touched

    def impurities(self) -> list[Impurity]:
        names = self._marked()
        again = self._outcome
        late: list[Hidden] = []
        if not names:  # else the rest would say no more
            self._compute_other()
            again = self._again()
            if again == self._outcome:
                before = self._snapshot()
                again = self._again()
                if again == self._outcome and not self._marked():
                    late = self._late(counters(before, self._snapshot()))
            names = self._marked() | self._rewritten()
        if names or late:
            return self._all_written(names) + hidden(late)
        return [] if again == self._outcome else self._causes(again)

    # --- A and B -------------------------------------------------------------------------------------------------

    def _again(self) -> Outcome:
        return _outcome(self._rehearse(*self._fetch(*CANARY)))

    def _compute_other(self) -> None:
        # another shape of a batch would be compiled anew
        batch = CANARY if self._computer.job.compile else OTHER
        seed = shard_seed(self._computer.job.seed, 1, 0)
        try:
            with _nudged(self._computer.parameters):
                self._computer.rehearse(*self._fetch(*batch), seed)
        except Exception:  # perhaps the job's code does not take such weights
            self._computer.rehearse(*self._fetch(*batch), seed)

    # --- parameters ----------------------------------------------------------------------------------------------

    def _all_written(self, names: set[str]) -> list[Impurity]:
        return written([self._written(name) for name in {**self._marks, **self._parameters()} if name in names])

    def _parameters(self) -> dict[str, nn.Parameter]:
        return dict(self._computer.model.named_parameters())

    def _present_marks(self) -> dict[str, Mark]:
        return {name: _mark(one) for name, one in self._parameters().items()}

    def _marked(self) -> set[str]:
        """The parameters that were replaced, made, removed, or written in place."""
        marks = self._present_marks()
        return {name for name in self._marks | marks if self._marks.get(name) != marks.get(name)}

    def _rewritten(self) -> set[str]:
        """The parameters with other bytes than before."""
        return {name for name, one in self._parameters().items() if self._bytes.get(name) != checksum(one)}

    def _written(self, name: str) -> Written:
        layer = self._computer.model.get_submodule(name.rpartition(".")[0])
        limit = layer.max_norm if isinstance(layer, nn.Embedding | nn.EmbeddingBag) else None
        entries = self._computer.layout.entries
        place = next((i for i, one in enumerate(entries) if one.name == name), None)
        learns = place is not None and bool(self._touched[place])
        return Written(name, learns, limit, name not in self._marks, name not in self._parameters())

    # --- counters ------------------------------------------------------------------------------------------------

    def _late(self, found: Sequence[Counter]) -> list[Hidden]:
        """The counters with whose other values A has another result, or writes parameters."""

        def outcome() -> Any:
            before = self._marked()
            marks = self._present_marks()
            again = self._again()
            if marks != self._present_marks():
                return "writes"
            return self._outcome if before else again  # after a write A has another result anyway

        return acting_later(found[:MOST_EXPERIMENTS], outcome, self._outcome)

    # --- hidden state --------------------------------------------------------------------------------------------

    def _snapshot(self) -> dict[str, Place]:
        return snapshot(self._computer.model, self._computer.job.loss, self._buffers)

    def _causes(self, again: Outcome) -> list[Impurity]:
        changed = changes(self._hidden, self._snapshot())
        found = self._proven(changed)
        if found:
            return hidden(found)
        differing = [name for name, one in self._outcome[1].items() if again[1].get(name) != one]
        gradients = [name for name in differing if name not in self._buffers]
        suspects = [one.name for _, one in changed if one.kind != "tensor"]
        return [unexplained(gradients, [name for name in differing if name in self._buffers], suspects)]

    def _proven(self, changed: Sequence[tuple[Place, Hidden]]) -> list[Hidden]:
        """The state without whose restoration A has another result, although everything else is put back."""
        places = [place for place, _ in changed]
        if not changed or not self._is_same_with(places):
            return []
        some = changed[:MOST_EXPERIMENTS]
        found = [one for place, one in some if not self._is_same_with([p for p in places if p is not place])]
        if not found:  # two of them say the same: each alone is enough
            found = [one for place, one in some if self._is_same_with([place])][:1]
        for place in places:
            place.put_back()
        return found

    def _is_same_with(self, places: Sequence[Place]) -> bool:
        try:
            for place in places:
                place.put_back()
            return self._again() == self._outcome
        except Exception:  # perhaps the job's code does not take a part of its old state
            return False


def _mark(parameter: nn.Parameter) -> Mark:
    return id(parameter), parameter.data_ptr(), -1 if parameter.is_inference() else parameter._version


def _outcome(rehearsal: Rehearsal) -> Outcome:
    result = rehearsal.result
    numbers = repr(result.loss_sum), repr(result.weight), result.integers, result.touched.tobytes()
    return numbers, rehearsal.checksums()


@contextlib.contextmanager
def _nudged(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Change the first row of each parameter, and give it back. (Copies of all rows would take much memory.)"""
    rows = [one.data[:1] if one.dim() else one.data for one in parameters]
    before = [row.clone() for row in rows]
    try:
        torch._foreach_mul_(rows, NUDGE)
        yield
    finally:
        for row, value in zip(rows, before, strict=True):
            row.copy_(value)
