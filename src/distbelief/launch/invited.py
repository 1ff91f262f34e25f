"""The agent of another host: it offers its room at an address, is welcomed, and hosts members until the run ends."""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from distbelief.control.addresses import host_name
from distbelief.control.credentials import Authority
from distbelief.control.messages import Answer, EndRun, HostOffered, LeaveRequested, Welcome, decode_command, encode
from distbelief.control.sockets import dial
from distbelief.control.unreachable import unanswered
from distbelief.errors import DistBeliefError, RunInterrupted
from distbelief.launch import parcel
from distbelief.launch.agent import Agent, Room, signal_name
from distbelief.launch.hosting import Store
from distbelief.launch.invitation import Invitation
from distbelief.launch.signals import Signals

OFFER_EVERY_S = 1.0
PATIENCE_S = 300.0
"""How long a coordinator is waited for that does not answer: as long as workers do."""
ABANDONED_S = 15.0
"""When all members have ended and nobody answers for so long, the run is over and its end was not heard."""
LEAVE_AFTER_S = 0.3
"""Where a batch system tells everybody to end, the launching process's word comes first, and the run is saved."""
REFRESH_S = 0.2

Say = Callable[[str], None]


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
) -> int:
    """Host up to so many workers of the run until it ends, or until a signal. Returns the exit status.

    `servers`: how many parameter servers, None: as the run likes. `grows`: the run is to have these workers in addition
    to those that it waits for. `device`: theirs, if not the run's.
    """
    with Signals() as signals, parcel.private_folder() as folder:
        offer = HostOffered(host or host_name(), secrets.token_hex(16), workers, grows)
        name, content = _offered(invitation, offer, signals, patience_s, say)
        sent = parcel.read(content)
        launch = parcel.open_here(sent, content, Path(folder))
        launch = launch.with_options(device=device or launch.options.device)
        if servers is None:
            servers = -1 if launch.placement.local_workers == 0 else 0
        say(f"{name}: takes part in {sent.run_dir} with up to {workers} worker{'s' if workers != 1 else ''}")
        agent = Agent(
            launch,
            name,
            Authority(invitation.secret, sent.start),
            Room(workers, servers),
            show=lambda source, line: say(f"[{source}] {line}"),
            broken=lambda: say(f"{name}: the process that starts workers has died; this host takes no more part"),
            elsewhere=Store(sent.store),
        )
        with contextlib.closing(agent):
            return _host(agent, invitation.address, signals, patience_s, say)


def _offered(
    invitation: Invitation, offer: HostOffered, signals: Signals, patience_s: float, say: Say
) -> tuple[str, bytes]:
    """Offer until we are welcome. Returns our name, and the parcel."""
    deadline = time.monotonic() + patience_s
    waited = False
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        credential = Authority(invitation.secret).owner()
        signer = credential.signer()
        dial(socket, invitation.address, credential.coordinator_key)
        while time.monotonic() < deadline:
            if signals.count:
                raise RunInterrupted(f"stopped by {signal_name(signals.received)} before the run had let us in")
            message = encode(offer)
            socket.send_multipart([signer.sign(message), message])
            if not socket.poll(int(OFFER_EVERY_S * 1000)):
                if not waited:
                    say(f"waiting: {unanswered(invitation.address, credential.coordinator_key).message}")
                waited = True
                continue
            head, *rest = socket.recv_multipart()
            with contextlib.suppress(msgspec.MsgspecError):
                match decode_command(head):
                    case Welcome(host=name) if rest:
                        return name, rest[0]
                    case Answer(ok=False, text=text):
                        raise DistBeliefError(f"the run at {invitation.address} does not take this host: {text}")
                    case EndRun(reason=reason):
                        raise DistBeliefError(f"the run at {invitation.address} is over: {reason}")
            time.sleep(OFFER_EVERY_S)  # it is still starting
    raise unanswered(invitation.address, credential.coordinator_key)


def _host(agent: Agent, address: str, signals: Signals, patience_s: float, say: Say) -> int:
    agent.watching.watch(signals.wake_fd, lambda: _drain(signals))
    agent.begin(address)
    leave_at = float("inf")
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
            return 1  # it can start nobody any more
        if silent_s > patience_s or (silent_s > ABANDONED_S and agent.hosting.is_empty and agent.hosting.has_hosted):
            say(f"{agent.host}: no word from the coordinator for {silent_s:.0f} s; this host ends its part")
            agent.finish()
    return _status(agent, signals, say)


def _leave(agent: Agent) -> None:
    """Take nobody new, and have our workers hand over what they have. Said again until they are gone."""
    agent.room.workers = agent.room.servers = 0
    agent.hosting.cancel()
    agent.insistence = [LeaveRequested(worker) for worker in agent.hosting.running("worker")]


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
