"""The process of a parameter server: this module loads the job and finds checkpoints; the strategy serves."""

from __future__ import annotations

import signal
import socket as sockets

import torch

from distbelief.control.credentials import Credential
from distbelief.strategies import parse
from distbelief.strategies.base import Saved, ServerJob
from distbelief.transport.shm.segment import SegmentClient
from distbelief.worker.loading import load_for_server
from distbelief.worker.origin import newest_saved, weights_of
from distbelief.worker.spec import WorkerSpec


def run_server(spec: WorkerSpec, segment_socket: sockets.socket | None) -> int:
    """Run a parameter server until it ends. Returns its exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole process group; the engine decides
    torch.set_num_threads(spec.options.threads)
    return parse(spec.options.strategy).serve(
        ServingHost(spec, SegmentClient(segment_socket) if segment_socket else None)
    )


class ServingHost:
    """Implements `ServerHost` for a parameter-server process."""

    def __init__(self, spec: WorkerSpec, segments: SegmentClient | None) -> None:
        self._spec = spec
        self._segments = segments

    @property
    def worker(self) -> int:
        return self._spec.worker

    @property
    def host(self) -> str:
        return self._spec.host

    @property
    def address(self) -> str:
        return self._spec.address

    @property
    def credential(self) -> Credential:
        return self._spec.credential

    @property
    def segments(self) -> SegmentClient | None:
        return self._segments if self._spec.shares_memory else None

    @property
    def saves_every(self) -> int:
        return self._spec.saves.every_steps if self._spec.saves else 0

    def load(self) -> ServerJob:
        return load_for_server(self._spec, self._segments)

    def saved(self, life: int, sealed: int, lazily: bool = False) -> Saved | None:
        origin = self._spec.origin
        if origin is None:
            return None
        saved = None
        if origin.checkpoints and (life > 1 or origin.resumed):
            # A resumed run that has sealed no checkpoint since begins again from the newest usable one.
            at_most = None if origin.resumed and not sealed else sealed
            saved, skipped = newest_saved(origin.checkpoints, lazily, at_most, origin.run_id)
            for bad, why in skipped:
                print(f"the checkpoint of step {bad} cannot be used: {why}", flush=True)
        return saved or (weights_of(origin.weights, lazily) if origin.weights else None)
