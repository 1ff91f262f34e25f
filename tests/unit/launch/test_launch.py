"""What a run was started with, as `resume` and its workers find it again."""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from distbelief.control.credentials import NO_CREDENTIAL
from distbelief.coordinator.rules.vocabulary import RunConfig
from distbelief.errors import DistBeliefError
from distbelief.launch import rundir
from distbelief.launch.launch import Launch, Placement, keep_launch, read_launch
from distbelief.options import ProfilePlan, RunOptions, SavePlan
from distbelief.worker.spec import JobSource, Origin, WorkerSpec

FULL = Launch(
    run_dir=Path("/nowhere"),
    options=RunOptions(
        workers=3,
        strategy="allreduce:inexact:gloo",
        threads=2,
        shares=(1.0, 2.0, 3.0),
        min_workers=2,
        balance=False,
        stuck_after_s=5.0,
        most_steps=100,
        checkpoints="s3://bucket/run",
        save_every="30s",
        keep_last=5,
        keep_every=10,
        keep_best="loss:min",
        begin_from="/weights.safetensors",
        profile="10:20",
        recheck="never",
    ),
    job=JobSource("/jobs/digits.py", {"lr": "0.1"}, ("/jobs",)),
    placement=Placement(listen="tcp://0.0.0.0:*"),
)


def plain(run_dir: Path, **options: object) -> Launch:
    return Launch(run_dir, RunOptions(2, "allreduce", **options))  # type: ignore[arg-type]


# --- kept and read again ---------------------------------------------------------------------------------------------


def test_what_was_kept_is_read_again(tmp_path: Path) -> None:
    launch = replace(FULL, run_dir=tmp_path)
    keep_launch(launch)
    assert read_launch(tmp_path) == launch
    assert [file.name for file in tmp_path.iterdir()] == ["launch.json"], "and no draft is left"


def test_every_field_is_kept_but_those_of_one_start(tmp_path: Path) -> None:
    job = msgspec.structs.replace(FULL.job, pickled=b"secret")
    keep_launch(replace(FULL.placed(host="here"), run_dir=tmp_path, job=job, resumed=True))
    kept = json.loads((tmp_path / "launch.json").read_text())
    names = [field.encode_name for kind in (RunOptions, JobSource, Placement) for field in msgspec.structs.fields(kind)]
    assert len(set(names)) == len(names), "the fields of all three are on one level"
    assert set(names) - kept.keys() == {"pickled", "host"}
    assert not read_launch(tmp_path).resumed


def test_a_run_of_an_earlier_version_is_read(tmp_path: Path) -> None:
    """launch.json as version 0.1 wrote it, before there was a value of all options."""
    before = {
        "workers": 3, "strategy": "allreduce:gloo", "exact": True, "transport": "gloo", "threads": 2, "device": "cpu",
        "shares": [1.0, 2.0, 1.0], "job_file": "/jobs/digits.py", "settings": {"lr": "0.1"}, "sys_path": ["/jobs"],
        "worker_threads": {}, "min_workers": 2, "balance": True, "stuck_after_s": 300.0, "listen": "tcp://127.0.0.1:*",
        "key_file": "", "local_workers": 0, "local_servers": -1, "on": "local", "blocks_signals": False, "room": 0,
        "is_open": True, "most_steps": 0, "checkpoints": "/saved", "save_every": "10m", "keep_last": 3,
        "keep_every": 0, "keep_best": "", "begin_from": "", "profile": "",
    }  # fmt: skip
    (tmp_path / "launch.json").write_text(json.dumps(before))
    assert read_launch(tmp_path) == Launch(
        tmp_path,
        RunOptions(3, "allreduce:gloo", (1.0, 2.0, 1.0), 2, min_workers=2, checkpoints="/saved"),
        JobSource("/jobs/digits.py", {"lr": "0.1"}, ("/jobs",)),
        Placement(local_workers=0, room=0, is_open=True),
    )


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
    assert (found.options.keep_best, found.options.balance, found.options.workers) == ("", True, 2)


