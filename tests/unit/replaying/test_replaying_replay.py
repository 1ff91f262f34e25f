"""Steps of small runs, replayed in the test's own process."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from distbelief.checkpoint.weights import weights_sha256
from distbelief.errors import DistBeliefError
from distbelief.replaying.replay import Asked, Replayed
from distbelief.replaying.replay import replay as execute
from distbelief.replaying.report import WayShown, as_json, lines
from distbelief.verification.plain import make_model, train_plainly
from distbelief.worker.jobfile import load_job
from tests.support.replayed import BAD_SAMPLE, BAD_SHARD, BAD_STEP, JOB, SHARDS, STEPS, journalled, recorded


def replay(run_dir: Path, step: int | None = None, shard: int | None = None) -> Replayed:
    return execute(Asked(run_dir, step, shard), WayShown(io.StringIO()))


def damage(run_dir: Path, step: int) -> None:
    part = run_dir / "checkpoints" / f"step-{step:09}" / "part-00001-of-00001.safetensors"
    content = bytearray(part.read_bytes())
    content[-1] ^= 1
    part.write_bytes(content)


def change(file: Path, edit: Callable[[str], str]) -> None:
    file.write_text(edit(file.read_text()))


def told(text: str, **changes: Any) -> str:
    """A JSON object with some of its values changed."""
    return json.dumps({**json.loads(text), **changes})


def with_steps(edit: Callable[[dict[str, Any]], dict[str, Any]]) -> Callable[[str], str]:
    return lambda text: "".join(json.dumps(edit(json.loads(line))) + "\n" for line in text.splitlines())


def test_every_step_has_the_loss_of_an_ordinary_loop(tmp_path: Path) -> None:
    run_dir = recorded(tmp_path)
    job = load_job(tmp_path / "job.py", {})
    losses = list(train_plainly(job, make_model(job)))
    for step in range(STEPS):
        found = replay(run_dir, step)
        assert found.result is not None
        assert found.result.loss == losses[step]
        assert found.inspection.loss == pytest.approx(losses[step], rel=1e-6)
        assert (found.verdict, found.differs_from, found.other_bits) == ("matched", None, "")
        assert found.update == ("unknown" if step == STEPS - 1 else "matched"), "no weights were recorded"


def test_the_nearest_checkpoint_is_taken(tmp_path: Path) -> None:
    run_dir = recorded(tmp_path, save_at=(2, 5))
    for step, checkpoint in ((1, None), (2, 2), (4, 2), (5, 5), (7, 5)):
        found = replay(run_dir, step)
        assert (found.start.checkpoint, found.began_at) == (checkpoint, checkpoint or 0)
        assert (found.verdict, found.start.skipped) == ("matched", ())


def test_damaged_checkpoints_are_skipped_and_named(tmp_path: Path) -> None:
    run_dir = recorded(tmp_path, save_at=(2, 5))
    damage(run_dir, 5)
    found = replay(run_dir, 6)
    assert (found.start.checkpoint, found.verdict) == (2, "matched")
    damage(run_dir, 2)
    found = replay(run_dir, 6)
    assert (found.start.checkpoint, found.verdict) == (None, "matched")
    assert [step for step, _ in found.start.skipped] == [5, 2]
    assert "skipped: the checkpoint of step 5: " in lines(found)[1]


def test_a_run_that_began_with_given_weights(tmp_path: Path) -> None:
    giver, taker = tmp_path / "giver", tmp_path / "taker"
    giver.mkdir()
    taker.mkdir()
    saved = recorded(giver, save_at=(0, 4)) / "checkpoints"
    run_dir = recorded(taker)
    for step, verdict in ((0, "matched"), (4, "differs")):  # it was recorded with the job's own initial weights
        change(run_dir / "launch.json", lambda text, at=step: told(text, begin_from=str(saved / f"step-{at:09}")))
        found = replay(run_dir, 1)
        assert (found.verdict, found.start.checkpoint) == (verdict, None)


def test_a_layer_that_makes_nan(tmp_path: Path) -> None:
    run_dir = recorded(tmp_path, save_at=(3,), bad="output")
    found = replay(run_dir)
    assert (found.step, found.start.checkpoint, found.verdict) == (BAD_STEP, 3, "unknown")
    assert found.failure is not None
    (origin,) = [one for one in found.inspection.findings if one.origin]
    assert (origin.shard, origin.layer, origin.where, origin.samples) == (BAD_SHARD, "body", "output", (BAD_SAMPLE,))
    assert [one.finite for one in found.inspection.shards] == [v != BAD_SHARD for v in range(SHARDS)]
    assert json.loads(json.dumps(as_json(found), allow_nan=False))["loss"] is None


@pytest.mark.parametrize("save_at", [(), (4,), (4, 6)])
def test_the_step_that_spoilt_the_parameters_is_found(tmp_path: Path, save_at: tuple[int, ...]) -> None:
    """The loss of that step is finite. The run fails one step later; a checkpoint from between is of no use."""
    run_dir = recorded(tmp_path, save_at=save_at, bad="root")
    found = replay(run_dir)
    assert found.failure is not None
    assert (found.failure.step, found.step, found.broke_state) == (BAD_STEP + 1, BAD_STEP, True)
    assert (found.start.checkpoint, found.verdict) == (4 if save_at else None, "matched")
    (finding,) = found.inspection.findings
    assert (finding.shard, finding.layer, finding.where) == (BAD_SHARD, "body", "gradient")
    assert finding.name == "SqrtBackward0"
    assert "this step made them so" in "\n".join(lines(found))
    asked = replay(run_dir, BAD_STEP + 1)
    assert {(one.where, one.name) for one in asked.inspection.findings if one.shard is None} >= {
        ("parameter", "body.scale")
    }
    assert "mask" not in str(asked.inspection.findings), "it is infinite on purpose"


def test_a_step_that_raises(tmp_path: Path) -> None:
    run_dir = recorded(tmp_path, bad="exception")
    found = replay(run_dir)
    assert (found.step, found.result, found.verdict) == (BAD_STEP, None, "unknown")
    assert found.error is not None
    assert found.error.message == "ValueError: what is that?"
    report = "\n".join(lines(found))
    assert f"Shard {BAD_SHARD}, in the layer body: ValueError: what is that?" in report
    assert 'raise ValueError("what is that?")' in report, "the traceback"
    assert as_json(found)["shards"][BAD_SHARD]["error"] == "ValueError: what is that?"


def test_one_shard_alone(tmp_path: Path) -> None:
    run_dir = recorded(tmp_path)
    everything, one = replay(run_dir, 3), replay(run_dir, 3, shard=2)
    assert one.inspection.shards == everything.inspection.shards[2:3]
    assert one.inspection.gradient_norm == pytest.approx(one.inspection.shards[0].gradient_norm)
    assert one.inspection.gradient_norm != pytest.approx(everything.inspection.gradient_norm)
    assert (one.verdict, one.result) == ("matched", everything.result), "the step itself is executed whole"


def test_what_differs(tmp_path: Path) -> None:
    run_dir = recorded(tmp_path)
    wrong = with_steps(lambda record: {**record, "fingerprint": "0" * 16} if record["step"] == 4 else record)
    change(run_dir / "metrics.jsonl", wrong)
    verdicts = {step: (replay(run_dir, step).verdict, replay(run_dir, step).update) for step in (2, 3, 4, 5)}
    assert verdicts == {
        2: ("matched", "matched"),
        3: ("matched", "differs"),
        4: ("differs", "matched"),
        5: ("matched", "matched"),
    }
    assert [replay(run_dir, step).differs_from for step in (4, 5)] == [None, 4]
    assert [replay(run_dir, step).same for step in (2, 3, 4, 5)] == [True, False, False, True]


def test_the_update_of_the_last_step_shows_in_the_weights(tmp_path: Path) -> None:
    run_dir = recorded(tmp_path)
    job = load_job(tmp_path / "job.py", {})
    model = make_model(job)
    list(train_plainly(job, model))
    for weights, update in ((weights_sha256(model), "matched"), ("0" * 64, "differs")):
        journalled(run_dir, {"status": "completed", "result": {"weights_sha256": weights}})
        assert replay(run_dir, STEPS - 1).update == update


def test_a_run_that_was_not_exact(tmp_path: Path) -> None:
    run_dir = recorded(tmp_path)
    change(run_dir / "launch.json", lambda text: text.replace('"allreduce"', '"allreduce:inexact"'))
    found = replay(run_dir, 3)
    assert (found.verdict, found.update, found.exact, found.same) == ("unknown", "unknown", False, True)
    assert found.result is not None
    assert found.result.fingerprint == found.recorded, "it is replayed exactly, shard by shard"


def test_a_run_of_an_impure_job_is_compared_with_nothing(tmp_path: Path) -> None:
    run_dir = recorded(tmp_path)
    change(run_dir / "launch.json", lambda text: text.replace('"impure": false', '"impure": true'))
    found = replay(run_dir, 3)
    assert (found.verdict, found.exact) == ("unknown", False)


def test_a_job_file_that_has_changed(tmp_path: Path) -> None:
    run_dir = recorded(tmp_path)
    (tmp_path / "job.py").write_text(JOB.replace("manual_seed(4)", "manual_seed(5)"))
    found = replay(run_dir, 1)
    assert (found.verdict, found.differs_from) == ("differs", 0)
    assert "the job's data is not that of the run" in found.other_bits


def test_a_job_that_fails_on_the_way(tmp_path: Path) -> None:
    run_dir = recorded(tmp_path)
    for bad, told in (("output", f"cannot be reached: here the loss is nan at step {BAD_STEP}"), ("exception", "what")):
        change(
            run_dir / "launch.json", lambda text, bad=bad: json.dumps({**json.loads(text), "settings": {"bad": bad}})
        )
        with pytest.raises(DistBeliefError, match=told):
            replay(run_dir, BAD_STEP + 1)
    (tmp_path / "job.py").write_text("raise RuntimeError('gone')")
    with pytest.raises(DistBeliefError, match=r"the job file failed in job\.py, line 1: RuntimeError: gone"):
        replay(run_dir, 0)


@pytest.mark.parametrize(
    ("step", "shard", "message"),
    [
        (STEPS, None, "step 8 is not among those of the run"),
        (3, SHARDS, "there is no shard 4: the steps of .* have 4 shards"),
        (None, None, "did not fail"),
    ],
)
def test_what_cannot_be_replayed(tmp_path: Path, step: int | None, shard: int | None, message: str) -> None:
    with pytest.raises(DistBeliefError, match=message):
        replay(recorded(tmp_path), step, shard)
