"""Whether another node sees the run directory: it finds there what the driver has put there for it to find."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Iterator
from pathlib import Path

_FILE = ".seen-by-ray"


@contextlib.contextmanager
def shown(run_dir: Path) -> Iterator[str]:
    """While this lasts, whoever sees the directory knows the word."""
    word = secrets.token_hex(8)
    path = run_dir / _FILE
    path.write_text(word)
    try:
        yield word
    finally:
        path.unlink(missing_ok=True)


def sees(run_dir: Path, word: str) -> bool:
    try:
        return (run_dir / _FILE).read_text() == word
    except OSError:
        return False
