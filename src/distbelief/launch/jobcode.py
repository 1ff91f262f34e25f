"""The code of a job file, as it travels to other hosts and lies beside checkpoints: the file itself and what it imports
from its own folder."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from pathlib import Path

from distbelief.errors import DistBeliefError

MOST_BYTES = 16 << 20


def collect_code(job_file: Path) -> dict[str, bytes]:
    """Path below the job file's folder -> content. The job file is the first."""
    folder = job_file.resolve().parent
    found: dict[str, bytes] = {}
    waiting = [job_file.resolve()]
    while waiting:
        file = waiting.pop()
        name = file.relative_to(folder).as_posix()
        if name in found:
            continue
        try:
            found[name] = file.read_bytes()
        except OSError as error:
            raise DistBeliefError(f"cannot read {file}, which the job needs: {error.strerror}") from error
        if sum(map(len, found.values())) > MOST_BYTES:
            raise DistBeliefError(
                f"the job's code in {folder} is larger than {MOST_BYTES >> 20} MiB",
                hint="install what it imports on every host, or keep the job file in a folder of its own",
            )
        waiting += _imported(file, found[name], folder)
    return found


def _imported(file: Path, content: bytes, folder: Path) -> Iterator[Path]:
    try:
        tree = ast.parse(content)
    except (SyntaxError, ValueError):  # the worker that runs the file reports it better
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _files(folder, alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = folder if not node.level else _up(file, node.level)
            if not base.is_relative_to(folder):
                continue
            parts = node.module.split(".") if node.module else []
            yield from _files(base, parts)
            for alias in node.names:  # the name may be a module of that package
                yield from _files(base, [*parts, alias.name])


def _up(file: Path, level: int) -> Path:
    return file.parents[level - 1] if level <= len(file.parents) else Path("/")


def _files(base: Path, parts: list[str]) -> Iterator[Path]:
    """The files below the folder that Python runs when this module is imported."""
    here = base
    for number, part in enumerate(parts):
        if number and (here / "__init__.py").is_file():
            yield here / "__init__.py"
        here = here / part
    if parts and here.with_suffix(".py").is_file():
        yield here.with_suffix(".py")
    elif parts and (here / "__init__.py").is_file():
        yield here / "__init__.py"


def has_code(job_file: Path, code: dict[str, bytes]) -> bool:
    """Whether this host has the same files at the same paths, as in a folder that all hosts see."""
    folder = job_file.parent
    try:
        return all(_digest((folder / name).read_bytes()) == _digest(content) for name, content in code.items())
    except OSError:
        return False


def unpack_code(code: dict[str, bytes], folder: Path) -> None:
    paths = {name: (folder / name).resolve() for name in code}
    for name, path in paths.items():  # before anything is written
        if not path.is_relative_to(folder.resolve()) or path == folder.resolve():
            raise DistBeliefError(f"the run sends a file outside of its folder: {name}")
    for name, path in paths.items():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(code[name])
        except OSError as error:
            raise DistBeliefError(f"cannot write {path}: {error.strerror or error}", hint="free some space") from error


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content).digest()
