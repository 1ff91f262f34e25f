"""What a run was started with, as `resume` and its workers find it again."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import fields, replace
from pathlib import Path

import msgspec
import pytest

from distbelief.control.credentials import NO_CREDENTIAL
from distbelief.coordinator.rules.vocabulary import RunConfig
from distbelief.errors import DistBeliefError
from distbelief.launch import rundir
from distbelief.launch.launch import Launch, keep_launch, read_launch
from distbelief.worker.spec import Origin, SavePlan

FULL = Launch(
    run_dir=Path("/nowhere"),
    workers=3,
    strategy="allreduce",
    exact=False,
    transport="gloo",
    threads=2,
    shares=(1.0, 2.0, 3.0),
    job_file="/jobs/digits.py",
    settings={"lr": "0.1"},
    sys_path=("/jobs",),
    worker_threads={2: 4},
    min_workers=2,
    balance=False,
    stuck_after_s=5.0,
    listen="tcp://0.0.0.0:*",
    most_steps=100,
    checkpoints="s3://bucket/run",
    save_every="30s",
    keep_last=5,
    keep_every=10,
    keep_best="loss:min",
    begin_from="/weights.safetensors",
    profile="10:20",
)


def plain(run_dir: Path, **more: object) -> Launch:
    return Launch(run_dir, workers=2, strategy="allreduce", exact=True, transport="auto", **more)


# --- kept and read again ---------------------------------------------------------------------------------------------


def test_what_was_kept_is_read_again(tmp_path: Path) -> None:
    launch = replace(FULL, run_dir=tmp_path)
    keep_launch(launch)
    found = read_launch(tmp_path)
    assert found == replace(launch, dial=found.dial)
    assert [file.name for file in tmp_path.iterdir()] == ["launch.json"], "and no draft is left"


def test_every_field_is_kept_but_those_of_one_start(tmp_path: Path) -> None:
    keep_launch(replace(FULL, run_dir=tmp_path, job_pickle=b"secret", resumed=True))
    kept = json.loads((tmp_path / "launch.json").read_text())
    of_one_start = {"run_dir", "job_pickle", "dial", "resumed", "host", "is_away"}
    assert {one.name for one in fields(Launch)} - kept.keys() == of_one_start
    assert not read_launch(tmp_path).resumed


def test_the_run_directory_is_where_it_is_found_now(tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    keep_launch(plain(tmp_path / "before"))
    (tmp_path / "before").rename(tmp_path / "after")
    found = read_launch(tmp_path / "after")
    assert found.run_dir == tmp_path / "after"
    assert found.checkpoint_folder == str(tmp_path / "after" / "checkpoints")


def test_fields_of_a_later_version_are_passed_over_and_missing_ones_have_their_defaults(tmp_path: Path) -> None:
    keep_launch(plain(tmp_path))
    file = tmp_path / "launch.json"
    kept = json.loads(file.read_text())
    del kept["keep_best"], kept["balance"]
    file.write_text(json.dumps({**kept, "invented_later": [1, 2]}))
    found = read_launch(tmp_path)
    assert (found.keep_best, found.balance, found.workers) == ("", True, 2)


def test_relative_places_mean_the_same_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "there", "run"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    keep_launch(plain(tmp_path / "run", checkpoints="saved", begin_from="weights.safetensors"))
    monkeypatch.chdir(tmp_path / "there")
    found = read_launch(tmp_path / "run")
    assert found.checkpoint_folder == str(tmp_path / "here" / "saved")
    assert found.begin_from == str(tmp_path / "here" / "weights.safetensors")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "is no run directory"),
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ('{"workers": "many"}', "is damaged"),
        ('{"workers": 2}', "is damaged"),
    ],
)
def test_what_cannot_be_read_is_an_error_in_words(tmp_path: Path, content: str | None, fault: str) -> None:
    if content is not None:
        (tmp_path / "launch.json").write_text(content)
    with pytest.raises(DistBeliefError, match=fault):
        read_launch(tmp_path)


def test_a_place_that_cannot_be_written_is_an_error_in_words(tmp_path: Path) -> None:
    with pytest.raises(DistBeliefError, match=r"cannot write .*launch\.json: No such file"):
        keep_launch(plain(tmp_path / "nowhere"))


def test_a_run_that_somebody_runs_is_not_resumed_beside_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rundir, "IDLE_S", 0.0)
    keep_launch(plain(tmp_path))
    fd = os.open(tmp_path / "journal.jsonl.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(DistBeliefError, match="is running"):
        keep_launch(replace(plain(tmp_path), workers=3, resumed=True))
    assert read_launch(tmp_path).workers == 2, "nothing of it is touched"
    os.close(fd)
    keep_launch(replace(plain(tmp_path), workers=3, resumed=True))
    assert read_launch(tmp_path).workers == 3


# --- what workers and the coordinator are told -----------------------------------------------------------------------


def test_workers_are_told_where_and_when_to_save_and_what_to_keep(tmp_path: Path) -> None:
    launch = plain(tmp_path, save_every="50", keep_last=4, keep_every=100, keep_best="accuracy")
    assert launch.save_plan == SavePlan(str(tmp_path / "checkpoints"), 50, 4, 100, ("accuracy", True))
    assert launch.save_every_s == 0.0


def test_every_so_many_seconds_is_the_coordinators_business(tmp_path: Path) -> None:
    launch = plain(tmp_path, save_every="90s", checkpoints="s3://bucket/run")
    assert launch.save_plan == SavePlan("s3://bucket/run", 0)
    assert launch.save_every_s == 90.0


def test_without_checkpoints_nobody_is_told_of_any(tmp_path: Path) -> None:
    launch = plain(tmp_path, save_every="never", resumed=True)
    assert (launch.save_plan, launch.save_every_s, launch.origin) == (None, 0.0, None)


def test_every_worker_is_told_what_the_run_goes_on_from_if_nobody_has_its_state(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    assert plain(tmp_path).origin == Origin(folder)
    assert plain(tmp_path, begin_from="/w").origin == Origin(folder, "/w")
    assert plain(tmp_path, begin_from="/w", save_every="never").origin == Origin("", "/w")
    assert plain(tmp_path, resumed=True).origin == Origin(folder, "", resumed=True)


def test_the_coordinator_understands_what_it_is_told_of_the_run(tmp_path: Path) -> None:
    config = msgspec.convert(replace(FULL, run_dir=tmp_path).run_config(), RunConfig)
    assert (config.workers, config.min_workers, config.shares) == (3, 2, [1.0, 2.0, 3.0])
    assert (config.transport, config.exact, config.balance, config.stuck_s) == ("gloo", False, False, 5.0)
    assert (config.saves, config.save_every_s) == (True, 30.0)
    assert not msgspec.convert(plain(tmp_path, save_every="never").run_config(), RunConfig).saves


def test_where_others_can_come_memory_is_not_shared_unless_that_is_asked_for(tmp_path: Path) -> None:
    assert plain(tmp_path, listen="tcp://0.0.0.0:*").usable_transport == "gloo"
    assert replace(plain(tmp_path, listen="tcp://0.0.0.0:*"), transport="shm").usable_transport == "shm"


def test_only_a_state_that_is_on_accelerators_keeps_members_from_sharing_one(tmp_path: Path) -> None:
    on_gpu = plain(tmp_path, device="cuda")
    several = [replace(on_gpu, strategy=name) for name in ("allreduce", "ps:sync", "local_sgd:4", "sandblaster")]
    assert [one.on_accelerators for one in several] == [True, False, False, False]
    assert not plain(tmp_path).on_accelerators


def test_every_worker_is_told_its_own_number_of_threads_and_its_own_address(tmp_path: Path) -> None:
    launch = replace(FULL, run_dir=tmp_path, dial=lambda worker, address: f"{address}/{worker}")
    one, two = (launch.worker_spec(worker, "host", "tcp://there", NO_CREDENTIAL) for worker in (1, 2))
    assert (one.threads, two.threads) == (2, 4)
    assert (one.address, two.address) == ("tcp://there/1", "tcp://there/2")
    assert (two.saves, two.origin, two.most_steps) == (launch.save_plan, launch.origin, 100)


# --- strategies that divide the model --------------------------------------------------------------------------------


def divided(strategy: str, workers: int, **more: object) -> Launch:
    return Launch(Path("/nowhere"), workers, strategy, exact=False, transport="gloo", **more)


def test_the_coordinator_is_told_of_the_strategy() -> None:
    config = msgspec.convert(divided("dp2.pp2:zbv", 4).run_config(), RunConfig)
    assert config.strategy == "dp2.pp2:zbv"
    assert config.wish is not None
    assert (config.wish.data, config.wish.pipeline) == (2, 2)
    assert msgspec.convert(FULL.run_config(), RunConfig).wish is None


def test_a_number_of_workers_that_cannot_be_is_refused_before_anything_starts(tmp_path: Path) -> None:
    text = "pipeline:2 takes a multiple of 2 workers, not 3: use --workers 2 or 4, or pipeline:3"
    with pytest.raises(DistBeliefError) as caught:
        divided("pipeline:2", 3)
    assert (caught.value.message, caught.value.exit_code) == (text, 2)
    with pytest.raises(DistBeliefError, match="takes a multiple of 2 workers, not 5"):
        replace(divided("pipeline:2", 4), workers=5)  # a run that is resumed


def test_shares_are_not_for_divided_models() -> None:
    with pytest.raises(DistBeliefError, match="shares cannot be given with sharded"):
        divided("sharded", 2, shares=(1.0, 2.0))


def test_what_travels_in_the_clear_is_said(tmp_path: Path) -> None:
    far = plain(tmp_path, listen="tcp://10.0.0.1:*")
    assert "ps:sync" in far.in_the_clear
    assert "travel encrypted" in replace(far, strategy="ps:sync").in_the_clear
    assert plain(tmp_path).in_the_clear == ""
    assert replace(plain(tmp_path), transport="gloo").in_the_clear == ""
