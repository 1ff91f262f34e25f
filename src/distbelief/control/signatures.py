"""Who says it, and that it is said for the first time: the first frame of every message to a coordinator or a server.

    | role | number | stamp | keyed hash of these and of the message |

The key of the hash is the sender's token, which never travels. Stamps of one sender only go up, so that a message that
comes again is known. No sockets and no clock but that of the signer: a receiver is told the time.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

OWNER, WORKER, SERVER, AGENT = "owner", "worker", "server", "agent"
_CODES = {OWNER: 1, WORKER: 2, SERVER: 3, AGENT: 4}
_ROLES = {code: role for role, code in _CODES.items()}
_HEAD = struct.Struct(">BqQ")
_HASH_BYTES = 32
SEAL_BYTES = _HEAD.size + _HASH_BYTES
REMEMBERED = 10_000
"""Senders. Only those with a token are ever remembered."""

# Why a message is refused.
NO_SEAL = "without a seal"
WRONG_SEAL = "with a wrong seal"
SEEN_BEFORE = "seen before"
TOO_MANY = "too many from one sender"
NOT_ITS_OWN = "in another's name"
NO_MESSAGE = "not a message"
OUT_OF_PLACE = "out of place"

TURNED_AWAY = "connections of strangers"
"""Why a connection is closed (doorkeeper.py): there were too many."""


class Claim(NamedTuple):
    """Who the sender is."""

    role: str
    number: int


class Refused(Exception):
    """A message that counts for nothing; `reason` is one of the above."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def derived(key: bytes, purpose: bytes, what: bytes = b"") -> bytes:
    """32 bytes that follow from a key, and from which it cannot be found. One purpose never gives what another does."""
    return hashlib.blake2b(what, key=key, digest_size=32, person=purpose).digest()


def token_of(key: bytes, role: str, number: int) -> bytes:
    """What a member signs with. An owner's or agent's number only tells one process from another."""
    return derived(key, b"distbelief-token", (role if role in (OWNER, AGENT) else f"{role} {number}").encode())


class Signer:
    _newest = 0
    """Of all in this process: one that is made after the clock was set back is heard all the same."""

    def __init__(self, role: str, number: int, token: bytes, clock: Callable[[], int] = time.time_ns) -> None:
        self._code = _CODES[role]
        self._number = number
        self._token = token
        self._clock = clock
        self._stamp = Signer._newest if clock is time.time_ns else 0

    def seal(self, message: Any) -> bytes:
        self._stamp = max(self._stamp + 1, self._clock())
        if self._clock is time.time_ns:
            Signer._newest = max(Signer._newest, self._stamp)
        head = _HEAD.pack(self._code, self._number, self._stamp)
        return head + _hash(self._token, head, message)


@dataclass
class _Known:
    token: bytes
    stamp: int
    allowance: float
    at: float


class Checker:
    """Looks at seals. `keys`: from which the tokens of each role follow; whoever has no key here is refused. Of one
    sender `burst` messages are heard at once, and `per_s` a second from then on (0: as many as come)."""

    def __init__(self, keys: Mapping[str, bytes], burst: float = 0, per_s: float = 0) -> None:
        self._keys = keys
        self._burst = burst
        self._per_s = per_s
        self._known: dict[Claim, _Known] = {}
        self._floor = 0
        """Of senders that were forgotten, no stamp was higher."""

    def check(self, seal: bytes, message: Any, now: float = 0.0) -> Claim:
        """Whose message it is. Raises Refused."""
        if len(seal) != SEAL_BYTES:
            raise Refused(NO_SEAL)
        code, number, stamp = _HEAD.unpack_from(seal)
        claim = Claim(_ROLES.get(code, ""), number)
        known = self._known.get(claim)
        if known is None:
            if claim.role not in self._keys:
                raise Refused(WRONG_SEAL)
            known = _Known(token_of(self._keys[claim.role], *claim), self._floor, self._burst, now)
        if not hmac.compare_digest(_hash(known.token, seal[: _HEAD.size], message), seal[_HEAD.size :]):
            raise Refused(WRONG_SEAL)
        if stamp <= known.stamp:
            raise Refused(SEEN_BEFORE)
        known.stamp = stamp
        self._remember(claim, known)
        if self._burst:
            known.allowance = min(self._burst, known.allowance + (now - known.at) * self._per_s)
            known.at = now
            if known.allowance < 1:
                raise Refused(TOO_MANY)
            known.allowance -= 1
        return claim

    def _remember(self, claim: Claim, known: _Known) -> None:
        self._known[claim] = known
        if len(self._known) > REMEMBERED:
            oldest = next(iter(self._known))
            self._floor = max(self._floor, self._known.pop(oldest).stamp)


def _hash(token: bytes, head: bytes, message: Any) -> bytes:
    made = hashlib.blake2b(head, key=token, digest_size=_HASH_BYTES)
    made.update(message)
    return made.digest()


class Refusals:
    """How many messages were refused, and why, and how many connections. Said now and then, however many there are."""

    EVERY_S = 5.0

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._said = 0
        self._next = 0.0

    def add(self, reason: str, count: int = 1) -> None:
        self.counts[reason] += count

    def news(self, now: float) -> str:
        """What there is to say now, if it is time to; else nothing."""
        if self.counts.total() == self._said or now < self._next:
            return ""
        self._next = now + self.EVERY_S
        self._said = self.counts.total()
        return described(self.counts)


def described(counts: Mapping[str, int]) -> str:
    """
    >>> described({"with a wrong seal": 3, "not a message": 1})
    'refused 4 messages: 3 with a wrong seal, 1 not a message'
    >>> described({TURNED_AWAY: 7})
    'refused 7 connections of strangers'
    """
    messages = {reason: count for reason, count in counts.items() if reason != TURNED_AWAY}
    said = []
    if total := sum(messages.values()):
        order = sorted(messages.items(), key=lambda one: (-one[1], one[0]))
        reasons = ", ".join(f"{count} {reason}" for reason, count in order)
        said.append(f"{total} message{'s' * (total != 1)}: {reasons}")
    if away := counts.get(TURNED_AWAY, 0):
        said.append(f"{away} {TURNED_AWAY}")
    return f"refused {'; '.join(said)}"
