"""Members that are started by hand: on another host an agent; on the run's own, a worker beside the engine's, which
asks the coordinator for a number and the engine for the rest, and shares memory with the others."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from distbelief.control.addresses import host_name
from distbelief.control.sockets import is_loopback
from distbelief.coordinator.client import ask_for_seat, host_of_run, whereabouts
from distbelief.errors import DistBeliefError
from distbelief.launch.guests import SOCKET, short_path
from distbelief.launch.invitation import Invitation
from distbelief.launch.invited import serve_host
from distbelief.launch.processes import WORKER_ENVIRONMENT
from distbelief.transport.shm.memfd import receive_message, send_message
from distbelief.worker.spec import WorkerSpec

_LAST_WORDS_S = 3.0  # an engine that ends in order closes this too; the end of the run is then on its way to us


def join_run(run_dir: Path, workers: int = 1, host: str = "", device: str = "") -> int:
    """Take part in that run with so many workers until it ends or lets us go. Returns the exit status. `device`: of
    these workers, if not the run's."""
    here = host or host_name()
    address, authority = whereabouts(run_dir)
    if here != host_of_run(run_dir):
        if is_loopback(address):
            raise DistBeliefError(
                f"the run's coordinator listens on {address}, which cannot be reached from the host {here}",
                hint="start the run with --listen and an address of its machine",
            )
        return serve_host(Invitation(address, authority.secret), workers, here, grows=True, device=device)
    if workers != 1:
        raise DistBeliefError(
            "on the run's own machine one worker joins at a time",
            hint=f"have the run start more: distbelief scale {run_dir} --workers N",
        )
    number = ask_for_seat(run_dir, os.getpid())
    os.environ.update(WORKER_ENVIRONMENT)
    print(f"worker {number}: joining {run_dir}; Ctrl-C lets it leave", flush=True)
    with _engine(run_dir) as engine:
        spec = _introduce(engine, run_dir, number, authority.secret.hex())
        threading.Thread(target=_end_with, args=[engine.dup()], daemon=True).start()
        options = msgspec.structs.replace(spec.options, device=device or spec.options.device)
        return _work(msgspec.structs.replace(spec, options=options), engine)


def _end_with(engine: socket.socket) -> None:
    """Its own workers die with the engine by the kernel's hand; one that was started by hand must see to it itself."""
    poller = select.poll()
    poller.register(engine, select.POLLHUP | select.POLLRDHUP)
    poller.poll()
    time.sleep(_LAST_WORDS_S)
    print("the engine of the run is gone: this worker ends", flush=True)
    os._exit(1)


def _work(spec: WorkerSpec, engine: socket.socket) -> int:
    from distbelief.worker.process import run_worker  # imports torch: after we know that we are wanted

    return run_worker(spec, engine, by_hand=True)


@contextlib.contextmanager
def _engine(run_dir: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as engine:
        try:
            with short_path(run_dir) as folder:
                engine.connect(f"{folder}/{SOCKET}")
        except OSError as error:
            raise DistBeliefError(f"the engine of {run_dir} is not there: {error.strerror}") from error
        yield engine


def _introduce(engine: socket.socket, run_dir: Path, number: int, secret: str) -> WorkerSpec:
    try:
        send_message(engine, {"worker": number, "secret": secret})
        return msgspec.convert(receive_message(engine)[0]["spec"], WorkerSpec)
    except (OSError, EOFError) as error:
        raise DistBeliefError(
            f"the engine of {run_dir} does not let us in: {error}", hint="is the run yours?"
        ) from error
