"""moto's S3 server in a process of its own, and a gate before it that can be slammed shut.

moto keeps everything in memory, so killing its process would lose what was sealed. The gate gives a client what a kill
would: connections are reset in the middle of a request and new ones refused, until it is opened again on the same port.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator

_SERVER = """
import logging, sys
logging.getLogger("werkzeug").setLevel(logging.ERROR)
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
print(server.get_host_and_port()[1], flush=True)
sys.stdin.read()  # until the test run lets go of it, or dies
"""
_CHUNK_BYTES = 1 << 16


@contextlib.contextmanager
def s3_server() -> Iterator[int]:
    """The port of a new, empty server on loopback."""
    with subprocess.Popen([sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            yield int(process.stdout.readline())
        finally:
            process.stdin.close()
            process.wait()


class Gate:
    """A relay to the server; `shut_after` bytes of requests it shuts by itself. Use as a context manager."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._left: int | None = None
        self.port: int = self._listener.getsockname()[1]
        self._serve()

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self.shut()

    def shut_after(self, size_bytes: int) -> None:
        with self._lock:
            self._left = size_bytes

    @property
    def is_shut(self) -> bool:
        return self._listener.fileno() < 0

    def shut(self) -> None:
        with self._lock:
            self._shut()

    def reopen(self) -> None:
        with self._lock:
            self._left = None
            self._listener = socket.create_server(("127.0.0.1", self.port))
        self._serve()

    def _shut(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._listener.close()
        for one in self._open:
            with contextlib.suppress(OSError):
                one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset, not an end
                one.shutdown(socket.SHUT_RDWR)
            one.close()
        self._open.clear()

    def _serve(self) -> None:
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._server_port))
                with self._lock:
                    if listener.fileno() < 0:
                        near.close()
                        far.close()
                        return
                    self._open |= {near, far}
                threading.Thread(target=self._pump, args=(near, far, True), daemon=True).start()
                threading.Thread(target=self._pump, args=(far, near, False), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, request: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_CHUNK_BYTES):
                with self._lock:
                    if request and self._left is not None:
                        self._left -= len(data)
                        if self._left < 0:
                            self._shut()
                            return
                sink.sendall(data)
        with self._lock:
            for one in (source, sink):
                if one in self._open:
                    self._open.remove(one)
                    one.close()
