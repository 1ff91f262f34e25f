"""What documents and docstrings mention of this repository: paths, and names of code. Each must be there.

Mentions are what stands between backticks, and the targets of links. A path is one with a folder or an ending that the
repository has; it is looked for from the repository's root, from src/distbelief, from the page's own folder, and, where
it is unambiguous, by its end (`rules/detector.py`). A name of code has an underscore, a dot, a capital inside, or
parentheses; it must stand as a word in the source, tests, benchmarks or examples, or in torch or another dependency.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from tests.support.house.tree import ROOT, Tree
from tests.support.house.words import documents

_BACKTICKS = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
_PATH = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*(?:/|\.(?:py|md|toml|txt|sh|yaml|template))")
_NAME = re.compile(r"[A-Za-z_][\w.]*(?:\(\))?")
_ENDINGS = (".py", ".md", ".toml")
_IS_CODE = re.compile(r"_|\.|\(|[a-z][A-Z]")
_BARE_PATH = re.compile(r"(?<![\w`/.])((?:[\w-]+/)*[a-z_]\w*\.py)\b(?!`)")
_LEFT_BY_RUNS = ("runs/", "logs/", "checkpoints/", "profile/", "bench/.envs", ".venv", "rules/")
"""Folders that are made, and `rules/`, which stands for every folder of that name."""


def mentions(text: str) -> Iterator[tuple[int, str]]:
    """(line, what stands between backticks, in a link, or is a path of a Python file) outside of code blocks."""
    text = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    for number, line in enumerate(text.splitlines(), 1):
        for pattern in (_BACKTICKS, _LINK, _BARE_PATH):
            for match in pattern.finditer(line):
                yield number, match[1]


@cache
def repository_files(root: Path = ROOT) -> frozenset[str]:
    rooms = ("src", "tests", "bench", "docs", "examples", ".ci")
    inside = [path for room in rooms for path in (root / room).rglob("*") if "__pycache__" not in path.parts]
    return frozenset(str(path.relative_to(root)) for path in [*inside, *root.glob("*")])


@cache
def words_of_the_source(root: Path = ROOT) -> frozenset[str]:
    """Every identifier in the repository's code, its settings and its command line."""
    found: set[str] = set()
    for path in repository_files(root):
        if path.endswith((".py", ".toml", ".template", "Makefile")):
            found.update(re.findall(r"\w+", (root / path).read_text(errors="ignore")))
    return frozenset(found)


def path_is_there(mentioned: str, page: Path, root: Path = ROOT) -> bool:
    plain = mentioned.split("#")[0].rstrip("/")
    if not plain:
        return True
    files = repository_files(root)
    folder = page.parent.relative_to(root)
    if "*" in plain:
        pattern = re.compile("(?:.*/)?" + re.escape(plain).replace(r"\*\*", ".*").replace(r"\*", "[^/]*"))
        return any(pattern.fullmatch(file) for file in files)
    try:
        beside = str((root / folder / plain).resolve().relative_to(root))
    except ValueError:
        return False
    return beside in files or any(file == plain or file.endswith("/" + plain) for file in files)


def name_is_there(mentioned: str, root: Path = ROOT) -> bool:
    last = mentioned.removesuffix("()").split(".")[-1]
    return (
        last in words_of_the_source(root)
        or hasattr(builtins, last)
        or mentioned.split(".")[0] in _OTHERS
        or last in _words_of_torch()
    )


_OTHERS = {"torch", "numpy", "np", "os", "sys", "random", "ray", "mpi4py", "tf", "keras", "accelerate"}
"""Names of other people's modules: what is below them is theirs."""

_OTHERS |= {"dist_sync", "dist_async", "list_keys"}  # MXNet's
_OTHERS |= {"mkl_blas_def_sgemm_kernel_0_zen", "MKL_ENABLE_INSTRUCTIONS", "MKL_CBWR"}  # MKL's
_OTHERS |= {"app", "Page", "PR_SET_PDEATHSIG"}  # Perfetto's, Chromium's, the kernel's

_EXAMPLES = {"circle.py", "my_job.py", "job.py", "train.py", "setup.py", "spirals.py"}
"""Files that a reader of the documents makes."""


@cache
def _words_of_torch() -> frozenset[str]:
    import torch
    import torch.distributed
    import torch.distributed.checkpoint
    import torch.distributed.pipelining

    rooms = (torch, torch.nn, torch.nn.functional, torch.optim, torch.distributed, torch.optim.lr_scheduler)
    more = (torch.distributed.checkpoint, torch.distributed.pipelining, torch.Tensor, torch.nn.Module)
    return frozenset(name for room in (*rooms, *more) for name in dir(room))


def missing_in(text: str, page: Path, first: int = 1, root: Path = ROOT) -> Iterator[str]:
    """Mentions in a text that are not there, as `path:line: mention`."""
    for line, mentioned in mentions(text):
        where = f"{page.relative_to(root)}:{first + line - 1}"
        if mentioned.startswith(("http", "mailto:", "#", "/", "~", "-", "$")) or mentioned.startswith(_LEFT_BY_RUNS):
            continue
        if mentioned in _EXAMPLES or re.search(r"\bNAME\b", mentioned):
            continue
        if _PATH.fullmatch(mentioned.split("#")[0]) and ("/" in mentioned or mentioned.endswith(_ENDINGS)):
            if not path_is_there(mentioned, page, root):
                yield f"{where}: {mentioned}"
        elif _NAME.fullmatch(mentioned) and _IS_CODE.search(mentioned) and not name_is_there(mentioned, root):
            yield f"{where}: {mentioned}"


def missing(root: Path = ROOT) -> list[str]:
    """Mentions of what is not there, in documents, docstrings and comments."""
    found = [one for page in documents(root) for one in missing_in(page.read_text(), page, root=root)]
    for module in Tree(root / "src" / "distbelief").modules.values():
        for line, text in [*module.docstrings(), *module.comments()]:
            found += missing_in(text, module.path, line, root)
    return found


if __name__ == "__main__":
    print(*missing(), sep="\n")
