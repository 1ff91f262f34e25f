"""Joining a run from outside: as the agent of another host, or as one more worker on the run's own host.

An agent offers its slots at the coordinator's address until the coordinator welcomes it; it then hosts workers and
parameter servers until the run ends. A worker that a user starts on the run's own host asks the coordinator for a
number and the launching process for the rest, and shares memory with the other workers.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq

from distbelief.control.addresses import host_name, split
from distbelief.control.credentials import Credential
from distbelief.control.messages import (
    Answer,
    EndRun,
    HostDeclined,
    HostOffered,
    JoinAgain,
    LeaveRequested,
    Welcome,
    decode_command,
    encode,
)
from distbelief.control.sockets import dial, is_loopback
from distbelief.control.unreachable import attempt, unanswered
from distbelief.coordinator.client import answer_of, ask_for_seat, host_of_run, of_another_start, whereabouts
from distbelief.errors import DistBeliefError, RunInterrupted
from distbelief.launch import parcel
from distbelief.launch.agent import Agent, Room, signal_name
from distbelief.launch.hosting import StoreAddress
from distbelief.launch.launch import Invitation, read_launch
from distbelief.launch.manualworkers import connected
from distbelief.launch.pollloop import Signals
from distbelief.launch.processes import WORKER_ENVIRONMENT
from distbelief.temporaryfolder import temporary_folder
from distbelief.transport.shm.memfd import receive_message, send_message
from distbelief.worker.spec import WorkerSpec

OFFER_EVERY_S = 1.0
PATIENCE_S = 300.0
"""How long the agent waits for a coordinator that does not answer: as long as workers wait."""
ABANDONED_S = 15.0
"""If all members have ended and the coordinator is silent for this long, the run is over and its end was lost."""
LEAVE_AFTER_S = 0.3
"""A batch system sends SIGTERM to every process; the launching process acts first, so the run is saved."""
LOOK_AGAIN_S = 3.0
"""How long the coordinator is silent before its address is looked up again, and how often it is then."""
REFRESH_S = 0.2
DECLINE_S = 5.0
"""How long a host that cannot take part waits for the coordinator to confirm that it knows."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class _Terms:
    """What this host offers to a run. See `serve_host`."""

    workers: int
    host: str
    servers: int | None
    grows: bool
    device: str


@dataclass
class _Leader:
    """The invitation; after the run was started again there may be another one."""

    invitation: Invitation
    find_again: Callable[[], Invitation] | None

    def has_moved(self) -> bool:
        """Whether there is another invitation by now, and a process listens at its address."""
        if self.find_again is None:
            return False
        with contextlib.suppress(DistBeliefError):  # the name is unknown for a moment
            found = self.find_again()
            host, port = split(found.address)
            if found != self.invitation and attempt(host, int(port)).what == "open":
                self.invitation = found
                return True
        return False


def serve_host(
    invitation: Invitation,
    workers: int,
    host: str = "",
    *,
    servers: int | None = None,
    grows: bool = False,
    device: str = "",
    patience_s: float = PATIENCE_S,
    say: Say = print,
    find_again: Callable[[], Invitation] | None = None,
) -> int:
    """Host at most `workers` workers of the run until it ends, or until a signal. Returns the exit status.

    `servers`: how many parameter servers; None: the run decides. `grows`: the run gets these workers in addition to the
    workers that it waits for. `device`: of these workers, if not the run's. `find_again`: looks the invitation up anew,
    because a coordinator that was started again may have another address. If the run is started again with the same
    key, this host joins it again.

    Raises a DistBeliefError if this host cannot take part; the run shows the reason too.
    """
    terms, leader = _Terms(workers, host, servers, grows, device), _Leader(invitation, find_again)
    with Signals() as signals:
        while True:
            status = _serve_one(terms, leader, signals, patience_s, say)
            if status is not None:
                return status
            say("the run's leading process is gone or was started again: this host joins the next one")
            leader.has_moved()


