"""Handlers are called for what can still be read, and for nothing else."""

from __future__ import annotations

import os

from distbelief.launch.pollloop import PollLoop


def test_what_another_handler_has_read_is_not_waited_for() -> None:
    """Both descriptors are the same pipe's: whoever comes first takes what is there, and a second read would block."""
    reading, writing = os.pipe()
    again = os.dup(reading)
    watching, read = PollLoop(), []
    for descriptor in (reading, again):
        watching.watch(descriptor, lambda descriptor=descriptor: read.append(os.read(descriptor, 10)))
    os.write(writing, b"once")
    watching.serve(5.0)
    assert read == [b"once"]
    for descriptor in (reading, again, writing):
        os.close(descriptor)


def test_who_is_not_watched_any_more_is_not_called() -> None:
    pipes = [os.pipe() for _ in range(2)]
    watching, called = PollLoop(), []

    def only_me(mine: int, other: int) -> None:
        called.append(mine)
        watching.unwatch(other)

    watching.watch(pipes[0][0], lambda: only_me(0, pipes[1][0]))
    watching.watch(pipes[1][0], lambda: only_me(1, pipes[0][0]))
    for _, writing in pipes:
        os.write(writing, b"x")
    watching.serve(5.0)
    assert len(called) == 1
    for pair in pipes:
        for descriptor in pair:
            os.close(descriptor)
