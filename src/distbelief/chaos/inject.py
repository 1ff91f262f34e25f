"""Injects the faults of a schedule into a run of this process, from a thread beside the engine's loop.

The thread reads the step and the members from the run directory. It acts with signals, requests for a number of
workers, and a relay that can be cut. A fault with a number hits that worker, or a living worker if that one is gone. A
fault without a number hits a random worker. A fault that may end a worker waits until another worker would remain, and
a fault that ends a parameter server waits until other servers have all of its data. `random_schedule` makes schedules.
"""

from __future__ import annotations

import contextlib
import os
import random
import select
import signal
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

import distbelief.chaos.rules.schedule as timeline
from distbelief.chaos.falseclock import FalseClock
from distbelief.chaos.follow import RunFollower, Seen
from distbelief.chaos.fulldisk import FullDisk
from distbelief.chaos.relay import Relay
from distbelief.chaos.rules.schedule import KINDS, WORKER_FAULTS, Fault, When, write
from distbelief.chaos.rules.verdict import ENDS_A_WORKER, Note, Record
from distbelief.chaos.terminal import Terminals
from distbelief.errors import DistBeliefError
from distbelief.lifeline import READER
from distbelief.steadyclock import CLOCK

# --- signals to processes of this run -----------------------------------------------------------------------------
# A process is held by a pidfd from the moment its id is first read, so no signal can reach another process
# that was given the same id. Only descendants of this process can be held. The caller decides the process and the time.

RUN_SLICE_S = 0.004


class Victim:
    """One living process. Stops are counted: the process continues when every stop was released."""

    def __init__(self, pid: int, fd: int) -> None:
        self.pid = pid
        self._fd = fd
        self._holds = 0
        self._lock = threading.Lock()

    @property
    def alive(self) -> bool:
        """Whether the process runs. A zombie counts as dead: it does nothing any more."""
        with self._lock:
            if self._fd < 0:
                return False
            exit_seen = select.poll()
            exit_seen.register(self._fd, select.POLLIN)
            return not exit_seen.poll(0)

    def kill(self) -> bool:
        with self._lock:
            return self._send(signal.SIGKILL)

    def ask_to_leave(self) -> bool:
        with self._lock:
            return self._send(signal.SIGTERM)

    def hold(self) -> None:
        with self._lock:
            self._holds += 1
            if self._holds == 1:
                self._send(signal.SIGSTOP)

    def let_go(self) -> None:
        with self._lock:
            self._holds -= 1
            if self._holds == 0:
                self._send(signal.SIGCONT)

    def close(self) -> None:
        """Let the process run and release it; may be called twice."""
        with self._lock:
            if self._fd >= 0:
                if self._holds:
                    self._send(signal.SIGCONT)
                os.close(self._fd)
                self._fd = -1

    def _send(self, number: signal.Signals) -> bool:
        if self._fd < 0:
            return False
        try:
            signal.pidfd_send_signal(self._fd, number)
        except ProcessLookupError:
            return False
        return True


