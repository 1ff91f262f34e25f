"""A job file in, a Job or one clear JobError out."""

from __future__ import annotations

import doctest
import functools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, Optional

import pytest

from distbelief.errors import JobError
from distbelief.job import Job
from distbelief.worker import jobfile
from distbelief.worker.jobfile import REQUIRED, HyperParameter, compile_job, convert, hyperparameters, load_job

HEAD = """
from distbelief import Job

def make(**fields):
    usual = dict(model=dict, loss=max, optimizer=list, data=[1, 2], global_batch=2, steps=1)
    return Job(**{**usual, **fields})

"""


@pytest.fixture(autouse=True)
def _restore_imports() -> Iterator[None]:
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        if name.startswith("distbelief_job_") or name == "sibling":
            del sys.modules[name]


def write(folder: Path, text: str, name: str = "train_me.py") -> Path:
    path = folder / name
    path.write_text(HEAD + text)
    return path


def failure(path: Path, **settings: str) -> JobError:
    with pytest.raises(JobError) as caught:
        load_job(path, settings)
    return caught.value


# --- what works ------------------------------------------------------------------------------------------------------


def test_a_plain_job_takes_the_name_of_its_file(tmp_path: Path) -> None:
    assert load_job(write(tmp_path, "job = make(steps=7)"), {}).steps == 7
    assert load_job(write(tmp_path, "job = make()"), {}).name == "train_me"
    assert load_job(write(tmp_path, "job = make(name='mine')"), {}).name == "mine"


def test_a_function_is_called_with_its_settings(tmp_path: Path) -> None:
    path = write(tmp_path, "def job(steps: int = 3, seed=5) -> Job: return make(steps=steps, seed=seed)")
    assert (load_job(path, {}).steps, load_job(path, {}).seed) == (3, 5)
    job = load_job(path, {"steps": "11", "seed": "6"})
    assert (job.steps, job.seed) == (11, 6)


def test_postponed_annotations_are_resolved_even_when_some_exist_only_for_type_checkers(tmp_path: Path) -> None:
    text = """from __future__ import annotations
from typing import TYPE_CHECKING, Literal
if TYPE_CHECKING:
    from nowhere import Thing
from distbelief import Job
def job(lr: float = 1, mode: Literal["a", "b"] = "a", n: int | None = None, x: Thing = 3) -> Thing:
    return Job(model=dict, loss=max, optimizer=list, data=[(lr, mode, n, x)], global_batch=1, steps=1)
"""
    path = tmp_path / "postponed.py"
    path.write_text(text)
    job = load_job(path, {"lr": "3e-4", "mode": "b", "n": "4", "x": "9"})
    assert job.data == [(3e-4, "b", 4, 9)]


def test_siblings_can_be_imported_and_classes_know_their_module(tmp_path: Path) -> None:
    (tmp_path / "sibling.py").write_text("STEPS = 21")
    job = load_job(write(tmp_path, "import sibling\nclass Net: pass\njob = make(steps=sibling.STEPS, model=Net)"), {})
    assert job.steps == 21
    assert sys.modules[job.model.__module__].Net is job.model


def test_each_load_runs_the_file_as_it_is_now(tmp_path: Path) -> None:
    assert load_job(write(tmp_path, "job = make(steps=1)"), {}).steps == 1
    assert load_job(write(tmp_path, "job = make(steps=2)"), {}).steps == 2


def test_a_relative_path_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "job = make()", "my-job 2.py")
    monkeypatch.chdir(tmp_path)
    assert load_job(Path("my-job 2.py"), {}).name == "my-job 2"


# --- hyper-parameters ------------------------------------------------------------------------------------------------


def test_types_come_from_annotations_or_defaults() -> None:
    def job(lr: float, width=64, mode: Literal["a", "b"] = "a", *, clip: Optional[float] = None) -> None: ...  # type: ignore[no-untyped-def]  # noqa: UP045

    found = {parameter.name: parameter for parameter in hyperparameters(job)}
    assert list(found) == ["lr", "width", "mode", "clip"]
    assert (found["lr"].type, found["lr"].default) == (float, REQUIRED)
    assert (found["width"].type, found["width"].inferred) == (int, True)
    assert str(found["mode"]) == "mode: 'a' or 'b' = 'a'"
    assert str(found["clip"]) == "clip: float or none = None"


def test_a_partial_function_has_the_rest_as_its_hyperparameters() -> None:
    def job(lr: float = 1.0, width: int = 2) -> None: ...

    assert [str(p) for p in hyperparameters(functools.partial(job, width=8))] == ["lr: float = 1.0", "width: int = 8"]


