"""Leading a run: the coordinator, and the agent of this host, in the process that was asked to train.

This is the local engine, and the core of the other engines, which only bring agents of other hosts. It starts the
coordinator, restarts it when it dies, has members started on this host, and shows progress. One thread, one poll loop;
leaving it leaves no process and no shared-memory segment behind.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shlex
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distbelief.control.addresses import host_name
from distbelief.control.credentials import KeyAuthority
from distbelief.control.keyfiles import read_key, run_secret
from distbelief.control.messages import SECRET_BYTES, StopRequested
from distbelief.coordinator.rules.saving import STOP_S
from distbelief.errors import RunFailed
from distbelief.launch.agent import GRACE_S, HASTE_S, Agent, Room, signal_name
from distbelief.launch.launch import Launch, Observer
from distbelief.launch.pollloop import Signals, signals_blocked
from distbelief.launch.processes import CoordinatorProcess, LogPipe, NotStarted
from distbelief.launch.rules.restarting import HOPELESS_S, ShortLives, Silence
from distbelief.launch.rundir import ended, verdict
from distbelief.steadyclock import CLOCK

REFRESH_S = 0.2
START_AGAIN_S = 1.0  # after a start of the coordinator that the kernel has refused

Announce = Callable[[str, KeyAuthority], None]


def lead(
    launch: Launch,
    observer: Observer,
    announce: Announce | None = None,
    *,
    authority: KeyAuthority | None = None,
    signals: Signals | None = None,
) -> dict[str, Any]:
    """Run to the end. Returns the journal's last record; raises when the run did not complete.

    `announce` is called with the coordinator's address and the authority as soon as other hosts' agents can join.
    `authority`: of a run that another process has made. `signals`: where another process asks this one to stop; by
    default this process's own signals.
    """
    with signals or Signals() as signals, _Lead(launch, observer, signals, authority or authority_of(launch)) as run:
        observer.started(launch.run_dir, launch.options.workers)
        if launch.in_the_clear:
            observer.log("security", launch.in_the_clear)
        if launch.not_rechecked:
            observer.log("recheck", launch.not_rechecked)
        address = run.start()
        if announce:
            announce(address, run.authority)
        elif launch.takes_hosts:
            where = address.removeprefix("tcp://")
            key = " --key FILE" if launch.placement.key_file else ""
            observer.log("coordinator", f"listens at {where}: distbelief worker --join {where}{key}")
        run.loop()
    return verdict(launch.run_dir, signals, run.failure)


def authority_of(launch: Launch) -> KeyAuthority:
    """For one start of the run: from the key file, or from a new secret."""
    secret = (
        run_secret(read_key(Path(launch.placement.key_file)))
        if launch.placement.key_file
        else secrets.token_bytes(SECRET_BYTES)
    )
    return KeyAuthority(secret, start=secrets.token_hex(8))


class _Lead:
    def __init__(self, launch: Launch, observer: Observer, signals: Signals, authority: KeyAuthority) -> None:
        self.authority = authority
        self._launch = launch
        self._observer = observer
        self._signals = signals
        self._stack = contextlib.ExitStack()
        self._host = launch.placement.host or host_name()
        self._silence = Silence(time.monotonic())
        self._next_start = 0.0
        self._not_started = ""
        """Why the coordinator cannot be started again."""

    def __enter__(self) -> _Lead:
        return self

    def start(self) -> str:
        """Start coordinator and zygote side by side: importing torch is the longest part of a launch. Returns the
        coordinator's address."""
        launch, place = self._launch, self._launch.placement
        room = Room(place.room, 0 if place.local_workers == 0 else place.local_servers)
        self._agent = Agent(launch, self._host, self.authority.run, room, self._observer.log, self._cannot_host)
        self._stack.callback(self._agent.close)
        self._coordinator = RestartingCoordinator(launch, self.authority, self._host, self._agent.log)
        self._stack.callback(self._coordinator.close)
        address = self._coordinator.address()
        self._agent.poll.watch(self._signals.wake_fd, self._stop)
        self._agent.begin(address)
        if not launch.resumed:  # a resumed run has its members in the journal
            self._start_first()
        self._agent.attach()
        return address

    def _start_first(self) -> None:
        options, place = self._launch.options, self._launch.placement
        workers = options.workers if place.local_workers < 0 else min(place.local_workers, options.workers)
        for worker in range(workers):
            self._agent.hosting.start("worker", worker)
        servers = self._launch.strategy.servers if workers else 0
        for server in range(servers if place.local_servers < 0 else min(place.local_servers, servers)):
            self._agent.hosting.start("server", server)

    def loop(self) -> None:
        """Serve until the coordinator has ended the run and every process is gone."""
        agent, next_refresh = self._agent, 0.0
        while not agent.done:
            agent.serve(REFRESH_S)
            now = time.monotonic()
            if now >= next_refresh:
                next_refresh = now + REFRESH_S
                self._observer.refresh()
            if agent.ended:
                continue
            is_silent = self._silence.is_too_long(now, agent.answered_at)
            if not self._coordinator.serves():
                self._silence.begin()
            elif is_silent:
                self._silence.begin()
                self._coordinator.kill()
            if self._silence.is_hopeless:
                self._agent.finish(HASTE_S)
                raise RunFailed(
                    f"no coordinator has answered for {HOPELESS_S:.0f} s"
                    + (f": {self._not_started}" if self._not_started else ""),
                    hint=f"see {self._launch.run_dir}/logs/coordinator.log: is the disk full? "
                    f"Then `distbelief resume {shlex.quote(str(self._launch.run_dir))}` goes on",
                )
            if self._coordinator.has_ended():
                self._coordinator_ended()

    @property
    def failure(self) -> str:
        """Why the run has failed, as the coordinator said it; its journal may lack that if the disk has failed."""
        outcome = self._agent.outcome
        return outcome.reason if outcome is not None and outcome.status == "failed" else ""

    def _coordinator_ended(self) -> None:
        """The coordinator has ended the run; or it has died, and another one continues the run from the journal."""
        self._agent.hear()  # its last messages may still be in the socket
        if self._agent.ended:
            return
        if not self._coordinator.has_died():
            # The end is in the journal; only the workers of this host do not know it yet, and they are ended.
            self._agent.finish()
            return
        if time.monotonic() < self._next_start:
            return
        try:
            self._coordinator.start_again()
        except NotStarted as error:  # the members train on without it
            self._next_start = time.monotonic() + START_AGAIN_S
            if not self._not_started:
                again = f"it is tried again every {START_AGAIN_S:.0f} s, for {HOPELESS_S:.0f} s; the members train on"
                self._observer.log("coordinator", f"{error.message}; {again}: {error.hint}")
            self._not_started = error.message
            return
        except RunFailed:
            self._agent.finish(HASTE_S)
            raise
        self._not_started = ""
        self._silence.begin()
        self._agent.attach()  # the report waits in the socket until the coordinator listens

    def _stop(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._signals.wake_fd)
        word = StopRequested(f"{signal_name(self._signals.received)} received", at_once=self._signals.count > 1)
        self._agent.repeated_events = [word]
        self._agent.send(word)
        grace_s = GRACE_S if self._signals.count == 1 else 0.0
        if grace_s and self._launch.options.saves:  # the coordinator ends the run earlier if a checkpoint is sealed
            grace_s += 10 * STOP_S
        self._agent.finish_by(grace_s)

    def _cannot_host(self) -> None:
        word = StopRequested("the process that starts workers has died", at_once=True)
        self._agent.repeated_events = [word]
        self._agent.send(word)
        self._agent.finish_by(GRACE_S)  # the coordinator journals the reason, and ends the run earlier

    def __exit__(self, *_: object) -> None:
        """Ends every process that was started here, also after an exception."""
        self._stack.close()
        self._observer.refresh()


