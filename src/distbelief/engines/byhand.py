"""A worker that was started by hand: it asks the coordinator for a number and the engine for the rest, and works."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec

from distbelief.comm.memfd import receive_message, send_message
from distbelief.coordinator.client import ask_for_seat, whereabouts
from distbelief.engines.guests import SOCKET, short_path
from distbelief.engines.processes import WORKER_ENVIRONMENT
from distbelief.errors import DistBeliefError
from distbelief.worker.spec import WorkerSpec


def join_run(run_dir: Path) -> int:
    """Be a worker of that run until it ends or lets us go. Returns the exit status."""
    _, secret = whereabouts(run_dir)
    worker = ask_for_seat(run_dir, os.getpid())
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as engine:
        try:
            with short_path(run_dir) as folder:
                engine.connect(f"{folder}/{SOCKET}")
            send_message(engine, {"worker": worker, "secret": secret})
            spec = msgspec.convert(receive_message(engine)[0]["spec"], WorkerSpec)
        except (OSError, EOFError) as error:
            raise DistBeliefError(
                f"the engine of {run_dir} does not let us in: {error}", hint="is the run on this machine, and yours?"
            ) from error
        print(f"worker {spec.worker}: joining {run_dir}; Ctrl-C lets it leave", flush=True)
        os.environ.update(WORKER_ENVIRONMENT)

        from distbelief.worker.process import run_worker  # imports torch: after we know that we are wanted

        return run_worker(spec, engine, by_hand=True)
