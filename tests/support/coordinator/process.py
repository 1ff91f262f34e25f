"""A real coordinator process, and sockets that play its engine and workers. For the tests next to this file."""

from __future__ import annotations

import contextlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import zmq

from distbelief.control import messages as m
from distbelief.control.credentials import Credential, KeyAuthority
from distbelief.control.signatures import Signer
from distbelief.control.sockets import dial
from distbelief.coordinator import journal
from distbelief.coordinator.rules.authorization import FROM_SERVERS, FROM_WORKERS

SECRET = bytes(range(m.SECRET_BYTES))
AUTHORITY = KeyAuthority(SECRET).run
WAIT_MS = 60_000  # only reached when something is broken
JOB = m.JobFacts(name="digits", shards=4, steps=2, global_batch=8, samples=80, parameters=5, strategy="allreduce")
CANARY = m.Canary(fingerprint="c3d4", facts={"threads": "1"})


class Process:
    """A coordinator, and the means to talk to it."""

    answer: Any

    def __init__(
        self, run_dir: Path, context: zmq.Context, config: dict, order: dict, most_file_bytes: int | None
    ) -> None:
        """`most_file_bytes`: it starts on a full disk. It may have to wait before it answers then."""
        self.run_dir = run_dir
        self.context = context
        self.sockets: list[zmq.Socket] = []
        self.errors = run_dir / "coordinator.log"
        with self.errors.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "distbelief.coordinator"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        line = {"run_dir": str(run_dir), "secret": SECRET.hex(), "listen": "tcp://127.0.0.1:*", "config": config}
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({**line, **order}).encode() + b"\n")
        self.answer = None
        if most_file_bytes is not None:  # before it can write anything
            self.limit_files(most_file_bytes)
        self.process.stdin.flush()
        if most_file_bytes is None:
            self.until_it_answers()

    def until_it_answers(self) -> None:
        assert self.process.stdout is not None
        self.answer = json.loads(self.process.stdout.readline())

    def limit_files(self, size_bytes: int = -1, to_their_size: bool = False) -> int:
        """No file can grow beyond this size any more, as on a full disk; any user may do that. -1: no limit.
        `to_their_size`: of the journal; shorter files cannot grow either. Returns the limit before."""
        if to_their_size:
            size_bytes = (self.run_dir / "journal.jsonl").stat().st_size
            with (self.run_dir / "metrics.jsonl").open("ab") as metrics:
                metrics.write(b"\n" * max(0, size_bytes - metrics.tell()))
        before, hard = resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (size_bytes, hard))
        return before

    def dealer(self) -> zmq.Socket:
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, WAIT_MS)
        dial(socket, self.answer["address"], AUTHORITY.coordinator_key)
        self.sockets.append(socket)
        return socket

    def wait(self) -> int:
        return self.process.wait(timeout=60)

    def until_it_says(self, text: str) -> None:
        give_up = time.monotonic() + WAIT_MS / 1000
        while text not in self.errors.read_text():
            assert time.monotonic() < give_up, f"never said: {text}"
            time.sleep(0.01)

    def records(self) -> list[dict]:
        return journal.read(self.run_dir / "journal.jsonl")

    def metrics(self) -> list[dict]:
        lines = (self.run_dir / "metrics.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines if line]


@contextlib.contextmanager
def coordinator(
    run_dir: Path, order: dict | None = None, most_file_bytes: int | None = None, **config: object
) -> Iterator[Process]:
    with zmq.Context() as context:
        config = {"workers": 2, "save_every": "never", **config}
        process = Process(run_dir, context, config, order or {}, most_file_bytes)
        try:
            yield process
        finally:
            for socket in process.sockets:
                socket.close(linger=0)
            process.process.kill()
            process.process.wait()
            for pipe in (process.process.stdin, process.process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()  # type: ignore[union-attr]


_signers: dict[Credential, Signer] = {}
_owner = AUTHORITY.agent()


def tell(socket: zmq.Socket, event: m.Event, credential: Credential | None = None) -> None:
    """Whoever's it is to say, unless somebody else is named."""
    message = m.encode(event)
    socket.send_multipart([signer(credential or credential_for(event)).sign(message), message])


def credential_for(event: m.Event) -> Credential:
    if isinstance(event, FROM_WORKERS):
        return AUTHORITY.worker(event.worker)
    return AUTHORITY.server(event.server) if isinstance(event, FROM_SERVERS) else _owner


def signer(credential: Credential) -> Signer:
    return _signers.setdefault(credential, credential.signer())


def told(socket: zmq.Socket) -> m.Command:
    (data,) = socket.recv_multipart()
    return m.decode_command(data)


def engine_and_workers(process: Process) -> tuple[zmq.Socket, list[zmq.Socket]]:
    engine = process.dealer()
    attach(engine)
    workers = [process.dealer(), process.dealer()]
    for number, socket in enumerate(workers):
        tell(socket, m.WorkerJoined(worker=number, host="here", pid=1000 + number))
        tell(socket, m.WorkerReady(worker=number, job=JOB, canary=CANARY))
    return engine, workers


def attach(engine: zmq.Socket) -> None:
    """Real agents do that once a second: nothing is started on a host that is silent for long."""
    tell(engine, m.EngineAttached(host="here"))
    assert isinstance(told(engine), m.Answer)  # it has been heard


def beat(worker: int, start: m.Command, step: int) -> m.Heartbeat:
    assert isinstance(start, m.StartGeneration)
    reports = [] if worker else [m.StepReport(step - 1, 0.5, 8, f"f{step}", 1.0)]
    return m.Heartbeat(worker, start.epoch, start.generation, step, m.Timing(0.1, 0.2, 0.3, 2 * step), reports)


def finish(worker: int, generation: int = 1) -> m.WorkerFinished:
    return m.WorkerFinished(worker, generation, 2, "" if worker else "abcd", 0.25, {"accuracy": 1.0}, 100.0)
