"""The copy that is made beside training: of one step, whoever makes it and whenever training goes on."""

from __future__ import annotations

import threading

import pytest
import torch

from distbelief.strategies.flatmodel.copying import Copy
from distbelief.transport.shm.segment import Segment
from tests.support.replicas.states import Trainer, job_with


def begun(trainer: Trainer) -> tuple[Copy, Segment, bytes]:
    """A copy of the present state that nobody has made yet, its memory, and what must be in it."""
    portion = trainer.replica.portions()[0]
    memory = Segment.private(portion.size_bytes)
    expected = b"".join(
        values.view(torch.uint8).numpy().tobytes() + optimizer.numpy().tobytes()
        for values, optimizer in zip(trainer.state.values, trainer.state.optimizer, strict=True)
    )
    copying = trainer.replica.copy_portion(trainer.replica.steps_applied(), memory)
    assert isinstance(copying, Copy)
    return copying, memory, expected


def content(memory: Segment) -> bytes:
    return bytes(memory.view(0, memory.size_bytes))


@pytest.fixture
def trainer() -> Trainer:
    trainer = Trainer(job_with("AdamW"))
    trainer.train(2)
    return trainer


def test_training_makes_the_copy_itself_before_it_writes(trainer: Trainer) -> None:
    copying, memory, expected = begun(trainer)
    assert content(memory) != expected
    trainer.train(3)
    assert content(memory) == expected
    assert copying.waited_s > 0


def test_training_does_not_wait_for_a_copy_that_is_made(trainer: Trainer) -> None:
    copying, memory, expected = begun(trainer)
    copying.run()
    assert content(memory) == expected
    assert copying.waited_s == 0
    trainer.train(4)
    assert content(memory) == expected


def test_threads_and_training_at_the_same_time(trainer: Trainer) -> None:
    for step in range(3, 23):
        copying, memory, expected = begun(trainer)
        threads = [threading.Thread(target=copying.run) for _ in range(2)]
        for thread in threads:
            thread.start()
        trainer.train(step)
        assert content(memory) == expected
        for thread in threads:
            thread.join()


def test_it_is_finished_when_all_of_it_is_there(trainer: Trainer) -> None:
    """Also when another thread is still at the last tile."""
    copying, memory, expected = begun(trainer)
    at_it, go_on = threading.Event(), threading.Event()
    copy_tile = trainer.state.copy_tile

    def slowly(tile: int, into: Segment, at_bytes: int) -> None:
        if threading.current_thread() is thread:
            at_it.set()
            assert go_on.wait(60)
        copy_tile(tile, into, at_bytes)

    copying._copy = slowly
    thread = threading.Thread(target=copying.run)
    thread.start()
    assert at_it.wait(60)
    threading.Timer(0.05, go_on.set).start()
    copying.finish()
    assert content(memory) == expected
    thread.join()
