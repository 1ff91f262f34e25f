"""An environment for each system that needs one: made when it is needed, kept, and never a reason to stop.

bench/.envs/NAME is a virtual environment; a file of paths lets it see the packages of the program's own, so that torch
is there once on the disk. What cannot be made within the limit is skipped, and the reason goes into the results.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from bench.compare.system import System
from bench.running import BENCH, ROOT, environment

FOLDER = BENCH / ".envs"
LIMIT_S = 600.0
CHECK_LIMIT_S = 120.0
STAMP = "made.json"


class Unavailable(Exception):
    """Why a system cannot be measured here."""


def python_for(system: System, limit_s: float = LIMIT_S) -> str:
    """The interpreter to run a system with."""
    python = sys.executable if not system.requirements else str(_made(system, limit_s))
    if system.check:
        try:
            _run([python, "-c", system.check], CHECK_LIMIT_S)
        except Unavailable as error:
            raise Unavailable(f"`{system.check}` failed: {error}") from None
    return python


def packages(system: System) -> list[str]:
    """The names in its requirements.

    >>> packages(System("x", "X", "with_x.py", lambda start: [], requirements=("ray[train]==2.60.0", "torchft")))
    ['ray', 'torchft']
    """
    return [re.split(r"[\[<>=!~; @]", one, maxsplit=1)[0] for one in system.requirements]


def versions(python: str, names: list[str]) -> dict[str, str]:
    """Of packages, as an interpreter sees them."""
    if not names:
        return {}
    code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    done = subprocess.run([python, "-c", code, *names], capture_output=True, text=True, check=False, env=environment())
    return dict(json.loads(done.stdout)) if done.returncode == 0 else {}


def _made(system: System, limit_s: float) -> Path:
    folder = FOLDER / (system.environment or system.name)
    python = folder / "bin" / "python"
    wanted = json.dumps([sys.version, sys.prefix, system.shares_torch, *system.requirements])
    if (folder / STAMP).exists() and (folder / STAMP).read_text() == wanted:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    try:
        own = ["--without-pip"] if system.shares_torch else []
        _run([sys.executable, "-m", "venv", *own, str(folder)], limit_s)
        if system.shares_torch:
            (site,) = folder.glob("lib/python*/site-packages")
            (site / "program.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        install = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check", "--no-input"]
        _run([*install, "-c", str(ROOT / "constraints.txt"), *system.requirements], limit_s)
    except Unavailable:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    (folder / STAMP).write_text(wanted)
    return python


def _run(command: list[str], limit_s: float) -> None:
    try:
        done = subprocess.run(
            command, env=environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=limit_s,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        raise Unavailable(f"not done within {limit_s:.0f} s: {' '.join(command[1:])}") from None
    if done.returncode:
        said = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        raise Unavailable(said[-1] if said else f"{' '.join(command[1:])} ended with {done.returncode}")
