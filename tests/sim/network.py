"""Lines between the coordinator and everybody else: late, cut and, in a harsh world, lossy and out of order.

A real line is TCP: in order, and nothing is lost unless it breaks. The harsh kind drops, doubles and reorders single
messages besides, which the rules must survive all the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.sim.clock import Clock

HELD_S = 0.05
"""A message that waits for a broken line tries again after this long beyond its repair."""


@dataclass(frozen=True)
class Weather:
    """How bad the lines are. All zero: in order and without loss."""

    drop: float = 0.0
    double: float = 0.0
    late: float = 0.0
    late_s: float = 0.0
    latency_s: float = 0.001

    @property
    def harsh(self) -> bool:
        return self.drop > 0 or self.double > 0 or self.late > 0


class Network:
    def __init__(self, clock: Clock, rng: random.Random, weather: Weather) -> None:
        self.weather = weather
        self.cut_until: dict[int, float] = {}
        """Worker -> when its line is whole again."""
        self.lost = 0
        self.was_harsh = weather.harsh
        self._clock = clock
        self._rng = rng
        self._last: dict[tuple[int, bool], float] = {}

    def clear(self) -> None:
        """The faults are over: from now on everything arrives, in order."""
        self.weather = Weather(latency_s=self.weather.latency_s)

    def cut(self, worker: int, duration_s: float) -> None:
        self.cut_until[worker] = self._clock.now + duration_s

    def send(self, worker: int, upward: bool, deliver: Callable[..., None], *message: Any) -> None:
        """`worker`: whose line it is (-1: the engine's); `upward`: to the coordinator."""
        clock, rng, weather = self._clock, self._rng, self.weather
        delay_s = weather.latency_s * (0.5 + rng.random())
        if weather.harsh:
            if rng.random() < weather.drop:
                self.lost += 1
                return
            if rng.random() < weather.double:
                clock.after(delay_s + weather.late_s * rng.random(), self._arrive, worker, deliver, message)
            if rng.random() < weather.late:
                delay_s += weather.late_s * rng.random()
        else:
            line = worker, upward
            at = max(clock.now + delay_s, self._last.get(line, 0.0))
            self._last[line] = at
            delay_s = at - clock.now
        clock.after(delay_s, self._arrive, worker, deliver, message)

    def _arrive(self, worker: int, deliver: Callable[..., None], message: tuple[Any, ...]) -> None:
        until = self.cut_until.get(worker)
        if until is None or until <= self._clock.now:
            deliver(*message)
        elif self._rng.random() < 0.5:
            self.lost += 1  # it was in a buffer of the connection that broke
        else:
            self._clock.after(until - self._clock.now + HELD_S, self._arrive, worker, deliver, message)
