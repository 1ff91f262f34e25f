"""Decides from measurements whether compression pays. Pure: measurements are arguments, and there is no clock.

A byte of a vector takes 1/link seconds uncompressed, and codec + 1/(ratio × link) seconds compressed. Seconds and bytes
are summed up and decay by half every few messages, so large messages count more than small ones and one slow message
counts little. Compression goes off only when it clearly costs time, and on again only when it clearly saves time.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

FADE = 0.9
"""Factor on the weight of all earlier messages after each new one: one half after seven messages."""
ON, OFF = 1.15, 0.95
"""Compression goes on above the first gain and off below the second."""
ENOUGH = 3
"""Messages before the first decision: the first ones warm up caches and connections."""
PROBE = 200
"""After this number of messages without a measurement of the codec, one probe is due: the old measurement may come from
a time when the machine was busy.
"""


@dataclass(frozen=True)
class Message:
    """One vector that was sent, compressed or not. `codec_s`: seconds for encoding and decoding together; None if the
    vector was not compressed. A probe is compressed, measured and then sent uncompressed."""

    vector_bytes: int
    wire_bytes: int
    wire_s: float
    codec_s: float | None = None
    encoded_bytes: int | None = None


@dataclass(frozen=True)
class _Totals:
    """A ratio of two decaying sums."""

    amount: float = 0.0
    per: float = 0.0

    def plus(self, amount: float, per: float) -> _Totals:
        return _Totals(FADE * self.amount + amount, FADE * self.per + per)

    @property
    def rate(self) -> float:
        return self.amount / self.per if self.per > 0 else 0.0


@dataclass(frozen=True)
class Switch:
    """Whether compression is on, and why. Immutable: each message gives a new value.

    >>> switch = Switch("int8")
    >>> for _ in range(5):
    ...     switch = switch.after(Message(4_000_000, 1_000_000, wire_s=0.08, codec_s=0.002))
    >>> print(switch.why)
    int8 is on: the link carries 12.5 MB/s, 4.0 times fewer bytes go over it, and messages take 3.9 times less time
    """

    name: str
    on: bool = True
    messages: int = 0
    unmeasured: int = 0
    link: _Totals = field(default=_Totals())
    """Seconds per byte on the wire."""
    codec: _Totals = field(default=_Totals())
    """Seconds of encoding and decoding per byte of a vector."""
    size: _Totals = field(default=_Totals())
    """Encoded bytes per byte of a vector."""

    def after(self, message: Message) -> Switch:
        seen = replace(self, messages=self.messages + 1, unmeasured=self.unmeasured + 1)
        if message.wire_bytes > 0:
            seen = replace(seen, link=self.link.plus(max(message.wire_s, 0.0), message.wire_bytes))
        if message.codec_s is not None and message.vector_bytes > 0:
            encoded = message.wire_bytes if message.encoded_bytes is None else message.encoded_bytes
            # Old measurements are dropped. If this one is wrong, later ones correct it.
            codec, size = (_Totals(), _Totals()) if self.probe_due else (self.codec, self.size)
            seen = replace(
                seen,
                unmeasured=0,
                codec=codec.plus(max(message.codec_s, 0.0), message.vector_bytes),
                size=size.plus(encoded, message.vector_bytes),
            )
        return seen if not seen.knows else replace(seen, on=seen.gain > (OFF if seen.on else ON))

    @property
    def knows(self) -> bool:
        return self.messages >= ENOUGH and self.codec.per > 0 and self.link.per > 0

    @property
    def probe_due(self) -> bool:
        """Whether the next message, though sent uncompressed, should be compressed once to measure the codec."""
        return not self.on and self.unmeasured >= PROBE

    @property
    def gain(self) -> float:
        """The time of an uncompressed message divided by the time of a compressed one, with encoding and decoding."""
        compressed = self.codec.rate + self.size.rate * self.link.rate
        return self.link.rate / compressed if compressed > 0 else 1.0

    @property
    def why(self) -> str:
        """One line of text for people."""
        state = f"{self.name} is {'on' if self.on else 'off'}"
        if not self.knows:
            return f"{state}: too little is measured yet"
        ratio = 1 / self.size.rate if self.size.rate > 0 else float("inf")
        link = f"the link carries {_speed(self.link.rate)}"
        if self.on:
            times = f"{self.gain:.1f} times less time" if self.gain >= 1.05 else "about the same time"
            return f"{state}: {link}, {ratio:.1f} times fewer bytes go over it, and messages take {times}"
        return f"{state}: {link}, and compressing {_speed(self.codec.rate)}: it would save no time"


def _speed(seconds_per_byte: float) -> str:
    if seconds_per_byte <= 0:
        return "more than can be measured"
    speed = 1e-6 / seconds_per_byte
    return f"{speed / 1000:.1f} GB/s" if speed >= 999.95 else f"{speed:.1f} MB/s"
