"""Fault schedules: parses sentences into faults and formats faults as sentences, and decides the faults due at a step
or time.

Pure: the step and the time are arguments, and this module knows nothing of processes.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from distbelief.errors import DistBeliefError

WORKER_FAULTS = ("kill worker", "freeze worker", "slow worker", "cut worker", "leave worker", "kill reader")
"""The number in these sentences is a worker's."""
KINDS = (*WORKER_FAULTS, "kill coordinator", "join", "scale", "kill server", "fill disk", "set clock", "drop terminal")
NUMBERED = (*WORKER_FAULTS, "kill server")
"""The kinds that may name a worker or a server."""
LASTING = ("freeze worker", "slow worker", "cut worker", "fill disk")
"""The kinds that may end after a time (`for 5s`)."""

FORMS = """\
kill worker [N] · freeze worker [N] · slow worker [N] by 3x · cut worker [N] · leave worker [N]
kill coordinator · join · scale to N · kill server [N] (of two parameter servers or more)
kill reader [N] (of worker N, of a job whose data is a Dataset)
fill disk for 5s (of a --run-dir on a small disk of its own)
set clock back 3h · set clock forward 3h (of the run's processes, not of the machine; needs libfaketime)
drop terminal (the run's terminal is gone, as an SSH session that drops; the run saves, stops and is resumed)
when: at step 40 · at 3s · every 40 steps · every 3s (left out: from the start)
how long, for freeze, slow and cut: for 5s (left out: to the end)
Sentences are parted by commas; without N, a worker or a server is chosen by --seed."""


class ScheduleError(DistBeliefError):
    """A sentence is not understood, or not possible; nothing was started."""

    exit_code = 2


@dataclass(frozen=True)
class When:
    amount: float = 0
    unit: str = "step"
    """step: committed steps · s: seconds since the first generation started"""
    every: bool = False

    def __str__(self) -> str:
        if self.unit == "s":
            return f"{'every' if self.every else 'at'} {_number(self.amount)}s"
        return f"every {_number(self.amount)} steps" if self.every else f"at step {_number(self.amount)}"


START = When()


@dataclass(frozen=True)
class Fault:
    """One sentence. `str` formats it in its usual form."""

    kind: str
    worker: int | None = None
    """The number of the worker or server; None: any living one."""
    when: When = START
    for_s: float | None = None
    factor: float = 1.0
    """slow: the worker gets 1/factor of its time."""
    count: int = 0
    """scale: the requested number of workers."""
    by_s: float = 0.0
    """set clock: forward; back if it is negative."""

    def __str__(self) -> str:
        what = f"scale to {self.count}" if self.kind == "scale" else self.kind
        words = [what, "" if self.worker is None else str(self.worker)]
        if self.kind == "set clock":
            words += ["back" if self.by_s < 0 else "forward", _time(abs(self.by_s))]
        words += [f"by {_number(self.factor)}x"] if self.kind == "slow worker" else []
        words += [str(self.when)] if self.when != START else []
        words += [] if self.for_s is None else [f"for {_number(self.for_s)}s"]
        return " ".join(word for word in words if word)


def parse(text: str) -> tuple[Fault, ...]:
    """The faults of a schedule, in the written order.

    >>> [str(fault) for fault in parse("kill worker every 3s, freeze worker 2 at step 40 for 5s")]
    ['kill worker every 3s', 'freeze worker 2 at step 40 for 5s']
    """
    parts = [part for part in re.finditer(r"[^,;\n]+", text) if part.group().strip()]
    faults = [_Sentence(text, part.start(), part.end()).fault() for part in parts]
    if not faults:
        raise ScheduleError("the schedule of faults is empty", hint=f"give at least one sentence\n{FORMS}")
    return tuple(faults)


def write(faults: tuple[Fault, ...]) -> str:
    return ", ".join(map(str, faults))


