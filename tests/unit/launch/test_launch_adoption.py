"""What lies beside the checkpoints of a run, and what becomes of it on another machine."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from distbelief.errors import DistBeliefError
from distbelief.launch.adoption import FILE, adopt, give_up_folder, keep_beside_checkpoints, names_checkpoints
from distbelief.launch.launch import Launch, Placement, keep_launch, read_launch
from distbelief.launch.rundir import begun
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
        ("wrong option", "run.json is damaged"),
        ("wrong path", "outside of its folder: ../work.py"),
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
        case "wrong option":
            content = json.loads((kept / FILE).read_text())
            content["launch"]["workers"] = "x"
            (kept / FILE).write_text(json.dumps(content))
        case "wrong path":
            lose(tmp_path / "source")
            content = json.loads((kept / FILE).read_text())
            content["code"]["../work.py"] = content["code"]["work.py"]
            (kept / FILE).write_text(json.dumps(content))
        case "no checkpoint":
            (kept / "step-000000005" / "manifest.json").unlink()
        case "not empty":
            (new / "mine.txt").touch()
    with pytest.raises(DistBeliefError) as caught:
        adopt(str(kept), new)
    assert words in caught.value.message
    if fault == "wrong path":  # nothing of the code was written, so the directory still counts as empty
        assert not (new / "code").exists()
        return
    assert caught.value.hint


def test_an_adoption_that_was_killed_while_it_wrote_the_code_is_repeated(kept: Path, tmp_path: Path) -> None:
    lose(tmp_path / "source")
    with begun(tmp_path / "new"):
        (tmp_path / "new" / "code").mkdir()
        (tmp_path / "new" / "code" / "work.py").write_text("import pa")
    adopt(str(kept), tmp_path / "new")
    assert (tmp_path / "new" / "code" / "work.py").read_text() == "import parts\njob = parts.job\n"


def test_only_the_owner_reads_what_lies_beside_checkpoints_on_a_disk(kept: Path) -> None:
    """Its settings may be private, as those in launch.json."""
    assert (kept / FILE).stat().st_mode & 0o777 == 0o600


# --- the folder belongs to one run ------------------------------------------------------------------------------------


def beside(checkpoints: Path, run_id: str) -> Launch:
    return Launch(Path("run"), RunOptions(1, "allreduce", checkpoints=str(checkpoints)), run_id=run_id)


def test_the_folder_of_another_run_is_refused_before_its_first_checkpoint(tmp_path: Path) -> None:
    keep_beside_checkpoints(beside(tmp_path, "one"))
    keep_beside_checkpoints(beside(tmp_path, "one"))  # it is resumed
    with pytest.raises(DistBeliefError, match="of another run") as caught:
        keep_beside_checkpoints(beside(tmp_path, "two"))
    assert str(tmp_path / FILE) in caught.value.hint
    assert json.loads((tmp_path / FILE).read_text())["launch"]["run_id"] == "one"


def test_of_runs_that_start_together_one_has_the_folder(tmp_path: Path) -> None:
    def start(number: int) -> bool:
        try:
            keep_beside_checkpoints(beside(tmp_path, f"run {number}"))
        except DistBeliefError:
            return False
        return True

    with ThreadPoolExecutor(8) as threads:
        started = list(threads.map(start, range(8)))
    assert started.count(True) == 1
    assert json.loads((tmp_path / FILE).read_text())["launch"]["run_id"] == f"run {started.index(True)}"
    assert [path.name for path in tmp_path.iterdir()] == [FILE]


def test_a_run_that_has_saved_nothing_gives_its_folder_up(tmp_path: Path) -> None:
    keep_beside_checkpoints(beside(tmp_path, "one"))
    give_up_folder(beside(tmp_path, "two"))
    assert (tmp_path / FILE).exists(), "it is not this run's"
    give_up_folder(beside(tmp_path, "one"))
    keep_beside_checkpoints(beside(tmp_path, "two"))
    (tmp_path / "step-000000005").mkdir()
    give_up_folder(beside(tmp_path, "two"))
    assert (tmp_path / FILE).exists(), "the run can be adopted"


def test_the_file_of_an_earlier_version_names_no_run(tmp_path: Path) -> None:
    keep_beside_checkpoints(beside(tmp_path, ""))
    assert "run_id" not in (tmp_path / FILE).read_text()
    keep_beside_checkpoints(beside(tmp_path, "one"))
    assert json.loads((tmp_path / FILE).read_text())["launch"]["run_id"] == "one"


def test_an_adopted_run_is_the_same_run(kept: Path, tmp_path: Path) -> None:
    content = json.loads((kept / FILE).read_text())
    content["launch"]["run_id"] = "one"
    (kept / FILE).write_text(json.dumps(content))
    adopt(str(kept), tmp_path / "new")
    assert read_launch(tmp_path / "new").run_id == "one"