def catch(pid: int) -> Victim | None:
    """Hold a descendant process; None if it is gone or is no descendant."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return None
    # The id cannot be reused between these two lines without the descriptor reporting the process's end.
    victim = Victim(pid, fd)
    ours = False
    with contextlib.suppress(psutil.Error):
        ours = any(parent.pid == os.getpid() for parent in psutil.Process(pid).parents())
    if not ours or not victim.alive:
        victim.close()
        return None
    return victim


class Throttle:
    """Let a process run for 1/factor of the time, in slices of a few milliseconds, until `end` is called."""

    def __init__(self, victim: Victim, factor: float) -> None:
        self._victim = victim
        self._factor = factor
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"slow {victim.pid}", daemon=True)
        self._thread.start()

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        running_since = time.monotonic()
        while self._victim.alive and not self._over.is_set():
            self._over.wait(RUN_SLICE_S)
            self._victim.hold()
            # The pause follows the real length of the slice: timers are late on a busy machine, the ratio is not.
            self._over.wait((time.monotonic() - running_since) * (self._factor - 1))
            running_since = time.monotonic()
            self._victim.let_go()


POLL_S = 0.01
ASK_AGAIN_S = 0.1
ASKING_S = 30.0  # the coordinator may be restarting at that moment, because another sentence killed it


@dataclass
class _Lasting:
    """A fault in progress: the action that ends it, and its end (monotonic clock)."""

    ends_at: float
    worker: int
    undo: Callable[[], object]
    hurts: bool


class Injector:
    """A context manager around the run. Afterwards `notes` lists the injected faults, and `missed` the others.

    `ask` requests a number of workers from the coordinator; it returns the reason of a refusal, or "".
    """

    def __init__(
        self,
        run_dir: Path,
        faults: Sequence[Fault],
        *,
        workers: int,
        seed: int,
        relay: Relay | None,
        clock: FalseClock | None = None,
        terminals: Terminals | None = None,
        ask: Callable[[int], str],
        say: Callable[[str], None],
    ) -> None:
        self.notes: list[Note] = []
        self._run_dir = run_dir
        self._follower = RunFollower(run_dir)
        self._pending = timeline.begin(faults)
        self._waiting: list[Fault] = []
        self._workers = workers
        self._wanted = workers
        self._dice = random.Random(seed)
        self._relay = relay
        self._clock = clock
        self._terminals = terminals
        self._dropped_in = 0
        """The generation that lost its terminal last."""
        self._ask = ask
        self._say = say
        self._victims: dict[int, Victim | None] = {}
        self._gone: set[int] = set()  # killed or removed; the process may live on for a moment
        self._coordinator_killed = 0
        self._servers_killed: set[int] = set()
        self._lasting: list[_Lasting] = []
        self._asking: list[threading.Thread] = []
        self._failure: BaseException | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="faults", daemon=True)

    def __enter__(self) -> Injector:
        self._thread.start()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self._over.set()
        self._thread.join()
        for thread in self._asking:
            thread.join()
        if self._failure is not None and error is None:
            raise self._failure

    @property
    def missed(self) -> list[str]:
        """The sentences that were not carried out, each with the reason."""
        late = [f"{fault} (the run ended before)" for fault in timeline.never_due(self._pending)]
        return late + [f"{fault} ({_why_not(fault)})" for fault in self._waiting]

    @property
    def journal(self) -> list[Record]:
        """The journal's records seen so far."""
        self._follower.poll()
        return self._follower.records

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._over.wait(POLL_S):
                self._look()
        except BaseException as error:  # the starting thread raises it again
            self._failure = error
        finally:
            for one in self._lasting:
                one.undo()
            for victim in self._victims.values():
                if victim is not None:
                    victim.close()

    def _look(self) -> None:
        seen = self._follower.poll()
        if seen.ended:  # it may be resumed: the thread goes on
            for one in self._lasting:
                one.undo()
            self._lasting = []
        if seen.started_at is None or seen.ended:
            return
        for worker, pid in seen.members.items():
            if worker not in self._victims:
                self._victims[worker] = catch(pid)
        if self._relay is not None and (coordinator := self._follower.coordinator()):
            self._relay.moved(str(coordinator["address"]))
        for one in [one for one in self._lasting if time.monotonic() >= one.ends_at]:
            self._lasting.remove(one)
            one.undo()
        self._pending, found = timeline.due(self._pending, seen.step, CLOCK.now() - seen.started_at)
        self._waiting = [fault for fault in self._waiting + found if not self._carry_out(fault, seen)]

    def _carry_out(self, fault: Fault, seen: Seen) -> bool:
        """Carry out a fault. False: it is impossible now; the next look tries again."""
        match fault.kind:
            case "kill coordinator":
                return self._kill_coordinator(fault)
            case "kill server":
                return self._kill_server(fault, seen)
            case "fill disk":
                return self._fill_disk(fault)
            case "set clock":
                return self._set_clock(fault)
            case "drop terminal":
                return self._drop_terminal(fault, seen)
            case "join" | "scale":
                self._wanted = fault.count if fault.kind == "scale" else self._wanted + 1
                self._note(fault, f"asked for {self._wanted} workers")
                self._asking.append(threading.Thread(target=self._request, args=(self._wanted,), daemon=True))
                self._asking[-1].start()
                return True
        worker = self._choose(fault, seen)
        victim = None if worker is None else self._victims[worker]
        if worker is None or victim is None:
            return False
        if fault.kind == "kill reader":
            return self._kill_reader(fault, worker, victim)
        self._note(fault, f"worker {worker}, process {victim.pid}", worker)
        self._strike(fault, worker, victim)
        return True

    def _strike(self, fault: Fault, worker: int, victim: Victim) -> None:
        match fault.kind:
            case "kill worker":
                self._gone.add(worker)
                victim.kill()
            case "leave worker":
                self._gone.add(worker)
                self._wanted = max(1, self._wanted - 1)
                victim.ask_to_leave()
            case "freeze worker":
                victim.hold()
                self._lasts(fault, worker, victim.let_go)
            case "slow worker":
                self._lasts(fault, worker, Throttle(victim, fault.factor).end)
            case "cut worker":
                relay = self._relay
                assert relay is not None
                relay.cut(worker)
                self._lasts(fault, worker, lambda: relay.mend(worker))

    def _lasts(self, fault: Fault, worker: int, undo: Callable[[], object]) -> None:
        ends_at = float("inf") if fault.for_s is None else time.monotonic() + fault.for_s
        self._lasting.append(_Lasting(ends_at, worker, undo, fault.kind in ENDS_A_WORKER))

    def _choose(self, fault: Fault, seen: Seen) -> int | None:
        living = [w for w in sorted(seen.members) if w not in self._gone and self._lives(w)]
        hurt = {one.worker for one in self._lasting if one.hurts}
        if fault.kind in (*ENDS_A_WORKER, "leave worker") and self._workers > 1:
            allowed = [w for w in living if any(other != w and other not in hurt for other in living)]
        else:
            allowed = living
        if fault.worker in living or not allowed:
            return fault.worker if fault.worker in allowed else None
        if fault.worker is not None:
            return allowed[fault.worker % len(allowed)]
        return self._dice.choice([w for w in allowed if w not in hurt] or allowed)

    def _lives(self, worker: int) -> bool:
        victim = self._victims.get(worker)
        return victim is not None and victim.alive

    def _kill_coordinator(self, fault: Fault) -> bool:
        found = self._follower.coordinator()
        # The old process id stays in the file until the next server is up; for a moment that server still seems alive.
        if found is None or int(found["pid"]) == self._coordinator_killed:
            return False
        victim = catch(int(found["pid"]))
        if victim is None:
            return False
        self._coordinator_killed = victim.pid
        self._note(fault, f"process {victim.pid}")
        victim.kill()
        victim.close()
        return True

    def _kill_reader(self, fault: Fault, worker: int, of: Victim) -> bool:
        found: list[int] = []
        with contextlib.suppress(psutil.Error):
            children = psutil.Process(of.pid).children(recursive=True)
            found = sorted(child.pid for child in children if child.name() == READER)
        victim = catch(self._dice.choice(found)) if found else None
        if victim is None:
            return False
        self._note(fault, f"worker {worker}, reader process {victim.pid}")
        victim.kill()
        victim.close()
        return True

    def _set_clock(self, fault: Fault) -> bool:
        assert self._clock is not None
        self._clock.turn(fault.by_s)
        self._note(fault, f"now {self._clock.ahead_s / 3600:+.1f} h off")
        return True

    def _drop_terminal(self, fault: Fault, seen: Seen) -> bool:
        assert self._terminals is not None
        if seen.generation <= self._dropped_in:
            return False  # the run was resumed, or is being resumed, and does not train yet
        self._dropped_in = seen.generation
        self._note(fault, "the run saves and stops, and is resumed")
        return self._terminals.drop()

    def _kill_server(self, fault: Fault, seen: Seen) -> bool:
        living = [number for number in sorted(seen.servers) if number not in self._servers_killed]
        if not seen.doubled or len(living) < len(seen.servers):
            return False  # a copy is under way, or the map still has the last server that was killed
        if fault.worker is None:
            server = self._dice.choice(living)
        else:
            server = fault.worker if fault.worker in living else living[fault.worker % len(living)]
        victim = catch(seen.servers[server])
        if victim is None:
            return False
        self._servers_killed.add(server)
        self._note(fault, f"server {server}, process {victim.pid}", server=server)
        victim.kill()
        victim.close()
        return True

    def _fill_disk(self, fault: Fault) -> bool:
        disk = FullDisk(self._run_dir.parent)  # beside the run: its own directory holds its own files only
        self._note(fault, f"{disk.fill() >> 10} KiB")
        self._lasts(fault, -1, disk.free)
        return True

    def _note(self, fault: Fault, whom: str, worker: int | None = None, server: int | None = None) -> None:
        self._say(f"fault: {fault} ({whom})")
        # Read the clock last: the measurement starts with the fault itself.
        self.notes.append(Note(fault.kind, str(fault), CLOCK.now(), worker, server))

    def _request(self, workers: int) -> None:
        deadline = time.monotonic() + ASKING_S
        while not self._over.is_set() and not self._follower.seen.ended:
            try:
                refusal = self._ask(workers)
                if refusal:
                    self._say(f"fault: the request for {workers} workers was refused: {refusal}")
                return
            except DistBeliefError as error:
                if time.monotonic() >= deadline:
                    self._say(f"fault: the request for {workers} workers was not answered: {error.message}")
                    return
            self._over.wait(ASK_AGAIN_S)


