"""Rechecks on a member: in some steps other members compute shards again, and all compare checksums of the gradients.

A recheck happens after the member has computed its shards and before it publishes any partial sum. So other members
have read nothing that a recheck may reject, a step whose shards differ is never certain, and partial sums that a later
generation takes over were rechecked before.

1. The owner of a shard takes the checksum of its slot as soon as the shard is computed (`computed`), before siblings
   are added. The shard's row (loss, weight, samples) and its untouched marks count too.
2. The checker computes the shard into memory of its own. All members exchange their checksums (`Group.gather`).
3. On a difference the owner computes all of its shards again, the checker computes the shard again, and a third member
   computes it too. All members come to the same verdict (rules/rechecks.py): the owner's new gradients are used, with a
   notice, or ResultsDiffer is raised.

What is covered: everything that leads to a shard's gradients, from the samples to the slot. With `--recheck all` the
checker also adds up the shards, as the owner does, and the checksums of the partial sums are compared too. The addition
of all members' partial sums and the optimizer are covered by dataparallel/witness.py (one host) and
dataparallel/checkedreplica.py (gloo).
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import msgspec
import torch

from distbelief.errors import ResultsDiffer
from distbelief.shards import Range
from distbelief.strategies.base import Seat
from distbelief.strategies.flatmodel.compute import ShardComputer
from distbelief.strategies.flatmodel.rules.rechecks import (
    Dispute,
    Results,
    choose_shift,
    judge_results,
    last_good,
    next_recheck,
    rechecked,
    shifts,
    shortened,
    third_member,
    without_memory,
)
from distbelief.strategies.flatmodel.rules.stepwork import Partials, ShardWork, StepWork
from distbelief.transport.device.accelerator import memory_on
from distbelief.transport.exchange import TRANSFER_BYTES, tile_views
from distbelief.transport.shm.memfd import free_memory_bytes, require_memory
from distbelief.transport.shm.segment import Memory

IF_AGAIN = "`distbelief resume RUN` goes on from the newest checkpoint; if it happens again, replace the machine"
"""The hint where a difference passes with the step that shows it."""
_THIRD = -1
"""The spare for shards that this member computes as a third member."""


class _Found(msgspec.Struct):
    """What one member tells all others: checksums by shard."""

    owned: dict[int, int] = {}
    checked: dict[int, int] = {}
    third: int = -1
    owned_sums: dict[int, int] = {}
    """By the first shard of the partial sum."""
    checked_sums: dict[int, int] = {}
    owned_parts: list[int] = []
    """Of the disputed shard or partial sum, on its owner: a checksum of each entry of the layout."""
    checked_parts: list[int] = []
    """The same, on its checker."""


Compute = Callable[[int, int, Memory], bytes]
"""(step, shard, memory) -> what comes with the gradients of the shard, which is computed into that memory."""
Slot = Callable[[int], Memory]
"""A slot of this member -> its memory."""


class Recheck:
    """A member's rechecks in one generation. `due` is the next step that has one; -1: none."""

    def __init__(
        self, computer: ShardComputer, seat: Seat, first: int, gather: Callable[[bytes], list[bytes]], slot: Slot,
        compute: Compute,
    ) -> None:  # fmt: skip
        """`first`: the first step of the generation."""
        self._seed = computer.job.seed
        self.due = next_recheck(self._seed, first, seat.recheck)
        self._layout = computer.layout
        self._device = computer.device
        self._seat = seat
        self._gather = gather
        self._slot = slot
        self._compute = compute
        self._hosts: Sequence[str] = seat.hosts or [""] * len(seat.ranges)
        self._shifts = shifts(self._hosts)
        self._work = StepWork(Partials((), {}), [], [], 0)
        """Of the present step."""
        self._spares: dict[int, Memory | None] = {}
        self._owners: dict[int, int] = {}
        """The rechecked shards of the present step -> the ranks that compute them."""
        self._slots: dict[int, int] = {}
        self._others: dict[int, int] = {}
        self._disputed = -1
        self._parts: list[int] = []
        self._compared: dict[int, int] = {}
        """By the first shard: the checksums of this member's partial sums, when they were compared."""
        self._compared_again: dict[int, int] = {}
        """The same, of the partial sums that this member has checked."""
        self._agreed: deque[int] = deque([-1, -1], maxlen=2)
        """The last steps of which this generation has computed every rechecked shard twice, with equal results."""
        self._is_whole = False
        """Whether this generation computes every rechecked shard of the present step."""
        self._lacks_memory = False
        """Whether a member checks no shards; reported once."""

    def _spare(self, slot: int) -> Memory | None:
        """Memory for what another member has in that slot, which the first recheck allocates. None: there is none, and
        this member checks no shards; if all shards are to be rechecked, that is an error."""
        if slot not in self._spares:
            self._spares[slot] = self._allocated()
        return self._spares[slot]

    def _allocated(self) -> Memory | None:
        if self._device.type == "cpu":
            if self._seat.recheck.whole:
                require_memory("rechecks", self._layout.size_bytes)
            elif self._layout.size_bytes > free_memory_bytes():
                return None
        try:
            return memory_on(self._device, self._layout.size_bytes)
        except torch.OutOfMemoryError:
            if self._seat.recheck.whole:
                raise
            return None

    def shift(self, step: int) -> int:
        """The checker of a member's shards is the member whose rank is greater by this number."""
        return choose_shift(self._seed, step, self._shifts)

    def second_sums(self) -> dict[int, Memory]:
        """With all shards rechecked: the partial sums of this step that this member has checked, by the slot in which
        their owner has them. They stay until the next step's recheck."""
        return {slot: memory for slot, memory in self._spares.items() if memory and slot != _THIRD}

    def changed_sums(self) -> list[Range]:
        """With all shards rechecked: this member's partial sums whose bytes have changed since they were compared."""
        return [
            node
            for node, slot in self._work.partials.results.items()
            if checksum(self._slot(slot), 0, self._layout.size_bytes) != self._compared.get(node[0])
        ]

    def changed_second_sums(self) -> list[Range]:
        """The same, of the sums that this member has checked."""
        return [
            node
            for partials in self._work.everybody
            for node, slot in partials.results.items()
            if node[0] in self._compared_again
            and checksum(self._spares_of(slot), 0, self._layout.size_bytes) != self._compared_again[node[0]]
        ]

    # --- while this member computes its shards -----------------------------------------------------------------------

    def begin(self, step: int, occupied: int, work: StepWork) -> None:
        """This member begins to compute its shards of a step that is rechecked."""
        # shards of earlier generations were rechecked before they were published
        self._work, computed_by = work, work.computed_by
        found = rechecked(self._seed, step, occupied, self._seat.recheck.whole)
        self._owners = {shard: computed_by[shard] for shard in found if shard in computed_by}
        self._is_whole = len(self._owners) == len(found)
        self._slots.clear()
        self._others.clear()

    def in_slot(self, shard: int, slot: Memory) -> None:
        """This member has computed a shard of its own; its sibling is not added yet."""
        if shard in self._owners:
            self._slots[shard] = self._checksum(shard, slot)

    def reported(self, shard: int, others: bytes) -> None:
        """What comes with the gradients of a shard of this member: its row, its untouched marks."""
        if shard in self._owners:
            self._others[shard] = zlib.crc32(others)

    def _checksum(self, shard: int, slot: Memory) -> int:
        if shard == self._disputed:
            self._parts = self._parts_of(slot)
        return checksum(slot, 0, self._layout.size_bytes)

    def _parts_of(self, slot: Memory) -> list[int]:
        """The checksum of each entry of the layout."""
        return [checksum(slot, one.offset_bytes, one.numel * one.dtype.itemsize) for one in self._layout.entries]

    def _check(self, step: int, shard: int, into: Memory) -> int:
        """The checksum of a shard that this member computes for a recheck."""
        others = self._compute(step, shard, into)
        return _joined(self._checksum(shard, into), zlib.crc32(others))

    def _check_all(self, step: int, pairs: Mapping[int, tuple[int, int]], mine: _Found) -> None:
        """Compute the shards that this member checks, and with all shards rechecked also their partial sums."""
        rank, whole = self._seat.rank, self._seat.recheck.whole
        for owner, partials in enumerate(self._work.everybody):
            for unit in partials.work:
                if pairs.get(unit.shard, (owner, -1))[1] != rank:
                    continue
                if memory := self._spare(unit.slot if whole else 0):
                    mine.checked[unit.shard] = self._check(step, unit.shard, memory)
                    if whole:
                        self._add(unit)
            if whole:
                mine.checked_sums |= {
                    first: checksum(self._spares_of(slot), 0, self._layout.size_bytes)
                    for (first, _), slot in partials.results.items()
                    if first in mine.checked
                }

    def _spares_of(self, slot: int) -> Memory:
        memory = self._spare(slot)
        assert memory is not None, "with all shards rechecked, missing memory is an error"
        return memory

    def _add(self, unit: ShardWork) -> None:
        """Add a checked shard to its siblings, as its owner does."""
        for into, other in unit.additions:
            tiles = zip(*(tile_views(self._spares_of(slot), self._layout.tiles) for slot in (into, other)), strict=True)
            for sum_of_tile, sibling in tiles:
                sum_of_tile.add_(sibling)

    # --- the comparison ----------------------------------------------------------------------------------------------

    def compare(self, step: int, redo: Callable[[], None]) -> list[str]:
        """Collective call: returns when all rechecked shards of the step agree; otherwise all members raise
        ResultsDiffer. `redo` computes all of this member's own shards again. Returns notices about differences that
        have passed, on rank 0."""
        size, rank = len(self._seat.ranges), self._seat.rank
        shift = self.shift(step)
        pairs = {shard: (owner, (owner + shift) % size) for shard, owner in self._owners.items()}
        mine = _Found()
        self._check_all(step, pairs, mine)
        found = self._exchange(mine)
        settled: set[int] = set()
        notices = []
        lacking = sorted({checker for shard, (_, checker) in pairs.items() if shard not in found[checker].checked})
        if lacking and not self._lacks_memory:
            self._lacks_memory = True
            everybody = member_names(self._seat)
            notices.append(without_memory([everybody[one] for one in lacking], self._layout.size_bytes))
        while differing := [shard for shard, pair in pairs.items() if _differ(found, shard, pair)]:
            shard = differing[0]
            owner, checker = pairs[shard]
            third = third_member(owner, checker, self._hosts)
            again = self._compute_again(step, shard, pairs, third, mine, redo)
            verdict = judge_results(
                Results(owner, (found[owner].owned[shard], again[owner].owned[shard])),
                Results(checker, (found[checker].checked[shard], again[checker].checked[shard])),
                None if third is None or again[third].third < 0 else Results(third, (again[third].third,)),
                self._hosts,
            )
            names = self._different(again[owner], again[checker])
            dispute = Dispute(step, shard, verdict, member_names(self._seat), names)
            if verdict.kind != "passing" or shard in settled:
                raise self._error(dispute)
            settled.add(shard)
            found = again
            notices.append(dispute.notice())
        if self._seat.recheck.whole:
            self._compare_sums(step, pairs, found)
            self._compared, self._compared_again = mine.owned_sums, mine.checked_sums
        if self._is_whole and not lacking:
            self._agreed.append(step)
        self.due = next_recheck(self._seed, step + 1, self._seat.recheck)
        return notices if rank == 0 else []

    def _compute_again(
        self, step: int, shard: int, pairs: Mapping[int, tuple[int, int]], third: int | None, mine: _Found,
        redo: Callable[[], None],
    ) -> list[_Found]:  # fmt: skip
        """All members that decide on a shard compute it, at the same time."""
        rank, (owner, checker) = self._seat.rank, pairs[shard]
        mine.third, mine.owned_parts, mine.checked_parts = -1, [], []
        self._disputed = shard
        if rank == owner:
            redo()
            mine.owned_parts = self._parts
        if rank == checker:
            self._check_all(step, pairs, mine)
            mine.checked_parts = self._parts
        if rank == third and (memory := self._spare(_THIRD)):
            mine.third = self._check(step, shard, memory)
        self._disputed = -1
        return self._exchange(mine)

    def _compare_sums(self, step: int, pairs: Mapping[int, tuple[int, int]], found: Sequence[_Found]) -> None:
        """Compare the partial sums, of shards on which owner and checker agree."""
        for owner, partials in enumerate(self._work.everybody):
            for node, slot in partials.results.items():
                checker = pairs[node[0]][1]
                if found[owner].owned_sums[node[0]] != found[checker].checked_sums[node[0]]:
                    raise self._sums_differ(step, node, slot, owner, checker)

    def _sums_differ(self, step: int, node: Range, slot: int, owner: int, checker: int) -> ResultsDiffer:
        mine = _Found()
        if self._seat.rank == owner:
            mine.owned_parts = self._parts_of(self._slot(slot))
        if self._seat.rank == checker:
            mine.checked_parts = self._parts_of(self._spares_of(slot))
        found = self._gathered(mine)
        parts = shortened(self._different(found[owner], found[checker]))
        names = member_names(self._seat)
        shards = f"shards {node[0]} to {node[1] - 1}" if node[1] - node[0] > 1 else f"shard {node[0]}"
        return ResultsDiffer(
            f"{names[owner]} and {names[checker]} got different sums of the gradients of {shards} of step {step} "
            f"({parts}), although the gradients of each shard agreed: the sum or the memory of one of them is wrong. "
            f"{self.last_good(step)}",
            IF_AGAIN,
            step,
            node[0],
        )

    def _different(self, owner: _Found, checker: _Found) -> list[str]:
        parts = zip(self._layout.entries, owner.owned_parts, checker.checked_parts, strict=True)
        return [entry.name for entry, one, other in parts if one != other]

    def _exchange(self, mine: _Found) -> list[_Found]:
        mine.owned = {shard: _joined(slot, self._others[shard]) for shard, slot in self._slots.items()}
        if self._seat.recheck.whole:
            mine.owned_sums = {
                first: checksum(self._slot(slot), 0, self._layout.size_bytes)
                for (first, _), slot in self._work.partials.results.items()
            }
        return self._gathered(mine)

    def _gathered(self, mine: _Found) -> list[_Found]:
        return [msgspec.msgpack.decode(one, type=_Found) for one in self._gather(msgspec.msgpack.encode(mine))]

    def _error(self, dispute: Dispute) -> ResultsDiffer:
        message = f"{dispute.message()}. {self.last_good(dispute.step)}"
        return ResultsDiffer(message, dispute.hint(), dispute.step, dispute.shard)

    def last_good(self, step: int) -> str:
        """A sentence on the last step before this one that is known to be good."""
        agreed = max(before for before in (-1, *self._agreed) if before < step)
        return last_good(step, self._seat.recheck, agreed)

    def changed_in_memory(self, rank: int, step: int, nodes: Sequence[Range]) -> ResultsDiffer:
        """The error about sums that this member, or that of another rank, finds changed (`changed_sums`)."""
        first, end = nodes[0]
        return ResultsDiffer(
            f"the sum of the gradients of shards {first} to {end - 1} of step {step} changed in the memory of "
            f"{member_names(self._seat)[rank]}. {self.last_good(step)}",
            IF_AGAIN,
            step,
            first,
        )


def member_names(seat: Seat) -> dict[int, str]:
    """Rank -> worker and host, for people."""
    workers = seat.workers or range(len(seat.ranges))
    hosts = seat.hosts or [""] * len(seat.ranges)
    return {rank: f"worker {worker} on {hosts[rank] or 'this host'}" for rank, worker in enumerate(workers)}


def _differ(found: Sequence[_Found], shard: int, pair: tuple[int, int]) -> bool:
    owner, checker = pair
    return found[owner].owned[shard] != found[checker].checked.get(shard, found[owner].owned[shard])


def checksum(memory: Memory, first_byte: int, size_bytes: int) -> int:
    """CRC-32: finds every single flipped bit, and values that changed places. Copies nothing on the host."""
    found = 0
    for at in range(first_byte, first_byte + size_bytes, TRANSFER_BYTES):
        part = memory.tensor(torch.uint8, at, min(TRANSFER_BYTES, first_byte + size_bytes - at))
        found = zlib.crc32(part.cpu().numpy().data, found)
    return found


def _joined(slot: int, others: int) -> int:
    return slot << 32 | others
