"""A bad cable, for kernels without netem: frames come out late, in order, and some never.

It moves whole frames between two network cards of its namespace, both ways, with the kernel's notes on checksums and
segments (PACKET_VNET_HDR), so that it is no slower than it was told to be. Run by `hosts.Lab.impair`:

    python cable.py port3 jack3 '{"delay_s": 0.02, "jitter_s": 0.005, "loss": 0.01, "bytes_per_s": 0}'
"""

from __future__ import annotations

import contextlib
import json
import random
import select
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass, field

_SOL_PACKET, _VNET_HDR, _IGNORE_OUTGOING = 263, 15, 23
_EVERY_PROTOCOL = 0x0003
_MOST = 80_000  # bytes of one frame: the kernel hands over up to 64 KiB at once
_WAITING_BYTES = 4 << 20  # what a cable may hold; a sender that is faster loses the rest, as on a switch


@dataclass(frozen=True)
class Badness:
    delay_s: float = 0.0
    jitter_s: float = 0.0
    loss: float = 0.0
    """The part of the frames that is lost, 0 to 1."""
    bytes_per_s: float = 0.0
    """0: no limit."""


_DURATIONS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_RATES = {"kbit": 125.0, "mbit": 125e3, "gbit": 125e6}


def parse(words: list[str]) -> Badness:
    """netem's words, as far as a cable knows them.

    >>> parse("delay 20ms 5ms loss 1% rate 10mbit".split())
    Badness(delay_s=0.02, jitter_s=0.005, loss=0.01, bytes_per_s=1250000.0)
    """
    found = {"delay_s": 0.0, "jitter_s": 0.0, "loss": 0.0, "bytes_per_s": 0.0}
    rest = deque(words)
    while rest:
        word = rest.popleft()
        if word == "delay":
            found["delay_s"] = _number(rest.popleft(), _DURATIONS)
            if rest and rest[0][0].isdigit():
                found["jitter_s"] = _number(rest.popleft(), _DURATIONS)
        elif word == "loss":
            found["loss"] = _number(rest.popleft(), {"%": 0.01})
        elif word == "rate":
            found["bytes_per_s"] = _number(rest.popleft(), _RATES)
        else:
            raise ValueError(f"a cable knows delay, loss and rate, not {word!r}")
    return Badness(**found)


def _number(text: str, units: dict[str, float]) -> float:
    for unit, factor in units.items():
        if text.endswith(unit) and text[: -len(unit)].replace(".", "", 1).isdigit():
            return float(text[: -len(unit)]) * factor
    raise ValueError(f"{text!r} has none of the units {', '.join(units)}")


@dataclass
class Way:
    """Frames in one direction."""

    badness: Badness
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)
    held_bytes: int = 0
    free_at: float = 0.0
    """When the frame before has left the sender."""
    last_at: float = 0.0
    """When the frame before comes out: none overtakes another."""

    def put(self, frame: bytes, now: float, chance: random.Random) -> None:
        bad = self.badness
        if chance.random() < bad.loss or self.held_bytes + len(frame) > _WAITING_BYTES:
            return
        self.free_at = max(self.free_at, now) + (len(frame) / bad.bytes_per_s if bad.bytes_per_s else 0.0)
        late = max(0.0, bad.delay_s + chance.uniform(-bad.jitter_s, bad.jitter_s))
        self.last_at = max(self.last_at, self.free_at + late)
        self.held_bytes += len(frame)
        self.waiting.append((self.last_at, frame))

    def take(self, now: float) -> list[bytes]:
        due = []
        while self.waiting and self.waiting[0][0] <= now:
            frame = self.waiting.popleft()[1]
            self.held_bytes -= len(frame)
            due.append(frame)
        return due


def serve(one: str, other: str, badness: Badness) -> None:
    """Until this process is killed."""
    ends = [_card(one), _card(other)]
    ways = [Way(badness), Way(badness)]  # from ends[k] to the other
    chance = random.Random(1)
    print("ready", flush=True)
    while True:
        due = [way.waiting[0][0] for way in ways if way.waiting]
        wait_s = max(0.0, min(due) - time.monotonic()) if due else None
        ready, _, _ = select.select(ends, [], [], wait_s)
        now = time.monotonic()
        for k, end in enumerate(ends):
            if end in ready:
                with contextlib.suppress(OSError):  # a card that was taken down says so, once
                    ways[k].put(end.recv(_MOST), now, chance)
        for k, way in enumerate(ways):
            for frame in way.take(now):
                try:
                    ends[1 - k].send(frame)
                except OSError:  # a card that is down, or full, loses frames
                    continue


def _card(name: str) -> socket.socket:
    card = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY_PROTOCOL))
    card.setsockopt(_SOL_PACKET, _VNET_HDR, 1)
    card.setsockopt(_SOL_PACKET, _IGNORE_OUTGOING, 1)
    card.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _WAITING_BYTES)
    card.bind((name, _EVERY_PROTOCOL))
    return card


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], Badness(**json.loads(sys.argv[3])))