def _serve_one(terms: _Terms, leader: _Leader, signals: Signals, patience_s: float, say: Say) -> int | None:
    """Serve until the run ends. Returns the exit status; None: the run was started again."""
    workers, servers = terms.workers, terms.servers
    with temporary_folder("host") as folder:
        offer = HostOffered(terms.host or host_name(), secrets.token_hex(16), workers, terms.grows)
        admitted = _offered(leader, offer, signals, patience_s, say)
        if admitted is None:
            return None
        name, content = admitted
        invitation = leader.invitation
        with _declining(invitation.address, invitation.access.applicant(), name, offer.nonce):
            sent = parcel.read(content)
            launch = parcel.open_here(sent, content, folder, name)
            launch = launch.with_options(device=terms.device or launch.options.device)
            if servers is None:
                servers = -1 if launch.placement.local_workers == 0 else 0
            say(f"{name}: takes part in {sent.run_dir} with up to {workers} worker{'s' if workers != 1 else ''}")
            agent = Agent(
                launch,
                name,
                invitation.access.of_start(sent.start),
                Room(workers, servers),
                show=lambda source, line: say(f"[{source}] {line}"),
                broken=lambda: say(f"{name}: the process that starts workers has died; this host leaves the run"),
                elsewhere=StoreAddress(sent.store),
            )
            with contextlib.closing(agent):
                status = _host(agent, leader, signals, patience_s, say)
                return None if agent.is_sent_back and not signals.count else status


@contextlib.contextmanager
def _declining(address: str, credential: Credential, host: str, nonce: str = "") -> Iterator[None]:
    """If the block raises a DistBeliefError, tell the coordinator why this host cannot take part."""
    try:
        yield
    except DistBeliefError as error:
        reason = f"{error.message} ({error.hint})" if error.hint else error.message
        with contextlib.suppress(DistBeliefError):  # the error of this host is the one to report
            answer_of(address, credential, HostDeclined(host, reason, nonce), DECLINE_S)
        raise


def _offered(
    leader: _Leader, offer: HostOffered, signals: Signals, patience_s: float, say: Say
) -> tuple[str, bytes] | None:
    """Offer this host until the coordinator welcomes it. Returns the host's name in the run, and the parcel; None:
    there is another invitation."""
    invitation = leader.invitation
    deadline = time.monotonic() + patience_s
    look_again_at = time.monotonic() + LOOK_AGAIN_S
    waited = False
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        credential = invitation.access.applicant()
        signer = credential.signer()
        dial(socket, invitation.address, credential.coordinator_key)
        while time.monotonic() < deadline:
            if signals.count:
                raise RunInterrupted(f"stopped by {signal_name(signals.received)} before the run admitted this host")
            message = encode(offer)
            socket.send_multipart([signer.sign(message), message])
            if not socket.poll(int(OFFER_EVERY_S * 1000)):
                if not waited:
                    say(f"waiting: {unanswered(invitation.address, credential.coordinator_key).message}")
                waited = True
                if time.monotonic() >= look_again_at:
                    look_again_at = time.monotonic() + LOOK_AGAIN_S
                    if leader.has_moved():
                        return None
                continue
            head, *rest = socket.recv_multipart()
            with contextlib.suppress(msgspec.MsgspecError):
                match decode_command(head):
                    case Welcome(host=name) if rest:
                        return name, rest[0]
                    case Answer(ok=False, text=text):
                        raise DistBeliefError(f"the run at {invitation.address} does not admit this host: {text}")
                    case EndRun(reason=reason):
                        raise DistBeliefError(f"the run at {invitation.address} is over: {reason}")
                    case JoinAgain():  # this host has the run's secret of another start
                        if leader.has_moved():
                            return None
                        raise of_another_start(invitation.address, "the run")
            time.sleep(OFFER_EVERY_S)  # the coordinator is still starting
    raise unanswered(invitation.address, credential.coordinator_key)


def _host(agent: Agent, leader: _Leader, signals: Signals, patience_s: float, say: Say) -> int:
    agent.poll.watch(signals.wake_fd, lambda: _drain(signals))
    agent.begin(leader.invitation.address)
    leave_at, look_again_s = float("inf"), LOOK_AGAIN_S
    while not agent.done:
        agent.serve(REFRESH_S)
        now = time.monotonic()
        if signals.count == 1 and leave_at == float("inf") and not agent.ended:
            leave_at = now + LEAVE_AFTER_S
        if signals.count > 1 and not agent.ended:
            agent.finish(0.0)
        if now >= leave_at and not agent.ended:
            _leave(agent)
            if agent.hosting.is_empty:
                agent.finish(0.0)
        silent_s = now - agent.answered_at
        if agent.ended:
            continue
        if agent.room.workers == 0 and agent.room.servers == 0 and agent.hosting.is_empty and not signals.count:
            return 1  # this host can start no more members
        if silent_s < LOOK_AGAIN_S:
            look_again_s = LOOK_AGAIN_S
        elif silent_s >= look_again_s:
            look_again_s = silent_s + LOOK_AGAIN_S
            if leader.has_moved():
                agent.join_again()
                continue
        if silent_s > patience_s or (silent_s > ABANDONED_S and agent.hosting.is_empty and agent.hosting.has_hosted):
            say(f"{agent.host}: no message from the coordinator for {silent_s:.0f} s; this host leaves the run")
            agent.finish()
    return _status(agent, signals, say)


