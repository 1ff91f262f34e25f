"""The saver: training waits for a copy only; what is written, told, tried again, given up and sealed. (What it does
about other files in the folder is in test_worker_saving_files.py.)"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from distbelief.checkpoint.manifest import part_name
from distbelief.checkpoint.reading import list_checkpoints, verify
from distbelief.control.messages import CheckpointSealed, PartSaved, SaveFailed, SaveMissed
from distbelief.errors import NotEnoughMemory
from distbelief.options import SavePlan
from distbelief.transport.shm.memfd import require_memory
from distbelief.worker import saving
from distbelief.worker import saving as copies
from distbelief.worker.origin import saved_at
from distbelief.worker.rules.control import Save, Seal
from distbelief.worker.rules.writing import LAST_TRIES
from distbelief.worker.saving import Saver
from distbelief.worker.training import is_save_due
from tests.support.worker.crew import SILENCE_S, WAIT_S, Crew, Trainer, job_with, quickly


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quickly(monkeypatch)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that takes no part before the gate is open."""
    write, opened = saving.write_part, threading.Event()

    def slow(*arguments: object) -> object:
        assert opened.wait(WAIT_S)
        return write(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(saving, "write_part", slow)
    yield opened
    opened.set()


def spoil(folder: Path) -> Path:
    """Nothing can be written there until what this returns is removed."""
    folder.mkdir(parents=True, exist_ok=True)
    obstacle = folder / "step-000000002"
    obstacle.write_text("a file where a folder belongs")
    return obstacle


class Unread(SimpleQueue[Any]):
    """Whoever copies does not come to it."""

    def put(self, item: Any, block: bool = True, timeout: float | None = None) -> None:
        pass


# --- asked for -------------------------------------------------------------------------------------------------------


def test_a_step_that_is_asked_for_is_due(tmp_path: Path) -> None:
    saver = Crew(tmp_path, every_steps=4).savers[0]
    assert [step for step in range(1, 11) if is_save_due(saver.plan, saver.asked, step, 10, step - 1)] == [4, 8, 10]
    saver.ask(Save(7), present=3)
    assert [step for step in range(1, 11) if is_save_due(saver.plan, saver.asked, step, 10, step - 1)] == [4, 7, 8, 10]


def test_a_step_that_is_over_was_missed_and_that_is_said(tmp_path: Path) -> None:
    crew = Crew(tmp_path)
    crew.savers[0].ask(Save(3), present=3)
    crew.silence()  # it may be about to take it
    crew.savers[0].ask(Save(3), present=4)
    assert crew.hear(SaveMissed) == SaveMissed(0, 3)


def test_a_step_that_was_saved_is_not_missed_and_told_again_when_asked_again(tmp_path: Path) -> None:
    """The coordinator asks again because it does not know of the part."""
    crew = Crew(tmp_path)
    crew.take(2)
    told = crew.hear(PartSaved)
    crew.savers[0].ask(Save(2), present=3)
    assert crew.hear(PartSaved) == told
    crew.seal(2, parts=(told,))
    crew.hear(CheckpointSealed)
    crew.savers[0].ask(Save(2), present=3)
    news = crew.hear(CheckpointSealed)
    assert (news.worker, news.step) == (0, 2)
    assert news.size_bytes > 0


def test_a_step_whose_part_is_still_being_written_is_not_missed(tmp_path: Path, gate: threading.Event) -> None:
    crew = Crew(tmp_path)
    crew.take(2)
    crew.savers[0].ask(Save(2), present=3)
    crew.silence()
    gate.set()
    crew.hear(PartSaved)


# --- parts and seals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("members", [1, 3])
def test_each_writes_its_part_and_tells_and_whoever_is_asked_seals_it(tmp_path: Path, members: int) -> None:
    crew = Crew(tmp_path / "checkpoints", members)
    crew.take(2, generation=5)
    parts = crew.parts()
    assert [(one.worker, one.generation, one.step) for one in parts] == [(rank, 5, 2) for rank in range(members)]
    assert list_checkpoints(crew.folder) == []
    for number, one in enumerate(parts, start=1):
        file = tmp_path / "checkpoints" / "step-000000002" / part_name(number, members)
        assert file.stat().st_size == one.part.size_bytes
        assert min(one.pause_s, one.write_s) > 0
    crew.seal(2, sealer=members - 1, parts=parts)
    news = crew.hear(CheckpointSealed)
    assert (news.worker, news.step) == (members - 1, 2)
    assert news.size_bytes > 0
    manifest = verify(crew.folder, 2)
    assert [one.sha256 for one in manifest.parts] == [one.part.sha256 for one in parts]


def test_what_is_saved_is_the_state_at_the_snapshot_although_training_goes_on(
    tmp_path: Path, gate: threading.Event
) -> None:
    crew = Crew(tmp_path, 2)
    crew.take(2)
    then = crew.trainer.everything()
    crew.trainer.train(5)
    gate.set()
    crew.seal(2)
    crew.hear(CheckpointSealed)
    assert crew.trainer.everything() != then
    assert Trainer(job_with("AdamW"), lambda: saved_at(crew.folder, 2)).everything() == then


def test_a_member_that_lets_go_of_its_generation_has_copied_what_the_next_one_writes_to(
    tmp_path: Path, gate: threading.Event
) -> None:
    """The replica of the next generation knows nothing of the copy."""
    crew = Crew(tmp_path)
    crew.savers[0]._to_copy = Unread()
    crew.take(1)  # the writer is busy with it
    crew.take(2)
    then = crew.trainer.everything()
    crew.savers[0].let_go()
    crew.trainer.replica._copies.clear()
    crew.trainer.train(4)
    gate.set()
    one, two = crew.parts(), crew.parts()
    for step, parts in ((1, one), (2, two)):
        crew.seal(step, parts=parts)
        crew.hear(CheckpointSealed)
    assert crew.trainer.everything() != then
    assert Trainer(job_with("AdamW"), lambda: saved_at(crew.folder, 2)).everything() == then


def test_a_checkpoint_of_another_run_is_not_taken_for_its_own(tmp_path: Path) -> None:
    other, crew = Crew(tmp_path), Crew(tmp_path)
    other.run_id, crew.run_id = "other", "crew"
    other.save(2)
    theirs = verify(tmp_path, 2)
    crew.take(2)
    assert "was saved by another run" in crew.hear(SaveFailed).message
    assert verify(tmp_path, 2) == theirs


def test_asked_again_to_seal_it_says_that_it_is_done(tmp_path: Path) -> None:
    crew = Crew(tmp_path, 2)
    crew.take(2)
    parts = crew.parts()
    for sealer in (0, 0, 1):
        crew.seal(2, sealer, parts=parts)
        news = crew.hear(CheckpointSealed)
        assert (news.worker, news.step) == (sealer, 2)
        assert news.size_bytes > 0
    assert verify(crew.folder, 2).step == 2


def test_who_knows_nothing_of_a_step_does_not_seal_it(tmp_path: Path) -> None:
    crew = Crew(tmp_path, 2)
    crew.take(2)
    parts = crew.parts()
    stranger = Saver(SavePlan(crew.folder), 9, crew.told.put)
    stranger.seal(Seal(2, tuple(one.part for one in parts)))
    crew.silence()
    assert list_checkpoints(crew.folder) == []


def test_parts_of_another_generation_than_that_of_its_own_snapshot_are_not_sealed(tmp_path: Path) -> None:
    """A generation of one took the step anew; the request to seal that of two is late. Its saver must survive it."""
    crew = Crew(tmp_path, 2)
    crew.take(2)
    parts = crew.parts()
    crew.members = 1
    crew.take(2, generation=2)
    (alone,) = crew.parts()
    crew.seal(2, parts=parts)
    crew.silence()
    crew.seal(2, parts=(alone,))
    crew.hear(CheckpointSealed)
    assert len(verify(crew.folder, 2).parts) == 1


def test_a_part_that_is_gone_is_not_waited_for(tmp_path: Path) -> None:
    crew = Crew(tmp_path, 2)
    crew.take(2)
    parts = crew.parts()
    (tmp_path / "step-000000002" / part_name(2, 2)).unlink()
    crew.seal(2, parts=parts)
    failed = crew.hear(SaveFailed)
    assert (failed.step, failed.gave_up) == (2, True)
    assert f"{part_name(2, 2)} is missing" in failed.message


def test_a_manifest_that_cannot_be_written_is_said_and_may_be_asked_for_again(tmp_path: Path) -> None:
    crew = Crew(tmp_path)
    crew.take(2)
    parts = crew.parts()
    in_the_way = tmp_path / "step-000000002" / "manifest.json"
    in_the_way.mkdir()
    crew.seal(2, parts=parts)
    failed = crew.hear(SaveFailed)
    assert (failed.step, failed.gave_up) == (2, False)
    in_the_way.rmdir()
    crew.seal(2, parts=parts)
    crew.hear(CheckpointSealed)


# --- failures --------------------------------------------------------------------------------------------------------


def test_what_cannot_be_written_is_said_and_tried_again_from_the_same_copy(tmp_path: Path) -> None:
    obstacle = spoil(tmp_path)
    crew = Crew(tmp_path)
    crew.take(2)
    then = crew.trainer.everything()
    for _ in range(3):
        failed = crew.hear(SaveFailed)
        assert (failed.worker, failed.step, failed.gave_up) == (0, 2, False)
        assert "cannot write" in failed.message
        assert failed.hint
    crew.trainer.train(4)
    obstacle.unlink()
    while isinstance(event := crew.told.get(timeout=WAIT_S), SaveFailed):
        pass
    assert isinstance(event, PartSaved)
    crew.seal(2, parts=(event,))
    crew.hear(CheckpointSealed)
    assert Trainer(job_with("AdamW"), lambda: saved_at(crew.folder, 2)).everything() == then


def test_a_newer_snapshot_makes_an_older_one_that_fails_pointless(tmp_path: Path) -> None:
    spoil(tmp_path)
    crew = Crew(tmp_path)
    crew.take(2)
    assert not crew.hear(SaveFailed).gave_up
    crew.take(3)
    while isinstance(event := crew.told.get(timeout=WAIT_S), SaveFailed) and not event.gave_up:
        assert event.step == 2
    assert isinstance(event, SaveFailed)
    assert (event.step, event.gave_up) == (2, True)
    assert crew.hear(PartSaved).step == 3


def test_the_last_one_is_given_up_after_so_many_tries(tmp_path: Path) -> None:
    spoil(tmp_path)
    crew = Crew(tmp_path)
    crew.take(2, last=True)
    failures = [crew.hear(SaveFailed) for _ in range(LAST_TRIES)]
    assert [one.gave_up for one in failures] == [False] * (LAST_TRIES - 1) + [True]
    crew.silence()


def test_a_snapshot_that_the_next_generation_takes_of_the_same_step_is_not_given_up_with_the_older_one(
    tmp_path: Path,
) -> None:
    obstacle = spoil(tmp_path)
    crew = Crew(tmp_path)
    crew.take(2, generation=1, last=True)
    crew.hear(SaveFailed)
    crew.take(2, generation=2, last=True)
    failures = []
    while not crew.savers[0]._waiting.empty():  # until the thread has turned to the newer one
        failures.append(crew.hear(SaveFailed))
    obstacle.unlink()
    while isinstance(event := crew.told.get(timeout=WAIT_S), SaveFailed):
        failures.append(event)
    assert isinstance(event, PartSaved)
    assert event.generation == 2
    assert not any(one.gave_up for one in failures)


def test_a_fault_that_nobody_thought_of_is_told_and_does_not_end_the_saver(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = Crew(tmp_path)
    write = saving.write_part
    monkeypatch.setattr(saving, "write_part", lambda *arguments: 1 / 0)
    crew.take(2)
    failed = crew.hear(SaveFailed)
    assert "ZeroDivisionError" in failed.message
    assert "worker-0.log" in failed.hint
    monkeypatch.setattr(saving, "write_part", write)
    while isinstance(crew.told.get(timeout=WAIT_S), SaveFailed):
        pass
    crew.save(3)


# --- two copies ------------------------------------------------------------------------------------------------------


def test_when_both_copies_are_in_use_the_next_is_skipped_and_that_is_said(
    tmp_path: Path, gate: threading.Event
) -> None:
    crew = Crew(tmp_path)
    for step in (1, 2, 3):
        crew.take(step)
    failed = crew.hear(SaveFailed)
    assert (failed.step, failed.gave_up) == (3, True)
    assert failed.message == "the two checkpoints before it are still being written"
    assert "less often" in failed.hint
    gate.set()
    assert [crew.hear(PartSaved).step for _ in range(2)] == [1, 2]
    crew.take(4)
    assert crew.hear(PartSaved).step == 4


def test_the_last_one_waits_for_a_free_copy(tmp_path: Path, gate: threading.Event) -> None:
    crew = Crew(tmp_path)
    crew.take(1)
    crew.take(2)
    last = threading.Thread(target=lambda: crew.take(3, last=True))
    last.start()
    last.join(SILENCE_S)
    assert last.is_alive()
    gate.set()
    last.join(WAIT_S)
    assert [crew.hear(PartSaved).step for _ in range(3)] == [1, 2, 3]


def test_a_member_of_a_smaller_generation_needs_a_larger_copy(tmp_path: Path) -> None:
    crew = Crew(tmp_path, 3)
    for step in (1, 2):
        crew.take(step, 0)
        crew.hear(PartSaved)
    crew.members = 1
    for step in (3, 4):
        crew.take(step, 0, generation=2)
    for step, written in zip((3, 4), [crew.parts(), crew.parts()], strict=True):
        crew.seal(step, parts=written)
        crew.hear(CheckpointSealed)
    assert list_checkpoints(crew.folder) == [4, 3]


def test_memory_that_is_not_there_beforehand_costs_no_copy_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gate: threading.Event
) -> None:
    asked = threading.Event()

    def nothing_left(label: str, size_bytes: int) -> int:
        asked.set()
        raise NotEnoughMemory(f"not enough memory for {label}")

    crew = Crew(tmp_path)
    monkeypatch.setattr(copies, "require_memory", nothing_left)
    crew.savers[0].prepare(crew.trainer.replica)
    assert asked.wait(WAIT_S)
    monkeypatch.setattr(copies, "require_memory", require_memory)
    crew.take(1)
    crew.take(2)
    gate.set()
    assert [crew.hear(PartSaved).step for _ in range(2)] == [1, 2]


def test_a_later_generation_loses_no_time_for_memory_that_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crew = Crew(tmp_path)
    crew.save(1)

    def asked(replica: object) -> None:
        raise AssertionError("what each member saves was worked out")

    monkeypatch.setattr(type(crew.trainer.replica), "portions", asked)
    crew.savers[0].prepare(crew.trainer.replica)
    with pytest.raises(AssertionError, match="worked out"):
        Saver(SavePlan(crew.folder), 1, crew.told.put).prepare(crew.trainer.replica)
