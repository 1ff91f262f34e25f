"""From a job file and `--set` texts to a Job.

The file is executed as a fresh module; its `job` is a Job, or a function from hyper-parameters to one. Every fault of
the file becomes a JobError with the user's own traceback. This module knows nothing of workers, runs or the terminal,
and imports torch only if the user's file does.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib.util
import inspect
import re
import sys
import traceback
import types
import typing
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Union

from distbelief.errors import DistBeliefError, JobError
from distbelief.job import Job

REQUIRED: Any = inspect.Parameter.empty
"""The default of a hyper-parameter without a default."""

_TRUTH = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_WHAT_TO_WRITE = "write `job = Job(...)`, or a function that returns one: `def job(lr: float = 1e-3): return Job(...)`"


@dataclasses.dataclass(frozen=True)
class HyperParameter:
    """One parameter of a job function. `type` is as annotated, or the type of the default."""

    name: str
    type: Any
    default: Any = REQUIRED
    inferred: bool = False
    """True when the type was taken from the default, because there is no annotation."""

    def __str__(self) -> str:
        text = f"{self.name}: {type_name(self.type)}"
        return text if self.default is REQUIRED else f"{text} = {self.default!r}"


def load_job(path: Path, settings: Mapping[str, str]) -> Job:
    """The Job that the file at `path` declares, its hyper-parameters set from `settings`."""
    found = _find(_execute(path), path)
    if isinstance(found, Job):
        if settings:
            raise JobError(
                f"{path.name}: `job` is a plain Job, so there is nothing to set (got {', '.join(sorted(settings))})",
                hint="make it a function: `def job(lr: float = 1e-3): return Job(...)`, then use --set lr=3e-4",
            )
        job = found
    else:
        arguments = convert(hyperparameters(found), settings, path.name)
        job = _call(found, arguments, path)
    return job if job.name else dataclasses.replace(job, name=path.stem)


def compile_job(path: Path) -> types.CodeType:
    """The file's code, without running it. A JobError shows the line of a syntax error."""
    try:
        source = path.read_bytes()
    except OSError as error:
        raise JobError(f"cannot read the job file {path}: {error.strerror}") from error
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a SyntaxWarning about the user's file is noise in a launcher
            return compile(source, str(path.resolve()), "exec", dont_inherit=True)
    except SyntaxError as error:
        line = f", line {error.lineno}" if error.lineno else ""
        details = "".join(traceback.format_exception_only(error))
        raise JobError(f"syntax error in {path}{line}: {error.msg}", details=details) from error
    except ValueError as error:  # zero bytes, in Python before 3.11.4
        raise JobError(f"{path} is not Python source: {error}") from error


def hyperparameters(function: Callable[..., Any]) -> list[HyperParameter]:
    """The hyper-parameters of a job function, in the order of its signature.

    >>> def job(lr: float = 1e-3, width=64): ...
    >>> [str(p) for p in hyperparameters(job)]
    ['lr: float = 0.001', 'width: int = 64']
    """
    names = getattr(inspect.unwrap(function), "__globals__", {})
    found = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise JobError(
                f"job({parameter}): a hyper-parameter must be settable by its name",
                hint="list each one with its default: `def job(lr: float = 1e-3, width: int = 64)`",
            )
        annotation = _resolve(parameter.annotation, names)
        inferred = annotation is REQUIRED
        if inferred and parameter.default is REQUIRED:
            raise JobError(
                f"job(): `{parameter.name}` has neither a default nor a type that is known",
                hint=f"give it one: `{parameter.name}: float = 0.1`",
            )
        kind = type(parameter.default) if inferred else annotation
        found.append(HyperParameter(parameter.name, kind, parameter.default, inferred))
    return found


def convert(known: list[HyperParameter], settings: Mapping[str, str], where: str = "job()") -> dict[str, Any]:
    """Texts to values by the declared types; JobError for an unknown, ill-typed or missing one."""
    by_name = {parameter.name: parameter for parameter in known}
    for name in settings:
        if name not in by_name:
            raise _unknown(name, known, where)
    for parameter in known:
        if parameter.default is REQUIRED and parameter.name not in settings:
            raise JobError(
                f"{where}: the hyper-parameter `{parameter.name}` has no default, so it must be given",
                hint=f"add --set {parameter.name}=VALUE ({type_name(parameter.type)})",
            )
    return {name: _value(by_name[name], text) for name, text in settings.items()}


def type_name(kind: Any) -> str:
    """The type as users write it: `float`, `'a' or 'b'`, `int or none`."""
    origin = typing.get_origin(kind)
    if origin is Literal:
        return " or ".join(repr(choice) for choice in typing.get_args(kind))
    if origin in (Union, types.UnionType):
        return " or ".join(type_name(part) for part in typing.get_args(kind))
    if kind is type(None):
        return "none"
    return kind.__name__ if isinstance(kind, type) and origin is None else str(kind)


# --- the file --------------------------------------------------------------------------------------------------------


def _execute(path: Path) -> types.ModuleType:
    code = compile_job(path)
    file = path.resolve()
    name = "distbelief_job_" + re.sub(r"\W", "_", file.stem)
    # Not the spec's own loader: it trusts a .pyc by time stamp and would miss an edit within the same second.
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None:
        raise JobError(f"{path} is not a Python file", hint="a job file's name ends in .py")
    module = importlib.util.module_from_spec(spec)
    if sys.path[:1] != [str(file.parent)]:
        sys.path.insert(0, str(file.parent))
    sys.modules[name] = module  # dataclasses and pickle look a class's module up while the file runs
    try:
        exec(code, module.__dict__)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise _failure(error, path, "the job file failed") from error
    return module