def test_star_arguments_are_refused() -> None:
    def job(**anything: int) -> None: ...

    with pytest.raises(JobError, match="settable by its name"):
        hyperparameters(job)


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (int, "12", 12),
        (float, "3e-4", 3e-4),
        (float, "3", 3.0),
        (bool, "true", True),
        (bool, "No", False),
        (bool, "0", False),
        (str, "a b", "a b"),
        (str, "none", "none"),
        (Path, "/data", Path("/data")),
        (Literal["sgd", 2], "2", 2),
        (int | None, "none", None),
        (int | None, "5", 5),
        (str | None, "None", None),
        (str | int, "5", 5),
        (int | float, "5.5", 5.5),
    ],
)
def test_values_are_read_by_type(kind: Any, text: str, value: Any) -> None:
    read = convert([HyperParameter("x", kind, None)], {"x": text})["x"]
    assert read == value
    assert type(read) is type(value)


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        (float, "abc", "x must be float, got 'abc'"),
        (int, "1.5", "x must be int, got '1.5'"),
        (bool, "maybe", "x must be bool, got 'maybe'"),
        (Literal["a", "b"], "c", "x must be 'a' or 'b', got 'c'"),
        (int | None, "x", "x must be int or none, got 'x'"),
        (list[int], "[1]", "`x` cannot be set from the command line: its type is list[int]"),
        (type(None), "1", "`x` cannot be set from the command line: its type is none"),
    ],
)
def test_ill_typed_values_are_named(kind: Any, text: str, message: str) -> None:
    with pytest.raises(JobError) as caught:
        convert([HyperParameter("x", kind, None)], {"x": text})
    assert caught.value.message == message


def test_a_type_taken_from_the_default_is_explained(tmp_path: Path) -> None:
    error = failure(write(tmp_path, "def job(lr=1): return make()"), lr="0.5")
    assert error.message == "lr must be int, got '0.5'"
    assert "default, 1" in error.hint


def test_an_unknown_name_lists_the_known_ones(tmp_path: Path) -> None:
    error = failure(write(tmp_path, "def job(width: int = 64, lr: float = 0.1): return make()"), widht="3")
    assert error.message == "train_me.py has no hyper-parameter `widht`; did you mean `width`?"
    assert "width: int = 64" in error.details
    assert "lr: float = 0.1" in error.details
    assert "takes none" in failure(write(tmp_path, "def job(): return make()"), lr="1").message


def test_a_required_one_must_be_given(tmp_path: Path) -> None:
    path = write(tmp_path, "def job(steps: int): return make(steps=steps)")
    error = failure(path)
    assert "`steps` has no default" in error.message
    assert "--set steps=VALUE (int)" in error.hint
    assert load_job(path, {"steps": "4"}).steps == 4
    assert "neither a default nor a type" in failure(write(tmp_path, "def job(steps): return make()")).message


def test_nothing_to_set_on_a_plain_job(tmp_path: Path) -> None:
    error = failure(write(tmp_path, "job = make()"), lr="1")
    assert "nothing to set (got lr)" in error.message
    assert "def job(" in error.hint


# --- what fails ------------------------------------------------------------------------------------------------------


def test_no_job_says_what_to_write_and_names_near_misses(tmp_path: Path) -> None:
    error = failure(write(tmp_path, "def jobs(): return make()\nbest = make()"))
    assert error.message.endswith("train_me.py defines no `job`")
    assert "job = Job(...)" in error.hint
    assert "rename `jobs` or `best` to `job`" in error.hint
    assert "rename" not in failure(write(tmp_path, "")).hint


@pytest.mark.parametrize(("value", "said"), [("3", "not int"), ("Job", "the class Job")])
def test_a_job_of_another_kind(tmp_path: Path, value: str, said: str) -> None:
    assert said in failure(write(tmp_path, f"job = {value}")).message


def test_a_function_that_returns_something_else(tmp_path: Path) -> None:
    assert "is a `return` missing?" in failure(write(tmp_path, "def job(): make()")).message
    assert "type dict" in failure(write(tmp_path, "def job(): return {}")).message


def test_an_exception_shows_the_users_frames_only(tmp_path: Path) -> None:
    error = failure(write(tmp_path, "def inner(): raise RuntimeError('my trouble')\ndef job(): return inner()"))
    assert "RuntimeError: my trouble" in error.message
    assert error.message.startswith("job() failed in train_me.py, line 8: ")
    assert error.details.startswith("Traceback (most recent call last):\n  File")
    assert "def inner" in error.details
    assert "jobfile.py" not in error.details


def test_an_exception_while_the_file_runs(tmp_path: Path) -> None:
    error = failure(write(tmp_path, "import module_that_is_nowhere"))
    assert error.message.startswith("the job file failed in train_me.py, line 8: ModuleNotFoundError")
    assert "module_that_is_nowhere" in error.details
    assert "jobfile.py" not in error.details
    assert "distbelief_job_train_me" not in sys.modules


def test_exit_in_the_file_is_an_error_too(tmp_path: Path) -> None:
    assert "it called exit(0)" in failure(write(tmp_path, "import sys; sys.exit(0)")).message


def test_a_wrong_field_of_the_job_names_the_line(tmp_path: Path) -> None:
    error = failure(write(tmp_path, "job = make(global_batch=0)"))
    assert error.message.startswith("train_me.py, line ")
    assert "global_batch" in error.message


def test_a_syntax_error_shows_line_and_caret(tmp_path: Path) -> None:
    path = tmp_path / "broken.py"
    path.write_text("x = 1\ny = (2 +\n")
    error = failure(path)
    assert "broken.py, line 2" in error.message
    assert "y = (2 +" in error.details
    assert "^" in error.details


def test_a_file_that_is_not_python_source(tmp_path: Path) -> None:
    path = tmp_path / "binary.py"
    path.write_bytes(b"\x00\xff\x00")
    with pytest.raises(JobError):
        compile_job(path)
    with pytest.raises(JobError, match="cannot read the job file"):
        compile_job(tmp_path / "absent.py")


def test_the_examples_in_the_docstrings() -> None:
    assert doctest.testmod(jobfile).failed == 0


def test_job_is_the_public_class() -> None:
    import distbelief

    assert distbelief.Job is Job
