"""Real members for tests: one process that has torch imported and no threads, and forks as many members as asked.

The test process may have threads (a store, a plug-in), so it must not fork members itself; and importing torch for
each member would take seconds. `Stage.play` runs a function of a module in several members at once and returns what
each gave. The stage keeps the shared segments, as the engine does in a run. Nothing here knows what is tested.
"""

from __future__ import annotations

import importlib
import os
import pickle
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import pytest

GRACE_S = 20.0  # how long the others may take after one member failed: they wait for it and would never end
HANG_S = 100.0
_WELL, _FAILED = b"+", b"-"


@dataclass(frozen=True)
class Outcome:
    """What became of one member: its `value`; or `error`, a traceback; or neither, and the `status` it died with."""

    value: Any = None
    error: str = ""
    status: int = 0


class Stage:
    """The test's side."""

    def __init__(self) -> None:
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.stage"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )

    def outcomes(self, module: str, function: str, members: Sequence[dict[str, Any]]) -> list[Outcome]:
        """Call `function(segments, **arguments)` of that module in one member for each of these dictionaries."""
        assert self._process.stdin
        assert self._process.stdout
        packed = [pickle.dumps(arguments) for arguments in members]  # only members have the classes to unpack them
        pickle.dump((module, function, packed), self._process.stdin)
        self._process.stdin.flush()
        answers: list[bytes] = pickle.load(self._process.stdout)
        return [pickle.loads(answer) for answer in answers]

    def play(self, module: str, function: str, members: Sequence[dict[str, Any]]) -> list[Any]:
        """The same, when every member is to succeed: their values."""
        outcomes = self.outcomes(module, function, members)
        failed = [f"member {n}: {o.error or f'died with {o.status}'}" for n, o in enumerate(outcomes) if not _well(o)]
        assert not failed, "\n".join(failed)
        return [outcome.value for outcome in outcomes]

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def _well(outcome: Outcome) -> bool:
    return not outcome.error and outcome.status == 0


@pytest.fixture(scope="session")
def stage() -> Iterator[Stage]:
    """One for the whole test run."""
    it = Stage()
    yield it
    it.close()


# --- the stage's own process ----------------------------------------------------------------------------------------


def _main() -> None:
    import torch
    import torch._dynamo  # the first optimizer imports it, and that takes longer than most tests
    import torchmetrics

    from distbelief.lifeline import die_with_parent
    from distbelief.strategies.dataparallel import strategy as allreduce
    from distbelief.transport.gloo import exchange as torchgroup
    from distbelief.transport.shm import exchange as shared
    from distbelief.transport.shm import segmentserver as segments
    from distbelief.worker import feed

    # Members have all of it at once, because it is imported here.
    assert all((torchmetrics, segments, shared, torchgroup, allreduce, feed))
    die_with_parent(os.getppid())
    torch.set_num_threads(1)
    while True:
        try:
            module, function, members = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        pickle.dump(_perform(module, function, members), sys.stdout.buffer)
        sys.stdout.buffer.flush()


@dataclass
class _Actor:
    pid: int
    segments: socket.socket
    answer: int
    content: bytes = b""
    """A pickled Outcome, once it is whole."""


def _perform(module: str, function: str, members: list[bytes]) -> list[bytes]:
    from distbelief.transport.shm.segmentserver import SegmentServer

    segments = SegmentServer()
    actors: list[_Actor] = []
    for arguments in members:
        actors.append(_fork(module, function, arguments, actors))
    deadline, reason = time.monotonic() + HANG_S, "it hung"
    waiting = {actor.answer: actor for actor in actors}
    sockets = {actor.segments.fileno(): actor for actor in actors}
    while waiting:
        ready, _, _ = select.select([*waiting, *sockets], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            for actor in waiting.values():
                os.kill(actor.pid, signal.SIGKILL)
                actor.content = _packed(Outcome(error=f"killed by the stage: {reason}"))
            deadline += HANG_S
        for fd in ready:
            if fd in sockets:
                try:
                    segments.answer(sockets[fd].segments)
                except (EOFError, OSError):
                    sockets.pop(fd)
            elif data := os.read(fd, 1 << 20):
                waiting[fd].content += data
            else:
                actor = waiting.pop(fd)
                _farewell(actor)
                if actor.content[:1] == _FAILED and reason == "it hung":
                    deadline, reason = time.monotonic() + GRACE_S, "another member had failed"
    segments.close()
    for actor in actors:
        actor.segments.close()
    return [actor.content[1:] for actor in actors]


def _fork(module: str, function: str, arguments: bytes, others: list[_Actor]) -> _Actor:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    read, write = os.pipe()
    stage = os.getpid()
    pid = os.fork()
    if pid == 0:
        for other in others:
            other.segments.close()
            os.close(other.answer)
        ours.close()
        os.close(read)
        _act(stage, module, function, arguments, theirs, write)
    theirs.close()
    os.close(write)
    return _Actor(pid, ours, read)


_answer = -1
"""In a member: where its answer goes."""


def _act(stage: int, module: str, function: str, arguments: bytes, connection: socket.socket, answer: int) -> NoReturn:
    from distbelief.lifeline import die_with_parent
    from distbelief.transport.shm.segment import SegmentClient

    global _answer
    _answer = answer
    try:
        die_with_parent(stage)
        os.dup2(2, 1)  # the stage's own output carries answers
        perform = getattr(importlib.import_module(module), function)
        outcome = Outcome(perform(SegmentClient(connection), **pickle.loads(arguments)))
    except BaseException:
        outcome = Outcome(error=traceback.format_exc())
    _tell(outcome, answer)


def perform_and_end(rest: Callable[[], Any]) -> NoReturn:
    """For a thread that goes on in the place of a member's first one: what `rest` returns is the member's answer."""
    try:
        outcome = Outcome(rest())
    except BaseException:
        outcome = Outcome(error=traceback.format_exc())
    _tell(outcome, _answer)


def _tell(outcome: Outcome, answer: int) -> NoReturn:
    try:
        data = _packed(outcome)
    except Exception:
        data = _packed(Outcome(error=traceback.format_exc()))
    while data:
        data = data[os.write(answer, data) :]
    os._exit(0)


def _farewell(actor: _Actor) -> None:
    os.close(actor.answer)
    _, status = os.waitpid(actor.pid, 0)
    if not actor.content:
        actor.content = _packed(Outcome(status=os.waitstatus_to_exitcode(status)))


def _packed(outcome: Outcome) -> bytes:
    """For the test; the first byte is for the stage, which cannot unpack the values of members."""
    return (_FAILED if outcome.error else _WELL) + pickle.dumps(outcome)


if __name__ == "__main__":
    from tests.support import stage as itself  # answers are pickled under the name that tests import

    itself._main()