class RestartingCoordinator:
    """The coordinator's process. When it dies, another one continues the run from the journal, at the same address."""

    def __init__(self, launch: Launch, authority: KeyAuthority, host: str, log: Callable[[str], LogPipe]) -> None:
        self._run_dir = launch.run_dir
        self._blocks_signals = launch.placement.blocks_signals
        self._log = log
        self._short_lives = ShortLives()
        self._is_closed = False
        """Whether the last process is over and none could be started since."""
        self._order = {
            "run_dir": str(launch.run_dir),
            "secret": authority.secret.hex(),
            "start": authority.start,
            "config": launch.run_config(),
            "listen": launch.placement.listen,
            "resume": launch.options.strategy if launch.resumed else "",
            "host": host,
            "clock_offset_s": CLOCK.offset_s,
        }
        self._start()

    def _start(self) -> None:
        with signals_blocked(self._blocks_signals):
            self._process = CoordinatorProcess(self._order, self._log("coordinator"))

    def address(self) -> str:
        """The coordinator's address; waits until the coordinator reports it. A later coordinator uses the same
        address."""
        address = self._order["listen"] = self._process.address()
        self._order["resume"] = ""  # once
        return address

    def kill(self) -> None:
        self._process.kill()

    def serves(self) -> bool:
        return not self._is_closed and self._process.serves()

    def has_died(self) -> bool:
        """Whether the coordinator has ended although the run has not."""
        return self._process.ended() and not ended(self._run_dir)

    def has_ended(self) -> bool:
        return self._process.ended()

    def start_again(self) -> None:
        """After its death. Raises NotStarted if the kernel refuses; the caller may try again."""
        if not self._is_closed:
            lived_s = time.monotonic() - self._process.started_at
            if self._short_lives.died(lived_s, self._process.was_killed):
                raise RunFailed(
                    f"the coordinator died {self._short_lives.count} times within seconds",
                    hint=f"see {self._run_dir}/logs/coordinator.log",
                )
            self._process.close()
            self._is_closed = True
        self._start()
        self._is_closed = False

    def close(self) -> None:
        self._process.close()
