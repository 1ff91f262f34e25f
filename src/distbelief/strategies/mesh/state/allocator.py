"""Memory that goes back to the system when it is let go.

A sharded member gathers block after block and lets each go again, and whoever plans a pipeline tries every unit once.
glibc keeps what was let go once it has seen such sizes, in pieces that the next block does not fit into: measured, a
sharded member then takes as much as the whole model does.
"""

from __future__ import annotations

import ctypes

_M_MMAP_THRESHOLD = -3


def return_blocks(size_bytes: int) -> None:
    """For the rest of this process: blocks of this size and more are mapped one by one, and unmapped when they are
    freed. A page that is mapped anew must be cleared, which costs some time. Without glibc nothing happens."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, size_bytes)