def test_relative_places_mean_the_same_from_another_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("here", "there", "run"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")
    keep_launch(plain(tmp_path / "run", checkpoints="saved", begin_from="weights.safetensors"))
    monkeypatch.chdir(tmp_path / "there")
    found = read_launch(tmp_path / "run")
    assert found.checkpoint_folder == str(tmp_path / "here" / "saved")
    assert found.options.begin_from == str(tmp_path / "here" / "weights.safetensors")


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (None, "is no run directory"),
        ("{", "is damaged"),
        ("[]", "is damaged"),
        ('{"workers": "many"}', "is damaged"),
        ('{"workers": 2}', "is damaged"),
        ('{"workers": 0, "strategy": "allreduce"}', "is damaged: workers must be at least 1, not 0"),
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
        keep_launch(replace(plain(tmp_path).with_options(workers=3), resumed=True))
    assert read_launch(tmp_path).options.workers == 2, "nothing of it is touched"
    os.close(fd)
    keep_launch(replace(plain(tmp_path).with_options(workers=3), resumed=True))
    assert read_launch(tmp_path).options.workers == 3


# --- what workers and the coordinator are told -----------------------------------------------------------------------


def told(launch: Launch) -> WorkerSpec:
    return launch.worker_spec(1, "host", "tcp://there", NO_CREDENTIAL)


def test_workers_are_told_where_and_when_to_save_and_what_to_keep(tmp_path: Path) -> None:
    launch = plain(tmp_path, save_every="50", keep_last=4, keep_every=100, keep_best="accuracy")
    assert told(launch).saves == SavePlan(str(tmp_path / "checkpoints"), 50, 4, 100, ("accuracy", True))
    assert launch.options.save_every_s == 0.0


def test_the_coordinator_counts_the_seconds_between_checkpoints(tmp_path: Path) -> None:
    launch = plain(tmp_path, save_every="90s", checkpoints="s3://bucket/run")
    assert told(launch).saves == SavePlan("s3://bucket/run", 0)
    assert launch.options.save_every_s == 90.0


def test_without_checkpoints_workers_are_told_of_none(tmp_path: Path) -> None:
    spec = told(replace(plain(tmp_path, save_every="never"), resumed=True))
    assert (spec.saves, spec.options.save_every_s, spec.origin) == (None, 0.0, None)


def test_every_worker_is_told_what_the_run_begins_from_if_no_member_has_its_state(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoints")
    assert told(plain(tmp_path)).origin == Origin(folder)
    assert told(plain(tmp_path, begin_from="/w")).origin == Origin(folder, "/w")
    assert told(plain(tmp_path, begin_from="/w", save_every="never")).origin == Origin("", "/w")
    assert told(replace(plain(tmp_path), resumed=True)).origin == Origin(folder, "", resumed=True)


def test_a_worker_on_a_host_that_does_not_see_the_run_directory_sends_its_profile(tmp_path: Path) -> None:
    launch = plain(tmp_path, profile="5:8")
    assert told(launch).profile == ProfilePlan(5, 8, False)
    assert told(replace(launch, is_away=True)).profile == ProfilePlan(5, 8, True)


def test_the_coordinator_understands_what_it_is_told_of_the_run(tmp_path: Path) -> None:
    config = msgspec.convert(replace(FULL, run_dir=tmp_path).run_config(), RunConfig)
    assert (config.workers, config.min_workers, config.shares) == (3, 2, (1.0, 2.0, 3.0))
    assert (config.transport, config.exact, config.balance, config.stuck_after_s) == ("gloo", False, False, 5.0)
    assert (config.saves, config.save_every_s) == (True, 30.0)
    assert not msgspec.convert(plain(tmp_path, save_every="never").run_config(), RunConfig).saves


def test_an_impure_run_is_not_exact(tmp_path: Path) -> None:
    assert [plain(tmp_path, impure=impure).run_config()["exact"] for impure in (False, True)] == [True, False]


def test_where_others_can_come_memory_is_not_shared_unless_that_is_asked_for(tmp_path: Path) -> None:
    assert plain(tmp_path).placed(listen="tcp://0.0.0.0:*").usable_transport == "gloo"
    assert (
        plain(tmp_path).with_options(strategy="allreduce:shm").placed(listen="tcp://0.0.0.0:*").usable_transport
        == "shm"
    )


def test_only_a_state_that_is_on_accelerators_keeps_members_from_sharing_one(tmp_path: Path) -> None:
    on_gpu = plain(tmp_path, device="cuda")
    several = [on_gpu.with_options(strategy=name) for name in ("allreduce", "ps:sync", "local_sgd:4", "sandblaster")]
    assert [one.on_accelerators for one in several] == [True, False, False, False]
    assert not plain(tmp_path).on_accelerators


def test_a_launch_can_change_what_single_workers_are_told(tmp_path: Path) -> None:
    def adjust(spec: WorkerSpec) -> WorkerSpec:
        return msgspec.structs.replace(spec, address=f"{spec.address}/{spec.worker}")

    launch = replace(FULL, run_dir=tmp_path, adjust=adjust)
    one, two = (launch.worker_spec(worker, "host", "tcp://there", NO_CREDENTIAL) for worker in (1, 2))
    assert (one.address, two.address) == ("tcp://there/1", "tcp://there/2")
    assert one.options == two.options == launch.options


# --- strategies that divide the model --------------------------------------------------------------------------------


def divided(strategy: str, workers: int, **more: object) -> Launch:
    return Launch(Path("/nowhere"), RunOptions(workers, strategy, **more))  # type: ignore[arg-type]


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
        divided("pipeline:2", 4).with_options(workers=5)  # a run that is resumed


def test_shares_are_not_for_divided_models() -> None:
    with pytest.raises(DistBeliefError, match="shares cannot be given with sharded"):
        divided("sharded", 2, shares=(1.0, 2.0))


@pytest.mark.parametrize(
    "strategy", ["local_sgd:8", "ps:async", "ps:sync:backups=1", "allreduce:inexact", "sandblaster"]
)
def test_a_recheck_is_refused_where_no_member_could_do_it_and_the_default_is_not(tmp_path: Path, strategy: str) -> None:
    for wanted in ("all", "10"):
        with pytest.raises(DistBeliefError, match=f"{strategy}.* cannot recheck") as caught:
            plain(tmp_path, recheck=wanted).with_options(strategy=strategy)
        assert caught.value.exit_code == 2
    for harmless in ("auto", "never"):
        assert not plain(tmp_path, recheck=harmless).with_options(strategy=strategy).strategy.rechecks


def test_an_impure_run_cannot_recheck(tmp_path: Path) -> None:
    with pytest.raises(DistBeliefError, match="gradients of an impure job differ"):
        plain(tmp_path, recheck="all").with_options(impure=True)
    plain(tmp_path, recheck="auto").with_options(impure=True)


@pytest.mark.parametrize("strategy", ["allreduce", "allreduce:gloo", "ps:sync"])
def test_a_recheck_is_taken_where_members_can_do_it(tmp_path: Path, strategy: str) -> None:
    assert plain(tmp_path, recheck="all").with_options(strategy=strategy).strategy.rechecks


def test_what_is_not_rechecked_is_said(tmp_path: Path) -> None:
    every = plain(tmp_path).with_options(recheck="all", workers=2)
    assert "by a single worker are not" in every.with_options(workers=1).not_rechecked
    assert every.not_rechecked == ""
    assert every.with_options(strategy="allreduce:gloo").not_rechecked == ""
    servers = every.with_options(strategy="ps:sync")
    assert "the sums and updates on the servers are not" in servers.not_rechecked
    assert servers.with_options(recheck="auto").not_rechecked == ""
    assert "on accelerators are not" in every.with_options(device="cuda").not_rechecked


def test_what_travels_in_the_clear_is_said(tmp_path: Path) -> None:
    far = plain(tmp_path).placed(listen="tcp://10.0.0.1:*")
    assert "ps:sync" in far.in_the_clear
    assert "travel encrypted" in far.with_options(strategy="ps:sync").in_the_clear
    assert plain(tmp_path).in_the_clear == ""
    assert plain(tmp_path).with_options(strategy="allreduce:gloo").in_the_clear == ""
