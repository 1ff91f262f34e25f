"""The processes of one launch on one host: the hosting process runs the members, helping processes lend their cores.

mpirun and srun bind each process to cores of its own, and its children get only these cores. So each helping process
sends its cores to the hosting process, and waits for the run's exit status. They connect through a socket with an
abstract name, so a kill leaves no file behind; the kernel says which user's process is at the other end.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import socket
import struct
import time

import msgspec

from distbelief.errors import DistBeliefError
from distbelief.launch.launchers.rules.place import Place

PATIENCE_S = 120.0
"""How long the processes of a host may take to start: all load from a shared disk at once."""
_CREDENTIALS = struct.Struct("3i")
_LOOK_S = 0.1


class HostingProcess:
    """In the hosting process: its helping processes. `cores`: the cores of all of them."""

    def __init__(self, place: Place, patience_s: float = PATIENCE_S) -> None:
        self.cores = os.sched_getaffinity(0)
        self._others: list[socket.socket] = []
        if place.local_count == 1:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            try:
                listener.bind(_name(place))
            except OSError as error:
                raise DistBeliefError(
                    f"another process hosts for this launch already ({error.strerror})",
                    hint=f"are two runs started by one {place.launcher}? give each its own",
                ) from error
            listener.listen(place.local_count)
            try:
                self._gather(listener, place.local_count - 1, time.monotonic() + patience_s)
            except BaseException:
                self.tell(1)
                raise

    def _gather(self, listener: socket.socket, expected: int, until: float) -> None:
        while len(self._others) < expected:
            listener.settimeout(max(0.001, until - time.monotonic()))
            try:
                other, _ = listener.accept()
            except TimeoutError:
                raise DistBeliefError(
                    f"{expected - len(self._others)} of {expected + 1} processes on this host have not appeared",
                    hint="were they all started with the same command?",
                ) from None
            if _user_of(other) != os.getuid():
                other.close()
                continue
            self._others.append(other)
            with contextlib.suppress(
                OSError, msgspec.MsgspecError
            ):  # the helping process is gone again; its launcher knows
                other.settimeout(max(0.001, until - time.monotonic()))
                self.cores |= msgspec.json.decode(other.recv(1 << 16), type=set[int])

    def tell(self, status: int) -> None:
        """The run is over: send its exit status to the helping processes."""
        for other in self._others:
            with other, contextlib.suppress(OSError):
                other.setblocking(False)
                other.send(msgspec.json.encode(status))
        self._others = []


class HelpingProcess:
    """In a helping process: send the cores to the hosting process, and wait for the end."""

    def __init__(self, place: Place, patience_s: float = PATIENCE_S) -> None:
        self._host = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _reach(self._host, place, time.monotonic() + patience_s)
        with contextlib.suppress(OSError):  # the hosting process is gone again; `wait` finds out
            self._host.send(msgspec.json.encode(os.sched_getaffinity(0)))

    def wait(self) -> int:
        """The run's exit status; 1 if the hosting process vanished."""
        with self._host:
            try:
                return msgspec.json.decode(self._host.recv(64), type=int)
            except (OSError, msgspec.MsgspecError):
                return 1


def _reach(host: socket.socket, place: Place, until: float) -> None:
    while True:
        try:
            host.connect(_name(place))
        except OSError as error:
            if time.monotonic() > until:
                raise DistBeliefError(
                    "the process that starts workers on this machine has not appeared",
                    hint="was it started, and with the same command?",
                ) from error
            time.sleep(_LOOK_S)
            continue
        if _user_of(host) != os.getuid():
            raise DistBeliefError("a process of another user listens at the socket of this launch")
        return


def _user_of(peer: socket.socket) -> int:
    raw = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    return int(_CREDENTIALS.unpack(raw)[1])


def _name(place: Place) -> str:
    """The abstract name of the socket: the same in all processes of this launch on this host, and in no other."""
    what = msgspec.json.encode([os.getuid(), platform.node(), place.host, place.launcher, place.job])
    return "\0distbelief-" + hashlib.blake2b(what, digest_size=16).hexdigest()
