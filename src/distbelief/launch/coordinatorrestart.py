"""Keeping a coordinator: another one takes the run over from the journal when it dies, at the same address."""

from __future__ import annotations

import time
from collections.abc import Callable

from distbelief.control.credentials import Authority
from distbelief.errors import RunFailed
from distbelief.launch.launch import Launch
from distbelief.launch.processes import CoordinatorProcess, LogPipe
from distbelief.launch.rundir import ended
from distbelief.launch.signals import sheltered

SHORT_LIFE_S = 2.0  # a coordinator that ends by itself so soon would do so again
MOST_SHORT_LIVES = 5


class CoordinatorKeeping:
    def __init__(self, launch: Launch, authority: Authority, host: str, log: Callable[[str], LogPipe]) -> None:
        self._run_dir = launch.run_dir
        self._shelters = launch.placement.shelters
        self._log = log
        self._short_lives = 0
        self._order = {
            "run_dir": str(launch.run_dir),
            "secret": authority.secret.hex(),
            "start": authority.start,
            "config": launch.run_config(),
            "listen": launch.placement.listen,
            "resume": launch.options.strategy if launch.resumed else "",
            "host": host,
        }
        self._start()

    def _start(self) -> None:
        with sheltered(self._shelters):
            self._process = CoordinatorProcess(self._order, self._log("coordinator"))

    def address(self) -> str:
        """Where it listens; waits until it says so. A later one listens there too."""
        address = self._order["listen"] = self._process.address()
        self._order["resume"] = ""  # once
        return address

    def kill(self) -> None:
        self._process.kill()

    def has_died(self) -> bool:
        """It has ended although the run has not."""
        return self._process.ended() and not ended(self._run_dir)

    def has_ended(self) -> bool:
        return self._process.ended()

    def start_again(self) -> None:
        lived_s = time.monotonic() - self._process.started_at
        if not self._process.was_killed:
            self._short_lives = self._short_lives + 1 if lived_s < SHORT_LIFE_S else 0
        if self._short_lives >= MOST_SHORT_LIVES:
            raise RunFailed(
                f"the coordinator died {self._short_lives} times within seconds",
                hint=f"see {self._run_dir}/logs/coordinator.log",
            )
        self._process.close()
        self._start()

    def close(self) -> None:
        self._process.close()