def check(faults: tuple[Fault, ...], workers: int, servers: int = 0) -> None:
    """Refuse the number of a worker or server that could never exist in the run."""
    for fault in faults:
        if fault.kind == "kill server" and servers < 2:
            hint = "use --strategy ps:sync, with two servers or more: a single server's death loses its state"
            raise ScheduleError(f"'{fault}': this strategy has {servers or 'no'} parameter server", hint=hint)
        if fault.kind == "kill server" and (fault.worker or 0) >= servers:
            hint = f"the servers of this run are 0 to {servers - 1}"
            raise ScheduleError(f"'{fault}': there is no parameter server {fault.worker}", hint=hint)
    kinds = {fault.kind for fault in faults}
    if {"cut worker", "drop terminal"} <= kinds:
        raise ScheduleError(
            "'cut worker' and 'drop terminal' cannot be combined: a run in a terminal has no relay for its connections",
            hint="use two schedules, one after the other",
        )
    most = max([workers, *(fault.count for fault in faults if fault.kind == "scale")])
    if any(fault.kind == "join" for fault in faults):
        return  # more workers may join
    for fault in faults:
        if fault.kind in WORKER_FAULTS and fault.worker is not None and fault.worker >= most:
            raise ScheduleError(
                f"'{fault}': there is no worker {fault.worker}",
                hint=f"the workers of this run are 0 to {most - 1}",
            )


_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(ms|s|min|h)")
_FACTOR = re.compile(r"(\d+(?:\.\d+)?)\s*x")
_UNITS_S = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0}
# A number and its unit are one word even with a space between them.
_WORD = re.compile(r"\d+(?:\.\d+)?\s*(?:ms|s|min|h|x)\b|\S+")


class _Sentence:
    """One sentence, read word by word; an error shows the word at which reading stopped."""

    def __init__(self, text: str, start: int, end: int) -> None:
        self._text = text
        self._end = start + len(text[start:end].rstrip())
        self._words = [(word.group().lower(), word.start()) for word in _WORD.finditer(text, start, end)]
        self._next = 0

    def fault(self) -> Fault:
        kind = self._kind()
        worker = int(self._take()) if kind in NUMBERED and self._peek().isdigit() else None
        count, factor, by_s = 0, 1.0, 0.0
        if kind == "scale":
            self._expect("to")
            count = self._whole("a number of workers")
        elif kind == "slow worker":
            self._expect("by")
            factor = self._factor()
        elif kind == "set clock":
            back = self._expect("back", "forward") == "back"
            by_s = (-1 if back else 1) * self._duration("how far, as in 3h,")
        when, for_s = self._when_and_how_long(kind)
        if kind == "fill disk" and for_s is None:
            self._fail("a run on a full disk does not come to its end: for 5s", self._next)
        if kind == "slow worker" and when.every and for_s is None:
            self._fail("a worker that is slowed again and again needs an end: for 5s", self._next)
        return Fault(kind, worker, when, for_s, factor, count, by_s)

    def _kind(self) -> str:
        first = self._take()
        verbs = {kind.split()[0] for kind in KINDS}
        if first not in verbs:
            near = difflib.get_close_matches(first, sorted(verbs), n=1)
            self._fail(f"'{first}' is not a fault" + (f"; did you mean '{near[0]}'?" if near else ""))
        if first in ("join", "scale"):
            return first
        second = self._take()
        kind = f"{first} {second}"
        if kind not in KINDS:
            known = " or ".join(f"'{kind}'" for kind in KINDS if kind.startswith(first))
            self._fail(f"{_shown(second)} cannot follow '{first}'; write {known}")
        return kind

    def _when_and_how_long(self, kind: str) -> tuple[When, float | None]:
        when, for_s = START, None
        said: set[str] = set()
        while word := self._take():
            group = "for" if word == "for" else "when"
            if word not in ("at", "every", "for"):
                self._fail(f"'{word}' is not understood here; after '{kind}' come at, every or for")
            if group in said:
                self._fail(f"'{word}' repeats an earlier part of the sentence")
            said.add(group)
            if word == "for":
                if kind not in LASTING:
                    self._fail(f"'{kind}' has no duration")
                for_s = self._duration("a duration")
            elif word == "at" and self._peek() == "step":
                self._take()
                when = When(self._whole("a step", least=0))
            elif word == "every" and self._peek().isdigit():
                when = When(self._whole("a number of steps"), every=True)
                self._expect("steps", "step")
            else:
                what = "a time as in 3s, or 'step' and a number" if word == "at" else "a time as in 3s, or '40 steps'"
                when = When(self._duration(what), "s", word == "every")
        return when, for_s

    def _duration(self, what: str) -> float:
        word = self._take()
        found = _DURATION.fullmatch(word)
        if found is None or not float(found[1]) > 0:
            self._fail(f"{what} was expected, not {_shown(word)}")
        return round(float(found[1]) * _UNITS_S[found[2]], 6)

    def _factor(self) -> float:
        word = self._take()
        found = _FACTOR.fullmatch(word)
        if found is None or not float(found[1]) > 1:
            self._fail(f"a factor above 1, as in 3x, was expected, not {_shown(word)}")
        return float(found[1])

    def _whole(self, what: str, least: int = 1) -> int:
        word = self._take()
        if not word.isdigit() or int(word) < least:
            self._fail(f"{what} was expected, not {_shown(word)}")
        return int(word)

    def _expect(self, *words: str) -> str:
        word = self._take()
        if word not in words:
            self._fail(f"'{words[0]}' was expected, not {_shown(word)}")
        return word

    def _peek(self) -> str:
        return self._words[self._next][0] if self._next < len(self._words) else ""

    def _take(self) -> str:
        """The next word, or "" at the end, which no rule accepts."""
        word = self._peek()
        self._next += 1
        return word

    def _fail(self, message: str, word: int | None = None) -> NoReturn:
        place = self._next - 1 if word is None else word
        column = self._words[place][1] if place < len(self._words) else self._end
        line_start = self._text.rfind("\n", 0, column) + 1
        line = self._text[line_start:].split("\n", 1)[0]
        raise ScheduleError(
            f"the schedule of faults is not understood: {message}",
            details=f"{line}\n{' ' * (column - line_start)}^",
            hint=f"the forms that are understood:\n{FORMS}",
        )


