"""Message authentication and replay protection.

The first frame of every message to a coordinator, a server or a rendezvous is its signature:

    | role | number | stamp | start | keyed hash of these four and of the message |

The hash key is the sender's token, which never travels. `start` is no secret: a process that has the key's secret can
verify messages of other starts with the same key, and so tells an old member from an attacker. Stamps of one sender
only rise, so a receiver recognises a replayed message by its stamp, and drops one that a newer one has overtaken. This
module has no sockets. Only the signer reads a clock; a verifier is given the time.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

OWNER, WORKER, SERVER, AGENT, KEY_HOLDER = "owner", "worker", "server", "agent", "key holder"
_CODES = {OWNER: 1, WORKER: 2, SERVER: 3, AGENT: 4, KEY_HOLDER: 5}
_ROLES = {code: role for role, code in _CODES.items()}
_START_BYTES = 16
_HEAD = struct.Struct(f">BqQ{_START_BYTES}s")
_HASH_BYTES = 32
SIGNATURE_BYTES = _HEAD.size + _HASH_BYTES
REMEMBERED = 100_000
"""The most senders whose last stamp a verifier keeps. Only senders with a valid token take a place. Stamps come from
the senders' clocks: a process whose clock is hours behind is refused only if more senders than this came meanwhile."""

RECENT = 256
"""How many of a sender's last stamps are kept, to tell a message that comes late from one that comes again."""

# Why a message is refused.
UNSIGNED = "unsigned"
WRONG_SIGNATURE = "wrongly signed"
REPLAYED = "replayed"
LATE = "overtaken by a newer message"
"""Sent once, over a connection that was cut: the sender's next connection was faster. No sign of an attack."""
TOO_MANY = "above the rate limit of one sender"
WRONG_SENDER = "in another member's name"
MALFORMED = "malformed"
UNEXPECTED = "unexpected"
TOO_LONG = "too long"
OTHER_START = "of another start with the same key"

CONNECTIONS_CLOSED = "unauthenticated connections"
"""Not a message: connections that connectionlimit.py closed because there were too many."""


class Sender(NamedTuple):
    """The authenticated sender of a message."""

    role: str
    number: int


class Refused(Exception):
    """A message that is dropped; `reason` is one of the texts above. `sender`: if it is known."""

    def __init__(self, reason: str, sender: Sender | None = None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.sender = sender


def derive_key(key: bytes, purpose: bytes, what: bytes = b"") -> bytes:
    """32 bytes that follow from a key and do not reveal it. Different purposes give unrelated keys."""
    return hashlib.blake2b(what, key=key, digest_size=32, person=purpose).digest()


def derive_token(key: bytes, role: str, number: int) -> bytes:
    """The token with which a process signs. All owners share one token, and so do all agents and all key holders."""
    return derive_key(key, b"distbelief-token", (f"{role} {number}" if role in (WORKER, SERVER) else role).encode())


class Signer:
    _newest = 0
    """The highest stamp of any signer in this process: also after the clock was set back, every stamp is above it."""

    def __init__(
        self, role: str, number: int, token: bytes, clock: Callable[[], int] = time.time_ns, start: str = ""
    ) -> None:
        """`start`: see `credentials.Authority`."""
        self._start = start.encode()
        self._code = _CODES[role]
        self._number = number
        self._token = token
        self._clock = clock
        self._stamp = 0

    def sign(self, message: Any) -> bytes:
        if self._clock is time.time_ns:
            self._stamp = Signer._newest = max(self._stamp + 1, Signer._newest + 1, time.time_ns())
        else:
            self._stamp = max(self._stamp + 1, self._clock())
        head = _HEAD.pack(self._code, self._number, self._stamp, self._start)
        return head + _hash(self._token, head, message)


@dataclass(slots=True)
class _Known:
    token: bytes
    stamp: int
    allowance: float
    at: float
    recent: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))
    """The stamps of the last messages, in the order in which they came."""


