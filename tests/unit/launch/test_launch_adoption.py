"""What lies beside the checkpoints of a run, and what becomes of it on another machine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distbelief.errors import DistBeliefError
from distbelief.launch.adoption import FILE, adopt, keep_beside_checkpoints, names_checkpoints
from distbelief.launch.launch import Launch, Placement, keep_launch, read_launch
from distbelief.options import RunOptions
from distbelief.worker.spec import JobSource


@pytest.fixture
def kept(tmp_path: Path) -> Path:
    """The checkpoint folder of a run, with the run's file and a folder that looks like a complete checkpoint."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "work.py").write_text("import parts\njob = parts.job\n")
    (source / "parts.py").write_text("job = None\n")
    checkpoints = tmp_path / "safe" / "digits"
    options = RunOptions(2, "allreduce", checkpoints=str(checkpoints), begin_from=str(tmp_path / "begin.safetensors"))
    placement = Placement(listen="tcp://10.9.8.7:5555", key_file="/home/me/run.key")
    job = JobSource(str(source / "work.py"), {"lr": "0.5"}, ("/gone",))
    keep_beside_checkpoints(Launch(tmp_path / "run", options, job, placement))
    step = checkpoints / "step-000000005"
    step.mkdir(parents=True)
    (step / "manifest.json").write_text("{}")
    return checkpoints


def lose(path: Path) -> None:
    for file in path.iterdir():
        file.unlink()


def test_a_lost_run_has_its_options_and_its_code_again(kept: Path, tmp_path: Path) -> None:
    lose(tmp_path / "source")
    assert names_checkpoints(str(kept))
    adopt(str(kept), tmp_path / "new")
    launch = read_launch(tmp_path / "new")
    assert (launch.options.workers, launch.job.settings) == (2, {"lr": "0.5"})
    assert launch.checkpoint_folder == str(kept)
    assert launch.options.begin_from == ""
    assert launch.placement == Placement()
    code = tmp_path / "new" / "code"
    assert launch.job.file == str(code / "work.py")
    assert sorted(path.name for path in code.iterdir()) == ["parts.py", "work.py"]
    adopt(str(kept), tmp_path / "new")  # started again: it goes on there


def test_code_that_is_there_is_not_copied(kept: Path, tmp_path: Path) -> None:
    adopt(str(kept), tmp_path / "new")
    assert read_launch(tmp_path / "new").job.file == str(tmp_path / "source" / "work.py")
    assert not (tmp_path / "new" / "code").exists()


def test_neither_addresses_nor_keys_lie_beside_checkpoints(kept: Path) -> None:
    text = (kept / FILE).read_text()
    assert json.loads(text)["launch"]["workers"] == 2
    assert "10.9.8.7" not in text
    assert "run.key" not in text


def test_checkpoints_in_the_run_directory_need_no_file(tmp_path: Path) -> None:
    keep_beside_checkpoints(Launch(tmp_path, RunOptions(2, "allreduce"), JobSource(str(tmp_path / "a.py"))))
    assert not list(tmp_path.rglob(FILE))


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("other run", "is the directory of a run with other checkpoints"),
        ("no file", "which a run keeps beside its checkpoints"),
        ("damaged", "run.json is damaged"),
        ("no checkpoint", "there is no complete checkpoint"),
        ("not empty", "is not empty"),
    ],
)
def test_what_cannot_be_adopted_is_refused(fault: str, words: str, kept: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    new.mkdir()
    match fault:
        case "other run":
            keep_launch(Launch(new, RunOptions(2, "allreduce")))
        case "no file":
            (kept / FILE).unlink()
        case "damaged":
            (kept / FILE).write_bytes(b'{"version": 1')
        case "no checkpoint":
            (kept / "step-000000005" / "manifest.json").unlink()
        case "not empty":
            (new / "mine.txt").touch()
    with pytest.raises(DistBeliefError) as caught:
        adopt(str(kept), new)
    assert words in caught.value.message
    assert caught.value.hint
