"""An abort ends what a group waits for, and nothing of the group that comes after it."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from torch.distributed import TCPStore

from distbelief.comm.group import Rendezvous, TorchGroup
from distbelief.comm.words import Abort, Aborted


def test_an_abort_that_is_late_leaves_the_sockets_of_the_next_group_alone() -> None:
    """It was meant for a meeting that has ended meanwhile; the sockets that there are now are another group's."""
    command = [sys.executable, "-c", "import test_comm_group; print(test_comm_group.abort_late())"]
    done = subprocess.run(  # gloo and its store close what they have opened when they please
        command, cwd=Path(__file__).parent, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "still there\n", done.stderr


def abort_late() -> str:
    """What comes through a socket that was opened after the meeting."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    abort = Abort()

    def set_when_it_waits() -> None:
        time.sleep(0.3)  # most likely it waits by then; if not, it is aborted before it does, and all else is the same
        abort.set("members have changed")

    threading.Thread(target=set_when_it_waits, daemon=True).start()
    try:
        TorchGroup(Rendezvous("127.0.0.1", store.port, "nobody else comes", timeout_s=30), 0, 2, abort)
    except Aborted:
        ours, theirs = socket.socketpair()
        abort.wake()
        ours.send(b"still there")
        return theirs.recv(64).decode()
    return "nothing was aborted"
