"""`kv.serve`: a key-value service beside this process, for as long as a `with` block lasts."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from distbelief.errors import DistBeliefError
from distbelief.kv.connection import endpoint

_ENDS_IN_S = 10.0


@contextlib.contextmanager
def serve(servers: int = 2, *, listen: str = "127.0.0.1", shared_memory: bool = True) -> Iterator[str]:
    """Start a key-value service with so many servers; it ends with the block. Gives what `kv.connect` needs: the path
    of the connection file, which holds the service's secret and is readable by its owner only. With `listen`, an
    address of this machine (HOST or HOST:PORT), clients on other machines can come too: give them the file.

        with kv.serve(servers=2) as address:
            store = kv.connect(address)  # here, or in any other process
    """
    if servers < 1:
        raise DistBeliefError(f"a key-value service cannot have {servers} servers", hint="1 or more")
    where = endpoint(listen)
    folder = Path(tempfile.mkdtemp(prefix="distbelief-kv-"))
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "distbelief.kv"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # a terminal's Ctrl-C is for this process, which then ends the service
        )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            order = {"folder": str(folder), "servers": servers, "listen": where, "shares": shared_memory}
            process.stdin.write(json.dumps(order).encode() + b"\n")
            process.stdin.flush()
            line = process.stdout.readline()
            answer = json.loads(line) if line else {"error": "the key-value service ended before it could serve"}
            if "error" in answer:
                raise DistBeliefError(answer["error"], hint=answer.get("hint", ""), details=answer.get("details", ""))
            yield str(answer["file"])
        finally:
            process.stdin.close()  # this ends it
            try:
                process.wait(_ENDS_IN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