def _why_not(fault: Fault) -> str:
    return "no reader process was found" if fault.kind == "kill reader" else "no member would have been left"


# --- random schedules ------------------------------------------------------------------------------------------------

FEWEST, MOST = 3, 6
SHORTEST_S, LONGEST_S = 0.1, 2.0
LAST_PART = 0.8
"""No fault is planned in the last fifth of a run: the run would often end before its answer to the fault."""


def random_schedule(seed: int, workers: int, steps: int, servers: int = 0, readers: int = 0) -> str:
    """A few faults of any kind, spread over the run, as a schedule's text. A single parameter server is never killed:
    no other server has its data. `readers`: the reader processes of a worker.

    >>> random_schedule(1, 4, 100) == random_schedule(1, 4, 100)
    True
    """
    dice = random.Random(seed)
    number = dice.randint(FEWEST, MOST)
    # Each kind at most once before any repeats, so that a few schedules cover all kinds.
    impossible = {"kill server"} if servers < 2 else set()
    impossible |= {"kill reader"} if readers == 0 else set()
    impossible |= {"fill disk", "set clock"}  # few runs have a small disk of their own, few machines libfaketime
    impossible |= {"drop terminal"}  # it cannot be combined with "cut worker"
    possible = [kind for kind in KINDS if kind not in impossible]
    kinds = dice.sample(possible, k=len(possible))[:number]
    last = max(1, int(steps * LAST_PART))
    places = sorted(dice.randint(1, last) for _ in kinds)
    return write(tuple(_fault(dice, kind, workers, step) for kind, step in zip(kinds, places, strict=True)))


def _fault(dice: random.Random, kind: str, workers: int, step: int) -> Fault:
    numbered = kind in WORKER_FAULTS and dice.random() < 0.5
    return Fault(
        kind,
        worker=dice.randrange(workers) if numbered else None,
        when=When(step),
        for_s=round(dice.uniform(SHORTEST_S, LONGEST_S), 1) if kind in ("freeze worker", "cut worker") else None,
        factor=float(dice.randint(2, 5)) if kind == "slow worker" else 1.0,
        # With one worker left, no other worker could take over after the next kill.
        count=dice.randint(2, max(2, workers + 1)) if kind == "scale" else 0,
    )
