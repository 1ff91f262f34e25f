"""Rechecks: which shards are computed twice, by which members, and what follows from a difference. Pure: members with
the same numbers come to the same answers.

- `next_recheck`, `rechecked`: the steps and shards, functions of (seed, step). Every window of `every`
  steps has one recheck, at a place that the seed chooses.
- `shifts`, `third_member`: who computes a shard again. The checker of rank r's shards is rank r + shift. A shift gives
  every member the same work, and the best shifts lead to other hosts.
- `judge_results`: the verdict, once owner, checker and a third member have computed a shard on which owner and checker
  differ. Members on one host may be wrong together, so hosts vote if there are several, otherwise members do.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from distbelief.options import RecheckPlan
from distbelief.shards import mix

SPREAD = 8
"""Of this many shards one is rechecked in a recheck step."""

_WHEN, _WHERE, _WHO = 6, 7, 8  # streams of `mix`


def next_recheck(seed: int, step: int, plan: RecheckPlan) -> int:
    """The first step from `step` on that is rechecked; -1: none.

    >>> [next_recheck(0, step, RecheckPlan(every=10)) for step in (0, 10, 20)]
    [9, 19, 25]
    >>> next_recheck(0, 5, RecheckPlan()), next_recheck(0, 5, RecheckPlan(every=1, whole=True))
    (-1, 5)
    """
    if not plan.every:
        return -1
    window = step // plan.every
    found = _recheck_of(seed, window, plan.every)
    return found if found >= step else _recheck_of(seed, window + 1, plan.every)


def _recheck_of(seed: int, window: int, every: int) -> int:
    return window * every + mix(seed, _WHEN, window) % every


def rechecked(seed: int, step: int, occupied: int, whole: bool) -> list[int]:
    """The shards that are rechecked in a recheck step: all, or one in eight, at least one.

    >>> rechecked(0, 4, 8, whole=True), rechecked(0, 4, 8, whole=False), rechecked(0, 4, 32, whole=False)
    ([0, 1, 2, 3, 4, 5, 6, 7], [3], [3, 11, 19, 27])
    """
    if whole:
        return list(range(occupied))
    count = -(-occupied // SPREAD)
    first = mix(seed, _WHERE, step) % occupied
    return sorted((first + number * occupied // count) % occupied for number in range(count))


def shifts(hosts: Sequence[str]) -> list[int]:
    """The shifts with which most shards are rechecked on another host. A single member rechecks its own shards.

    >>> shifts(["a"]), shifts(["a", "a", "a"]), shifts(["a", "a", "b", "b"])
    ([0], [1, 2], [2])
    """
    size = len(hosts)
    if size == 1:
        return [0]
    away = [sum(hosts[r] != hosts[(r + shift) % size] for r in range(size)) for shift in range(1, size)]
    return [shift for shift, count in enumerate(away, start=1) if count == max(away)]


def choose_shift(seed: int, step: int, best: Sequence[int]) -> int:
    return best[mix(seed, _WHO, step) % len(best)]


def third_member(owner: int, checker: int, hosts: Sequence[str]) -> int | None:
    """The member that decides between owner and checker, on a host of its own if there is one.

    >>> third_member(0, 1, ["a", "a", "a", "b"]), third_member(0, 1, ["a", "b"])
    (3, None)
    """
    size = len(hosts)
    others = [rank for rank in ((checker + k) % size for k in range(1, size)) if rank != owner]
    return min(others, key=lambda rank: hosts[rank] in (hosts[owner], hosts[checker]), default=None)


@dataclass(frozen=True)
class Results:
    """What one member computed for the disputed shard: the checksums of its computations, in order."""

    rank: int
    checksums: tuple[int, ...]


@dataclass(frozen=True)
class Verdict:
    kind: Literal["passing", "majority", "open", "unsteady"]
    """passing: owner and checker computed it again and agree now; majority: some members' results are wrong; open:
    members differ, and there is no majority; unsteady: members get another result each time."""
    wrong: tuple[int, ...]
    """The ranks that are named."""
    right: tuple[int, ...] = ()
    third_is_wrong: int = -1
    """passing: the rank of the third member, if its only result is another one than that of owner and checker."""


def judge_results(owner: Results, checker: Results, third: Results | None, hosts: Sequence[str]) -> Verdict:
    """The verdict on a shard that owner and checker computed twice, and a third member once.

    >>> judge_results(Results(0, (7, 1)), Results(1, (1, 1)), None, ["a", "b"])
    Verdict(kind='passing', wrong=(0,), right=(1,), third_is_wrong=-1)
    >>> judge_results(Results(0, (7, 7)), Results(1, (1, 1)), Results(2, (1,)), ["a", "b", "c"])
    Verdict(kind='majority', wrong=(0,), right=(1, 2), third_is_wrong=-1)
    >>> judge_results(Results(0, (7, 7)), Results(1, (1, 1)), None, ["a", "b"])
    Verdict(kind='open', wrong=(0, 1), right=(), third_is_wrong=-1)
    """
    everybody = [owner, checker, *([third] if third else [])]
    involved = tuple(dict.fromkeys(one.rank for one in everybody))
    good = owner.checksums[-1]
    if good == checker.checksums[-1]:
        if good not in (owner.checksums[0], checker.checksums[0]):
            return Verdict("unsteady", involved)
        twice = dict.fromkeys((owner.rank, checker.rank))
        wrong = {one.rank for one in (owner, checker) if set(one.checksums) != {good}}
        return Verdict(
            "passing",
            tuple(rank for rank in twice if rank in wrong),
            tuple(rank for rank in twice if rank not in wrong),
            third.rank if third and third.checksums != (good,) else -1,
        )
    unsteady = {one.rank for one in everybody if len(set(one.checksums)) > 1}
    by_result: dict[int, set[int]] = {}
    for one in everybody:
        by_result.setdefault(one.checksums[-1], set()).add(one.rank)
    votes = {result: _votes(ranks, involved, hosts) for result, ranks in by_result.items()}
    first = [result for result, count in votes.items() if count == max(votes.values())]
    if len(first) == 1 and not by_result[first[0]] & unsteady:
        right = by_result[first[0]]
        return Verdict(
            "majority", tuple(r for r in involved if r not in right), tuple(r for r in involved if r in right)
        )
    return Verdict("unsteady" if {owner.rank, checker.rank} <= unsteady else "open", involved)


def _votes(ranks: set[int], involved: Sequence[int], hosts: Sequence[str]) -> int:
    if len({hosts[rank] for rank in involved}) == 1:
        return len(ranks)
    return len({hosts[rank] for rank in ranks})


def odd_copies(copies: Sequence[Hashable], hosts: Sequence[str]) -> tuple[int, ...]:
    """The ranks whose copies are not that of the majority; all ranks if there is no majority; none if all are equal.

    >>> odd_copies([7, 1, 7], ["a", "b", "c"]), odd_copies([7, 1], ["a", "b"]), odd_copies([7, 7, 1], ["a", "a", "b"])
    ((1,), (0, 1), (0, 1, 2))
    >>> odd_copies([7, 7], ["a", "b"])
    ()
    """
    everybody = range(len(copies))
    holders: dict[Hashable, set[int]] = {}
    for rank, copy in enumerate(copies):
        holders.setdefault(copy, set()).add(rank)
    votes = {copy: _votes(ranks, everybody, hosts) for copy, ranks in holders.items()}
    first = [copy for copy, count in votes.items() if count == max(votes.values())]
    return tuple(rank for rank in everybody if len(first) > 1 or copies[rank] != first[0])


# --- what people are told -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dispute:
    """A shard on which members differ, for people."""

    step: int
    shard: int
    verdict: Verdict
    names: Mapping[int, str]
    """Rank -> worker and host."""
    different: Sequence[str] = ()
    """The parameters and buffers that differ between the members that disagree."""

    def notice(self) -> str:
        """Of a passing difference."""
        wrong, right = listed(self._named(self.verdict.wrong)), listed(self._named(self.verdict.right))
        where = f"shard {self.shard} of step {self.step}"
        again = "If a machine is named again, it computes wrongly"
        if self.verdict.third_is_wrong >= 0:
            third = self.names[self.verdict.third_is_wrong]
            again = f"{third}, which computed them once, got different ones. {again}"
        if not right:
            return (
                f"{wrong} computed different gradients of {where} in two attempts; the step continues with those that "
                f"the next attempts gave. {again}"
            )
        return (
            f"{wrong} computed wrong gradients of {where}, once; computed again they equal those of {right}, and the "
            f"step continues with these. {again}"
        )

    def message(self) -> str:
        wrong, right = listed(self._named(self.verdict.wrong)), listed(self._named(self.verdict.right))
        where = f"shard {self.shard} of step {self.step}"
        parts = f" ({shortened(self.different)})" if self.different else ""
        match self.verdict.kind:
            case "majority":
                return f"{wrong} computed other gradients of {where}{parts} than {right}, also when asked again"
            case "unsteady":
                return f"the gradients of {where} were others each time that {wrong} computed them{parts}"
            case _:
                return f"{wrong} computed different gradients of {where}{parts}, also when asked again"

    def hint(self) -> str:
        state = (
            "code that keeps state of its own (counters, generators, parameters written in forward), a data set that "
            "keeps random results, or data that differ between workers (docs/purity.md)"
        )
        match self.verdict.kind:
            case "majority":
                return (
                    f"go on without that host: `distbelief resume RUN`; if another one is named next, suspect {state}"
                )
            case "unsteady":
                return f"suspect {state}"
            case _:
                return f"either one of them computes wrongly, or suspect {state}; `distbelief resume RUN` goes on"

    def _named(self, ranks: Sequence[int]) -> list[str]:
        return [self.names[rank] for rank in ranks]


def last_good(step: int, plan: RecheckPlan, agreed: int) -> str:
    """A sentence on the last step that is known to be good. `agreed`: the last step before it whose recheck agreed in
    this generation; -1: none."""
    if agreed < 0:
        return f"Step {step} was not committed. Its members have rechecked no step before it together"
    if plan.whole:
        return f"Step {step} was not committed. The last good step is {agreed}: all of its shards were computed twice"
    return (
        f"Step {step} was not committed. The last step whose recheck agreed is {agreed}; the steps after it were "
        "committed without a recheck"
    )


def without_memory(names: Sequence[str], size_bytes: int) -> str:
    """The notice about members that check no shards."""
    verb, its = ("has", "its") if len(names) == 1 else ("have", "their")
    return (
        f"{listed(names)} {verb} no memory for rechecks ({size_bytes / 1e6:.1f} MB): {its} checks are left out until "
        "the members change"
    )


def shortened(names: Sequence[str], most: int = 3) -> str:
    """
    >>> shortened(["a", "b"]), shortened(["a", "b", "c", "d", "e"])
    ('a, b', 'a, b, c and 2 more')
    """
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + rest


def listed(names: Sequence[str]) -> str:
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
