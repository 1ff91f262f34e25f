"""A parameter server as a process: it loads the job as a worker does, then serves the slices that it is given."""

from __future__ import annotations

import signal
import socket as sockets

import torch
import zmq

from distbelief.control.messages import EXIT_REPORTED
from distbelief.strategies.ps.server.sockets import ServerEdge, Slices
from distbelief.strategies.ps.worker.prepared import PreparedServed
from distbelief.strategies.sandblaster.prepared import PreparedSandblaster
from distbelief.transport.shm.segment import KeeperClient
from distbelief.worker.loading import load_for_server
from distbelief.worker.runstores import RunStores
from distbelief.worker.spec import WorkerSpec
from distbelief.worker.vectorstores import SearchStores


def run_server(spec: WorkerSpec, keeper_socket: sockets.socket | None) -> int:
    """The life of a parameter server. Returns its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal's Ctrl-C goes to everybody; the engine decides
    torch.set_num_threads(spec.threads)
    keeper = KeeperClient(keeper_socket) if keeper_socket else None
    with zmq.Context() as context:
        server = ServerEdge(spec, context)
        try:
            server.serve(_slices(spec, keeper))
        except BaseException as error:
            server.fail(error)
            return EXIT_REPORTED
        finally:
            server.close()
    return 0


def _slices(spec: WorkerSpec, keeper: KeeperClient | None) -> Slices:
    job, schedule, steps, prepared = load_for_server(spec, keeper)
    if isinstance(prepared, PreparedSandblaster):
        return SearchStores(spec, keeper, schedule.shards, prepared)
    assert isinstance(prepared, PreparedServed)
    return RunStores(spec, keeper, job, schedule, steps, prepared)
