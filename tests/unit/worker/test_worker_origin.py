"""What a run begins from: its newest checkpoint that can be used, or weights; and what a checkpoint says of a step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from distbelief.checkpoint.faults import CheckpointDamaged, CheckpointMissing, CheckpointUnusable
from distbelief.checkpoint.manifest import RUN, Facts, part_name
from distbelief.checkpoint.parts import Slice
from distbelief.checkpoint.reading import read_manifest
from distbelief.checkpoint.saving import seal, write_part
from distbelief.checkpoint.weights import save_weights, weights_sha256
from distbelief.errors import DistBeliefError
from distbelief.worker.origin import facts_at, frozen_of, newest_saved, saved_at, weights_of
from distbelief.worker.rules.reports import HEARD_AFTER_S
from distbelief.worker.spec import Origin
from tests.support.replicas.states import Trainer, job_with


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """With checkpoints of steps 1, 2 and 3."""
    made = Trainer(job_with("AdamW"))
    for step in (1, 2, 3):
        made.train(step)
        made.save(str(tmp_path), members=step)
    return made


def damage(folder: Path, step: int, part: int = 1) -> None:
    file = folder / f"step-{step:09d}" / part_name(part, step)
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_the_newest_one_is_taken_with_all_that_goes_with_it(tmp_path: Path, trainer: Trainer) -> None:
    saved, skipped = newest_saved(str(tmp_path))
    assert saved is not None
    assert (saved.step, skipped) == (3, [])
    assert [one.step for one in saved.history] == [0, 1, 2]
    assert Trainer(job_with("AdamW"), lambda: saved).everything() == trainer.everything()


def test_one_that_another_run_has_saved_is_skipped(tmp_path: Path) -> None:
    for step, run_id in ((1, "one"), (2, ""), (3, "two")):  # the second is of an earlier version
        weights = Slice.whole("w", torch.full((2,), float(step)))
        facts = Facts(job={RUN: run_id} if run_id else {}, data={"next_step": step})
        seal(tmp_path, step, facts, [write_part(tmp_path, step, 1, 1, [weights])])
    saved, skipped = newest_saved(str(tmp_path), run_id="one")
    assert saved is not None
    assert saved.step == 2
    assert [(step, "was saved by another run" in why) for step, why in skipped] == [(3, True)]
    saved, skipped = newest_saved(str(tmp_path), at_most=1, run_id="one")
    assert (saved is not None, skipped) == (True, [])
    assert frozen_of(Origin(str(tmp_path), run_id="one"), ["w"])["w"][0] == 2
    (tmp_path / "step-000000002" / "manifest.json").unlink()
    with pytest.raises(CheckpointMissing, match="can be used"):
        newest_saved(str(tmp_path), run_id="three")


def test_one_that_came_later_is_not_looked_at(tmp_path: Path, trainer: Trainer) -> None:
    damage(tmp_path, 3, part=2)
    saved, skipped = newest_saved(str(tmp_path), at_most=2)
    assert saved is not None
    assert (saved.step, skipped) == (2, [])
    assert newest_saved(str(tmp_path), at_most=0) == (None, [])


def test_one_that_is_damaged_is_skipped_with_the_reason(tmp_path: Path, trainer: Trainer) -> None:
    damage(tmp_path, 3, part=2)
    (tmp_path / "step-000000002" / "manifest.json").write_text("{")
    saved, skipped = newest_saved(str(tmp_path))
    assert saved is not None
    assert saved.step == 1
    assert [step for step, _ in skipped] == [3, 2]
    assert f"{part_name(2, 3)} is damaged: its checksum differs" in skipped[0][1]
    assert "manifest.json is torn" in skipped[1][1]


def test_when_none_of_them_can_be_used_nothing_is_begun_anew(tmp_path: Path, trainer: Trainer) -> None:
    for step in (1, 2, 3):
        damage(tmp_path, step)
    with pytest.raises(CheckpointMissing, match=r"no checkpoint in .* can be used") as caught:
        newest_saved(str(tmp_path))
    assert caught.value.details.count("its checksum differs") == 3


@pytest.mark.parametrize("folder", ["empty", "not there"])
def test_where_there_is_no_checkpoint_there_is_nothing_to_begin_from(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    assert newest_saved(str(tmp_path / folder)) == (None, [])


def test_a_certain_step_is_read_and_checked(tmp_path: Path, trainer: Trainer) -> None:
    assert saved_at(str(tmp_path), 2).step == 2
    damage(tmp_path, 2)
    with pytest.raises(CheckpointDamaged):
        saved_at(str(tmp_path), 2)
    with pytest.raises(CheckpointMissing):
        saved_at(str(tmp_path), 7)


# --- what a checkpoint says of its step ------------------------------------------------------------------------------


def test_a_checkpoint_says_where_the_data_goes_on_and_what_the_last_steps_gave(
    tmp_path: Path, trainer: Trainer
) -> None:
    manifest = read_manifest(str(tmp_path), 3)
    assert manifest.data["next_step"] == 3
    assert [one["step"] for one in manifest.data["history"]] == [0, 1, 2]
    last = trainer.replica.remembered(2)[0]
    assert manifest.data["history"][-1]["fingerprint"] == last.fingerprint
    assert manifest.metrics == {"training_loss": last.loss}


def test_what_an_evaluation_of_the_step_gave_is_among_its_metrics(trainer: Trainer) -> None:
    trainer.replica.keep_note(b'{"accuracy": 0.75}')
    facts = facts_at(Facts(job={"name": "digits"}), trainer.replica, 3)
    assert facts.job == {"name": "digits"}
    assert facts.metrics.keys() == {"training_loss", "accuracy"}
    assert facts.metrics["accuracy"] == 0.75
    trainer.train(4)
    assert facts_at(Facts(), trainer.replica, 4).metrics.keys() == {"training_loss"}, "it was of the step before"


def test_steps_that_everybody_has_long_heard_of_are_left_out(trainer: Trainer) -> None:
    old = trainer.state._history
    old["at"][:2] -= 2 * HEARD_AFTER_S
    assert [one["step"] for one in facts_at(Facts(), trainer.replica, 3).data["history"]] == [2]


def test_facts_of_another_shape_make_a_checkpoint_unusable_and_not_the_run_fail(
    tmp_path: Path, trainer: Trainer
) -> None:
    """It was saved by something else, such as a conversion: the next older one may do."""
    part = write_part(str(tmp_path), 5, 1, 1, [Slice.whole("w", torch.ones(2))])
    seal(str(tmp_path), 5, Facts(data={"position": 3}), [part])
    with pytest.raises(CheckpointUnusable):
        saved_at(str(tmp_path), 5)
    saved, _ = newest_saved(str(tmp_path))
    assert saved is not None
    assert saved.step == 3


# --- weights ---------------------------------------------------------------------------------------------------------


def test_weights_alone_are_of_step_0_whatever_they_are_read_from(tmp_path: Path, trainer: Trainer) -> None:
    save_weights(trainer.model, tmp_path / "weights.safetensors")
    for where in (tmp_path / "weights.safetensors", tmp_path / "step-000000003"):
        saved = weights_of(str(where))
        assert (saved.step, saved.history, saved.note) == (0, (), b"")
        assert all(name.startswith("model/") for name in saved.tensors)
        again = Trainer(job_with("AdamW", seed=99), lambda saved=saved: saved)
        again.replica.synchronise()
        assert weights_sha256(again.model) == weights_sha256(trainer.model)


def test_weights_that_are_not_there_are_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(DistBeliefError, match="nowhere"):
        weights_of(str(tmp_path / "nowhere"))


# --- frozen parameters -----------------------------------------------------------------------------------------------

FROZEN = ["model/frozen.weight", "model/frozen.bias"]


def test_every_worker_takes_frozen_parameters_from_the_newest_sound_checkpoint(
    tmp_path: Path, trainer: Trainer
) -> None:
    damage(tmp_path, 3)
    found = frozen_of(Origin(str(tmp_path)), FROZEN)
    assert sorted(found) == sorted(FROZEN)
    assert torch.equal(found["model/frozen.weight"], trainer.model.frozen.weight)


def test_or_from_the_weights_that_the_run_began_with(tmp_path: Path, trainer: Trainer) -> None:
    save_weights(trainer.model, tmp_path / "weights.safetensors")
    nothing = tmp_path / "nothing"
    found = frozen_of(Origin(str(nothing), str(tmp_path / "weights.safetensors")), FROZEN)
    assert torch.equal(found["model/frozen.bias"], trainer.model.frozen.bias)
    assert frozen_of(Origin(str(nothing)), FROZEN) == {}


def test_when_there_are_checkpoints_and_none_can_be_read_that_is_an_error(tmp_path: Path, trainer: Trainer) -> None:
    for step in (1, 2, 3):
        (tmp_path / f"step-{step:09d}" / "manifest.json").write_text("{")
    with pytest.raises(CheckpointMissing, match=r"no checkpoint in .* can be used"):
        frozen_of(Origin(str(tmp_path)), FROZEN)
