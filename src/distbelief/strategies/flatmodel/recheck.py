"""Rechecks on a member: in some steps other members compute shards again, and all compare checksums of the gradients.

A recheck happens after the member has computed its shards and before it publishes any partial sum. So other members
have read nothing that a recheck may reject, a step whose shards differ is never certain, and partial sums that a later
generation takes over were rechecked before.

1. The owner of a shard takes the checksum of its slot as soon as the shard is computed (`computed`), before siblings
   are added. The shard's row (loss, weight, samples) and its untouched marks count too.
2. The checker computes the shard into memory of its own. All members exchange their checksums (`Group.gather`).
3. On a difference the owner computes all of its shards again, the checker computes the shard again, and a third member
   computes it too. All members come to the same verdict (rules/rechecks.py): the owner's new gradients are used, with a
   notice, or GradientsDiffer is raised.

What is covered: everything that leads to a shard's gradients, from the samples to the slot. Not covered: the addition
of partial sums and the optimizer, which one member does for each tile.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property

import msgspec
import torch

from distbelief.errors import GradientsDiffer
from distbelief.strategies.base import Seat
from distbelief.strategies.flatmodel.compute import ShardComputer
from distbelief.strategies.flatmodel.rules.rechecks import (
    Dispute,
    Results,
    choose_shift,
    judge_results,
    last_good,
    last_recheck,
    next_recheck,
    rechecked,
    shifts,
    third_member,
)
from distbelief.transport.device.accelerator import memory_on
from distbelief.transport.exchange import TRANSFER_BYTES
from distbelief.transport.shm.memfd import free_memory_bytes, require_memory
from distbelief.transport.shm.segment import Memory


class _Found(msgspec.Struct):
    """What one member tells all others: checksums by shard."""

    owned: dict[int, int] = {}
    checked: dict[int, int] = {}
    third: int = -1
    owned_parts: list[int] = []
    """Of the disputed shard, on its owner: a checksum of each entry of the layout."""
    checked_parts: list[int] = []
    """The same, on its checker."""


Compute = Callable[[int, int, Memory], bytes]
"""(step, shard, memory) -> what comes with the gradients of the shard, which is computed into that memory."""


class Recheck:
    """A member's rechecks in one generation. `due` is the next step that has one; -1: none."""

    def __init__(
        self, computer: ShardComputer, seat: Seat, first: int, gather: Callable[[bytes], list[bytes]], compute: Compute
    ) -> None:
        """`first`: the first step of the generation."""
        self._seed = computer.job.seed
        self.due = next_recheck(self._seed, first, seat.recheck)
        self._layout = computer.layout
        self._device = computer.device
        self._seat = seat
        self._gather = gather
        self._compute = compute
        self._owners: dict[int, int] = {}
        """The rechecked shards of the present step -> the ranks that compute them."""
        self._slots: dict[int, int] = {}
        self._others: dict[int, int] = {}
        self._disputed = -1
        self._parts: list[int] = []
        self._missed: set[int] = set()
        """Steps in which a member had no memory to check a shard."""

    @cached_property
    def _spare(self) -> Memory | None:
        """A slot for the shards that this member checks, which the first recheck allocates. None: there is no memory
        for it, and this member checks none; if all shards are to be rechecked, that is an error."""
        if self._device.type == "cpu":
            if self._seat.recheck.whole:
                require_memory("rechecks", self._layout.size_bytes)
            elif self._layout.size_bytes > free_memory_bytes():
                return None
        return memory_on(self._device, self._layout.size_bytes)

    @cached_property
    def _hosts(self) -> Sequence[str]:
        return self._seat.hosts or [""] * len(self._seat.ranges)

    @cached_property
    def _shifts(self) -> list[int]:
        return shifts(self._hosts)

    # --- while this member computes its shards -----------------------------------------------------------------------

    def begin(self, step: int, occupied: int, computed_by: Mapping[int, int]) -> None:
        """This member begins to compute its shards of a step that is rechecked."""
        # shards of earlier generations were rechecked before they were published
        found = rechecked(self._seed, step, occupied, self._seat.recheck.whole)
        self._owners = {shard: computed_by[shard] for shard in found if shard in computed_by}
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
            self._parts = [
                checksum(slot, entry.offset_bytes, entry.numel * entry.dtype.itemsize) for entry in self._layout.entries
            ]
        return checksum(slot, 0, self._layout.size_bytes)

    def _check(self, step: int, shard: int) -> int:
        """The checksum of a shard that this member computes for a recheck."""
        assert self._spare is not None
        others = self._compute(step, shard, self._spare)
        return _joined(self._checksum(shard, self._spare), zlib.crc32(others))

    # --- the comparison ----------------------------------------------------------------------------------------------

    def compare(self, step: int, redo: Callable[[], None]) -> list[str]:
        """Collective call: returns when all rechecked shards of the step agree; otherwise all members raise
        GradientsDiffer. `redo` computes all of this member's own shards again. Returns notices about differences that
        have passed, on rank 0."""
        size, rank = len(self._seat.ranges), self._seat.rank
        shift = choose_shift(self._seed, step, self._shifts)
        pairs = {shard: (owner, (owner + shift) % size) for shard, owner in self._owners.items()}
        mine = [shard for shard, (_, checker) in pairs.items() if checker == rank]
        checked = {shard: self._check(step, shard) for shard in mine if self._spare}
        found = self._exchange(_Found(self._owned(), checked))
        if any(shard not in found[checker].checked for shard, (_, checker) in pairs.items()):
            self._missed.add(step)
        settled: set[int] = set()
        notices = []
        while differing := [shard for shard, pair in pairs.items() if _differ(found, shard, pair)]:
            shard = differing[0]
            owner, checker = pairs[shard]
            third = third_member(owner, checker, self._hosts)
            again = self._compute_again(step, shard, owner, checker, third, checked, redo)
            verdict = judge_results(
                Results(owner, (found[owner].owned[shard], again[owner].owned[shard])),
                Results(checker, (found[checker].checked[shard], again[checker].checked[shard])),
                None if third is None or again[third].third < 0 else Results(third, (again[third].third,)),
                self._hosts,
            )
            parts = zip(self._layout.entries, again[owner].owned_parts, again[checker].checked_parts, strict=True)
            names = [entry.name for entry, one, other in parts if one != other]
            dispute = Dispute(step, shard, verdict, self._names(), names)
            if verdict.kind != "passing" or shard in settled:
                raise self._error(dispute)
            settled.add(shard)
            found = again
            notices.append(dispute.notice())
        self.due = next_recheck(self._seed, step + 1, self._seat.recheck)
        return notices if rank == 0 else []

    def _compute_again(
        self, step: int, shard: int, owner: int, checker: int, third: int | None, checked: dict[int, int],
        redo: Callable[[], None],
    ) -> list[_Found]:  # fmt: skip
        """All members that decide on a shard compute it, at the same time."""
        rank, mine = self._seat.rank, _Found()
        self._disputed = shard
        if rank == owner:
            redo()
            mine.owned_parts = self._parts
        if rank == checker:
            checked[shard] = self._check(step, shard)
            mine.checked_parts = self._parts
        if rank == third and self._spare:
            mine.third = self._check(step, shard)
        self._disputed = -1
        mine.owned, mine.checked = self._owned(), checked
        return self._exchange(mine)

    def _owned(self) -> dict[int, int]:
        return {shard: _joined(slot, self._others[shard]) for shard, slot in self._slots.items()}

    def _exchange(self, mine: _Found) -> list[_Found]:
        return [msgspec.msgpack.decode(one, type=_Found) for one in self._gather(msgspec.msgpack.encode(mine))]

    def _names(self) -> dict[int, str]:
        workers, hosts = self._seat.workers or range(len(self._hosts)), self._hosts
        return {r: f"worker {worker} on {hosts[r] or 'this host'}" for r, worker in enumerate(workers)}

    def _error(self, dispute: Dispute) -> GradientsDiffer:
        step, plan = dispute.step, self._seat.recheck
        before = last_recheck(self._seed, step, plan)
        while before in self._missed:
            before = last_recheck(self._seed, before, plan)
        message = f"{dispute.message()}. {last_good(step, plan, before)}"
        return GradientsDiffer(message, dispute.hint(), step, dispute.shard)


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