def _shown(word: str) -> str:
    return f"'{word}'" if word else "the end of the sentence"


def _number(value: float) -> str:
    """
    >>> _number(1e6), _number(2.5)
    ('1000000', '2.5')
    """
    return str(int(value)) if value == int(value) else str(value)


def _time(seconds: float) -> str:
    """
    >>> _time(10_800), _time(90)
    ('3h', '90s')
    """
    return f"{_number(seconds / 3600)}h" if seconds % 3600 == 0 else f"{_number(seconds)}s"


# --- which faults are due -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Pending:
    """A fault, and the step or second of its next occurrence; None when it will not occur again."""

    fault: Fault
    next: float | None
    times: int = 0
    """The number of past occurrences."""


def begin(faults: Sequence[Fault]) -> tuple[Pending, ...]:
    return tuple(Pending(fault, fault.when.amount) for fault in faults)


def due(pending: Sequence[Pending], step: int, elapsed_s: float) -> tuple[tuple[Pending, ...], list[Fault]]:
    """The faults due after `step` committed steps and `elapsed_s` seconds, and the pending faults after that.

    Metrics are written several times a second, so several steps may pass between two looks. A repeating fault then
    occurs once per look: the skipped occurrences would all hit the same moment.
    """
    after: list[Pending] = []
    found: list[Fault] = []
    for one in pending:
        now = step if one.fault.when.unit == "step" else elapsed_s
        if one.next is None or now < one.next:
            after.append(one)
            continue
        found.append(one.fault)
        period = one.fault.when.amount
        following = (now // period + 1) * period if one.fault.when.every else None
        after.append(replace(one, next=following, times=one.times + 1))
    return tuple(after), found


def never_due(pending: Sequence[Pending]) -> list[Fault]:
    """The faults that were never due before the run ended."""
    return [one.fault for one in pending if one.times == 0]