def _find(module: types.ModuleType, path: Path) -> Job | Callable[..., Any]:
    found = vars(module).get("job")
    if "job" not in vars(module):
        near = _near_misses(module)
        meant = f"; or rename {' or '.join(f'`{name}`' for name in near)} to `job`" if near else ""
        raise JobError(f"{path} defines no `job`", hint=_WHAT_TO_WRITE + meant)
    if isinstance(found, Job):
        return found
    if isinstance(found, type) or not callable(found):
        kind = f"the class {found.__name__}" if isinstance(found, type) else type(found).__name__
        raise JobError(f"{path}: `job` must be a Job or a function that returns one, not {kind}", hint=_WHAT_TO_WRITE)
    return typing.cast(Callable[..., Any], found)


def _near_misses(module: types.ModuleType) -> list[str]:
    def is_near(name: str, value: object) -> bool:
        if isinstance(value, Job):
            return True
        own = inspect.isfunction(value) and value.__module__ == module.__name__
        return own and ("job" in name.lower() or bool(difflib.get_close_matches(name.lower(), ["job"])))

    return [name for name, value in vars(module).items() if not name.startswith("__") and is_near(name, value)]


def _call(function: Callable[..., Any], arguments: dict[str, Any], path: Path) -> Job:
    try:
        job = function(**arguments)
    except (Exception, SystemExit) as error:
        raise _failure(error, path, "job() failed") from error
    if not isinstance(job, Job):
        forgot = "; is a `return` missing?" if job is None else ""
        what = "None" if job is None else f"a value of type {type(job).__name__}"
        raise JobError(f"job() in {path.name} returned {what}, not a Job{forgot}", hint="end it with `return Job(...)`")
    return job


def _failure(error: BaseException, path: Path, what: str) -> JobError:
    """The user's exception without the frames above the user's file. Our own errors keep their message; the file is
    added."""
    here = str(path.resolve())
    mine = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == here]
    where = f"{path.name}, line {mine[-1].lineno}" if mine else path.name
    if isinstance(error, DistBeliefError):
        return JobError(f"{where}: {error.message}", hint=error.hint, details=error.details)
    frames = error.__traceback__
    while frames is not None and frames.tb_frame.f_code.co_filename != here:
        frames = frames.tb_next
    shown = "".join(traceback.format_exception(type(error), error, frames))
    text = next(iter(str(error).splitlines()), "")
    if isinstance(error, SystemExit):
        text = f"it called exit({error.code!r})"
    return JobError(f"{what} in {where}: {type(error).__name__}: {text}".removesuffix(": "), details=shown)


# --- hyper-parameters ------------------------------------------------------------------------------------------------


def _resolve(annotation: Any, names: dict[str, Any]) -> Any:
    """An annotation as a type; REQUIRED (that is, none) if it names something that exists only for type checkers."""
    if isinstance(annotation, str):
        try:
            annotation = eval(annotation, names)
        except Exception:
            return REQUIRED
    return typing.get_args(annotation)[0] if typing.get_origin(annotation) is typing.Annotated else annotation


def _unknown(name: str, known: list[HyperParameter], where: str) -> JobError:
    if not known:
        return JobError(
            f"{where} has no hyper-parameter `{name}`: its `job` takes none",
            hint=f"declare it: `def job({name}: float = ...)`",
        )
    near = difflib.get_close_matches(name, [parameter.name for parameter in known], n=1)
    meant = f"; did you mean `{near[0]}`?" if near else ""
    listing = "\n".join(["It has:", *(f"  {parameter}" for parameter in known)])
    return JobError(f"{where} has no hyper-parameter `{name}`{meant}", details=listing)


def _value(parameter: HyperParameter, text: str) -> Any:
    settable = [kind for kind in _alternatives(parameter.type) if _settable(kind)]
    if all(kind is type(None) for kind in settable):
        raise JobError(
            f"`{parameter.name}` cannot be set from the command line: its type is {type_name(parameter.type)}",
            hint=f"give it a type such as int, float, bool, str or Literal: `{parameter.name}: float | None = None`",
        )
    # none before everything, text after everything: else `str | None` could never be none, nor `str | int` a number
    for kind in sorted(settable, key=lambda kind: 0 if kind is type(None) else 2 if kind in (str, Path) else 1):
        try:
            return _literal(kind, text) if typing.get_origin(kind) is Literal else _READERS[kind](text)
        except ValueError:
            continue
    hint = ""
    if parameter.inferred:
        hint = f"its type is that of its default, {parameter.default!r}; if it is another one, annotate it in the file"
    raise JobError(f"{parameter.name} must be {type_name(parameter.type)}, got {text!r}", hint=hint)


def _settable(kind: Any) -> bool:
    return typing.get_origin(kind) is Literal or (isinstance(kind, type) and kind in _READERS)


def _alternatives(kind: Any) -> tuple[Any, ...]:
    if typing.get_origin(kind) in (Union, types.UnionType):
        return tuple(part for member in typing.get_args(kind) for part in _alternatives(member))
    return (kind,)


def _literal(kind: Any, text: str) -> Any:
    for choice in typing.get_args(kind):
        if str(choice) == text:
            return choice
    raise ValueError(text)


def _bool(text: str) -> bool:
    if text.lower() not in _TRUTH:
        raise ValueError(text)
    return _TRUTH[text.lower()]


def _none(text: str) -> None:
    if text.lower() != "none":
        raise ValueError(text)


_READERS: dict[Any, Callable[[str], Any]] = {
    int: int,
    float: float,
    bool: _bool,
    str: str,
    Path: Path,
    type(None): _none,
}
