"""The saver among older files: checkpoints of before a resume, rests of saves that were cut short, and what is to be
kept of those that are sealed."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from distbelief.checkpoint import saving as retention
from distbelief.checkpoint.manifest import part_name
from distbelief.checkpoint.reading import list_checkpoints, verify
from distbelief.control.messages import CheckpointSealed, PartSaved
from distbelief.errors import DistBeliefError
from tests.support.worker.crew import WAIT_S, Crew, quickly


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quickly(monkeypatch)


# --- a step that is sealed already -----------------------------------------------------------------------------------


def test_a_sound_checkpoint_of_the_step_counts_as_sealed(tmp_path: Path) -> None:
    Crew(tmp_path, 3).save(2)
    crew = Crew(tmp_path, 2)
    crew.take(2)
    news = crew.hear(CheckpointSealed)
    assert (news.worker, news.step) == (0, 2)
    assert news.size_bytes > 0
    crew.silence()
    assert len(verify(crew.folder, 2).parts) == 3, "it is left as it was"
    crew.take(3, 1)  # the second one has waited for the first to decide
    assert crew.hear(PartSaved).step == 3


def test_who_waits_for_the_first_member_to_look_at_it_has_room_for_the_last_one(tmp_path: Path) -> None:
    """Two generations began at a step that was sealed meanwhile: both copies wait, for nothing."""
    Crew(tmp_path, 2).save(2)
    crew = Crew(tmp_path, 2)
    crew.take(2, 1, generation=1)
    crew.take(2, 1, generation=2)
    last = threading.Thread(target=lambda: crew.take(3, 1, generation=2, last=True), daemon=True)
    last.start()
    last.join(WAIT_S)
    assert not last.is_alive()
    assert crew.hear(PartSaved).step == 3


def test_a_damaged_checkpoint_of_the_step_is_replaced(tmp_path: Path) -> None:
    """The run was resumed from an older one, and has come to this step again."""
    Crew(tmp_path, 3).save(2)
    part = tmp_path / "step-000000002" / part_name(1, 3)
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)
    crew = Crew(tmp_path, 2)
    crew.take(2)
    crew.seal(2)
    crew.hear(CheckpointSealed)
    assert len(verify(crew.folder, 2).parts) == 2
    assert len(list((tmp_path / "step-000000002").iterdir())) == 3


# --- clearing up -----------------------------------------------------------------------------------------------------


def test_after_a_seal_the_oldest_go_and_what_is_to_be_kept_stays(tmp_path: Path) -> None:
    crew = Crew(tmp_path, keep_last=2, keep_every=4, keep_best=("accuracy", True))
    for step, accuracy in enumerate([0.5, 0.9, 0.6, 0.7, 0.8, 0.4], start=1):
        crew.save(step, accuracy=accuracy)
    assert list_checkpoints(crew.folder) == [6, 5, 4, 2]


def test_the_rests_of_saves_that_were_cut_short_are_removed_after_a_seal(tmp_path: Path) -> None:
    rest = tmp_path / "step-000000001"
    crew = Crew(tmp_path, 2)
    crew.take(1, 0)
    crew.hear(PartSaved)
    assert rest.exists()
    crew.save(2)
    assert not rest.exists()
    assert list_checkpoints(crew.folder) == [2]


def test_newer_ones_that_the_run_could_not_go_on_from_do_not_crowd_out_those_that_it_can(tmp_path: Path) -> None:
    before = Crew(tmp_path, keep_last=1)
    before.save(5)
    part = tmp_path / "step-000000005" / part_name(1, 1)
    part.write_bytes(part.read_bytes()[:-1])
    after = Crew(tmp_path, 2, keep_last=1)
    after.save(2)
    assert list_checkpoints(after.folder) == [5, 2]
    after.take(3)
    three = after.parts()
    after.take(4, 0)  # it is being written when the one before it is sealed
    first = after.hear(PartSaved)
    after.seal(3, parts=three)
    after.hear(CheckpointSealed)
    assert list_checkpoints(after.folder) == [5, 3]
    after.take(4, 1)
    after.seal(4, parts=(first, after.hear(PartSaved)))
    assert after.hear(CheckpointSealed).step == 4
    assert verify(after.folder, 4).step == 4


def test_what_cannot_be_removed_does_not_make_a_checkpoint_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    crew = Crew(tmp_path, keep_last=1)
    crew.save(1)

    def refused(folder: str, step: int) -> None:
        raise DistBeliefError("no permission")

    monkeypatch.setattr(retention, "delete", refused)
    crew.save(2)
    assert list_checkpoints(crew.folder) == [2, 1]
    assert "old checkpoints were not removed: no permission" in capfd.readouterr().out