def _leave(agent: Agent) -> None:
    """Take no new members, and ask for a leave of every worker here. The request is repeated until they are gone."""
    agent.room.workers = agent.room.servers = 0
    agent.hosting.cancel()
    agent.repeated_events = [LeaveRequested(worker) for worker in agent.hosting.running("worker")]


def _status(agent: Agent, signals: Signals, say: Say) -> int:
    if agent.outcome is not None:
        how = agent.outcome.status if agent.outcome.status == "completed" else agent.outcome.reason
        say(f"{agent.host}: the run is over: {how}")
        return 0 if agent.outcome.status == "completed" else 1
    if signals.count:
        say(f"{agent.host}: has left")
        return 0 if signals.count == 1 else 128 + signals.received
    return 0 if set(agent.hosting.exits("worker").values()) <= {0} else 1


def _drain(signals: Signals) -> None:
    with contextlib.suppress(BlockingIOError):
        os.eventfd_read(signals.wake_fd)


_LAST_MESSAGES_S = 3.0  # a launching process that ends in order closes the socket too; EndRun is then on its way


def join_run(run_dir: Path, workers: int = 1, host: str = "", device: str = "") -> int:
    """Take part in the run with this number of workers until it ends or lets them leave. Returns the exit status.
    `device`: of these workers, if not the run's."""
    here = host or host_name()
    address, authority = whereabouts(run_dir)
    if here != host_of_run(run_dir):
        if is_loopback(address):
            raise DistBeliefError(
                f"the run's coordinator listens on {address}, which cannot be reached from the host {here}",
                hint="start the run with --listen and an address of its machine",
            )
        return serve_host(
            Invitation(address, authority),
            *(workers, here),
            grows=True,
            device=device,
            find_again=lambda: Invitation(*whereabouts(run_dir)),
        )
    if workers != 1:
        raise DistBeliefError(
            "on the run's own machine one worker joins at a time",
            hint=f"have the run start more: distbelief scale {run_dir} N",
        )
    with _declining(address, authority.owner(), here):
        read_launch(run_dir, here)  # raises if this environment lacks the run's strategy
    number = ask_for_seat(run_dir, os.getpid())
    os.environ.update(WORKER_ENVIRONMENT)
    print(f"worker {number}: joining {run_dir}; Ctrl-C lets it leave", flush=True)
    with _launching_process(run_dir, authority.secret) as engine:
        spec = _introduce(engine, run_dir, number, authority.secret.hex())
        threading.Thread(target=_end_with, args=[engine.dup()], daemon=True).start()
        options = msgspec.structs.replace(spec.options, device=device or spec.options.device)
        return _work(msgspec.structs.replace(spec, options=options), engine)


def _end_with(engine: socket.socket) -> None:
    """End this process when the launching process dies. (The kernel does that for the workers that it has forked.)"""
    poller = select.poll()
    poller.register(engine, select.POLLHUP | select.POLLRDHUP)
    poller.poll()
    time.sleep(_LAST_MESSAGES_S)
    print("the process that launched the run is gone: this worker ends", flush=True)
    os._exit(1)


def _work(spec: WorkerSpec, engine: socket.socket) -> int:
    from distbelief.worker.process import run_worker  # imports torch: only after the run has admitted this worker

    return run_worker(spec, engine, by_hand=True)


@contextlib.contextmanager
def _launching_process(run_dir: Path, secret: bytes) -> Iterator[socket.socket]:
    with contextlib.ExitStack() as stack:
        try:
            engine = stack.enter_context(connected(run_dir, secret))
        except OSError as error:
            raise DistBeliefError(
                f"the process that launched the run in {run_dir} is not there: {error.strerror}"
            ) from error
        yield engine


def _introduce(engine: socket.socket, run_dir: Path, number: int, secret: str) -> WorkerSpec:
    try:
        send_message(engine, {"worker": number, "secret": secret})
        return msgspec.convert(receive_message(engine)[0]["spec"], WorkerSpec)
    except (OSError, EOFError) as error:
        raise DistBeliefError(
            f"the process that launched the run in {run_dir} does not admit this worker: {error}",
            hint="is it your run?",
        ) from error