class Verifier:
    """Verifies signatures.

    `keys` gives for each role the key from which its tokens are derived; roles without a key are refused. `burst` and
    `per_s` limit the rate of each sender: `burst` messages at once, then `per_s` per second (0: no limit). `of_start`:
    gives the key of another start of the run, for all roles but key holders.
    """

    def __init__(
        self,
        keys: Mapping[str, bytes],
        burst: float = 0,
        per_s: float = 0,
        of_start: Callable[[str], bytes] | None = None,
    ) -> None:
        self._keys = keys
        self._of_start = of_start
        self._burst = burst
        self._per_s = per_s
        self._known: dict[Sender, _Known] = {}
        self._floor = 0
        """The highest stamp of the senders that were forgotten: a sender that is not known must be above it."""

    def verify(self, signature: bytes, message: Any, now: float = 0.0) -> Sender:
        """Returns the message's sender. Raises Refused."""
        if len(signature) != SIGNATURE_BYTES:
            raise Refused(UNSIGNED)
        code, number, stamp, start = _HEAD.unpack_from(signature)
        sender = Sender(_ROLES.get(code, ""), number)
        known = self._known.get(sender)
        if known is None:
            if sender.role not in self._keys:
                raise Refused(WRONG_SIGNATURE)
            known = _Known(derive_token(self._keys[sender.role], *sender), self._floor, self._burst, now)
        if not _is_signed(known.token, signature, message):
            if self._of_start and sender.role != KEY_HOLDER:
                key = self._of_start(start.rstrip(b"\0").decode(errors="replace"))
                if _is_signed(derive_token(key, *sender), signature, message):
                    raise Refused(OTHER_START, sender)
            raise Refused(WRONG_SIGNATURE)
        if stamp <= known.stamp:
            raise Refused(_why_old(known, stamp))
        known.stamp = stamp
        known.recent.append(stamp)
        self._remember(sender, known)
        if self._burst:
            known.allowance = min(self._burst, known.allowance + (now - known.at) * self._per_s)
            known.at = now
            if known.allowance < 1:
                raise Refused(TOO_MANY)
            known.allowance -= 1
        return sender

    def _remember(self, sender: Sender, known: _Known) -> None:
        self._known.pop(sender, None)
        self._known[sender] = known  # at the end: the longest silent sender is forgotten first
        if len(self._known) > REMEMBERED:
            oldest = next(iter(self._known))
            self._floor = max(self._floor, self._known.pop(oldest).stamp)


def _why_old(known: _Known, stamp: int) -> str:
    if not known.recent or stamp in known.recent or stamp < min(known.recent):
        return REPLAYED
    known.recent.append(stamp)
    return LATE


def _is_signed(token: bytes, signature: bytes, message: Any) -> bool:
    return hmac.compare_digest(_hash(token, signature[: _HEAD.size], message), signature[_HEAD.size :])


def _hash(token: bytes, head: bytes, message: Any) -> bytes:
    made = hashlib.blake2b(head, key=token, digest_size=_HASH_BYTES)
    made.update(message)
    return made.digest()


class Refusals:
    """Counts refused messages by reason, and closed connections, and limits how often the counts are reported."""

    EVERY_S = 5.0

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._reported = 0
        self._next = 0.0

    def add(self, reason: str, count: int = 1) -> None:
        if reason != LATE:  # dropped without a word
            self.counts[reason] += count

    def news(self, now: float) -> str:
        """A line about all refusals so far, if there are new ones and the last line is EVERY_S old; else ""."""
        if self.counts.total() == self._reported or now < self._next:
            return ""
        self._next = now + self.EVERY_S
        self._reported = self.counts.total()
        return described(self.counts)


def described(counts: Mapping[str, int]) -> str:
    """
    >>> described({"wrongly signed": 3, "malformed": 1})
    'refused 4 messages: 3 wrongly signed, 1 malformed'
    >>> described({CONNECTIONS_CLOSED: 7})
    'refused 7 unauthenticated connections'
    """
    messages = {reason: count for reason, count in counts.items() if reason != CONNECTIONS_CLOSED}
    parts = []
    if total := sum(messages.values()):
        order = sorted(messages.items(), key=lambda one: (-one[1], one[0]))
        reasons = ", ".join(f"{count} {reason}" for reason, count in order)
        parts.append(f"{total} message{'s' * (total != 1)}: {reasons}")
    if closed := counts.get(CONNECTIONS_CLOSED, 0):
        parts.append(f"{closed} {CONNECTIONS_CLOSED}")
    return f"refused {'; '.join(parts)}"
