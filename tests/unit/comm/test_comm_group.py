"""An abort ends what a group waits for, and nothing of the group that comes after it."""

from __future__ import annotations

import socket
import threading
import time

import pytest
from torch.distributed import TCPStore

from distbelief.comm.group import Rendezvous, TorchGroup
from distbelief.comm.words import Abort, Aborted


def test_an_abort_that_is_late_leaves_the_sockets_of_the_next_group_alone() -> None:
    """It was meant for a meeting that has ended meanwhile; the sockets that there are now are another group's."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    abort = Abort()

    def set_when_it_waits() -> None:
        time.sleep(0.3)
        abort.set("members have changed")

    threading.Thread(target=set_when_it_waits, daemon=True).start()
    with pytest.raises(Aborted):
        TorchGroup(Rendezvous("127.0.0.1", store.port, "nobody else comes", timeout_s=30), 0, 2, abort)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        abort.wake()
        ours.send(b"still there")
        assert theirs.recv(64) == b"still there"
    del store
