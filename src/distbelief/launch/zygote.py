"""The zygote: the warm process that workers are forked from. It imports torch once; a worker starts in milliseconds.

The zygote has imported everything that a worker needs, has no thread and has run no tensor operation, so its fork is a
clean worker. It takes requests from the launching process over one socket, forks, and reports exits. The zygote dies
with the launching process, and workers die with the zygote.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import select
import signal
import socket
import sys
import traceback
from typing import Any, NoReturn

import msgspec

from distbelief.control.credentials import Credential
from distbelief.controlgroups import why_fork_failed
from distbelief.errors import JobError
from distbelief.lifeline import die_with_parent
from distbelief.strategies import import_sides, parse
from distbelief.transport.shm.memfd import receive_message, send_message
from distbelief.worker.spec import WorkerSpec

_LONGEST_DETAILS = 10_000
"""Characters of a traceback that fit into a message."""


def main() -> None:
    die_with_parent(int(sys.argv[2]))
    with socket.socket(fileno=int(sys.argv[1])) as engine:
        _live(engine, sys.argv[3])


def _live(engine: socket.socket, strategy: str) -> None:
    try:
        _warm_up(strategy)
    except JobError as error:  # a plug-in cannot be used on this host
        told = {"message": error.message, "hint": error.hint, "details": error.details[-_LONGEST_DETAILS:]}
        with contextlib.suppress(BrokenPipeError):
            send_message(engine, {"event": "failed", **told})
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    gc.freeze()  # imported modules stay shared between the forks
    children: set[int] = set()
    try:
        send_message(engine, {"event": "ready"})
    except BrokenPipeError:
        return  # the run was stopped before it began
    while True:
        ready, _, _ = select.select([engine.fileno(), wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
            _report_exits(engine, children)
        if engine.fileno() in ready:
            try:
                request, fds = receive_message(engine)
            except EOFError:
                return  # the launching process has closed the socket
            _serve(engine, children, request, fds)


def _warm_up(strategy: str) -> None:
    """Import what a worker needs. Garbage collection is off meanwhile: imported modules are never garbage, and walking
    through them repeatedly would take a fifth of the launch."""
    gc.disable()
    importlib.import_module("distbelief.strategies.flatmodel.tileoptimizer").avoid_compiler_import()
    importlib.import_module("distbelief.worker.process")
    if parse(strategy).servers:
        importlib.import_module("distbelief.worker.serving")
    import_sides(strategy)
    gc.enable()


def _report_exits(engine: socket.socket, children: set[int]) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        children.discard(pid)
        send_message(engine, {"event": "exited", "pid": pid, "status": os.waitstatus_to_exitcode(status)})


def _serve(engine: socket.socket, children: set[int], request: dict[str, Any], fds: list[int]) -> None:
    if request["do"] == "kill":
        if request["pid"] in children:  # not reaped yet: the process number is still valid
            os.kill(request["pid"], signal.SIGKILL)
        return
    parent = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:  # a limit on processes, or no memory: only this start has failed
        answer: dict[str, Any] = {"event": "refused", "why": why_fork_failed(error)}
    else:
        if pid == 0:
            _become(engine, parent, request, fds)
        children.add(pid)
        answer = {"event": "started", "pid": pid}
    for fd in fds:
        os.close(fd)
    send_message(engine, {**answer, "id": request["id"]})


def _become(engine: socket.socket, parent: int, request: dict[str, Any], fds: list[int]) -> NoReturn:
    """In the child: take the descriptors of the request, drop the zygote's, and do the work."""
    status = 1
    try:
        from distbelief.worker.process import run_worker  # imported before the fork, see _warm_up
        from distbelief.worker.serving import run_server

        die_with_parent(parent)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        engine.close()
        connection, log = fds
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        sock = socket.socket(fileno=connection)
        if request["do"] == "store":
            _serve_store(sock, request["host"], request["port"], msgspec.convert(request["credential"], Credential))
        if request["do"] == "entry":
            status = importlib.import_module(request["module"]).run(request["spec"], sock)
        else:
            live = run_server if request["do"] == "server" else run_worker
            status = live(msgspec.convert(request["spec"], WorkerSpec), sock)
    except SystemExit as error:
        status = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _serve_store(sock: socket.socket, host: str, port: int, credential: Credential) -> None:
    """Serve torch's rendezvous store, in a process of its own so that no worker's death ends it."""
    from distbelief.transport.gloo.rendezvousserver import serve

    serve(host, port, credential, lambda port: send_message(sock, {"port": port}))


if __name__ == "__main__":
    main()
