"""The JSON files of a run directory. This module does not import torch, so programs that read them start fast."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from distbelief.errors import DistBeliefError

Kind = TypeVar("Kind")


def read_record(file: Path, kind: type[Kind]) -> Kind:
    """Read a record; ignores fields that `kind` does not have."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except OSError as error:
        raise DistBeliefError(f"cannot read {file}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise DistBeliefError(f"{file} is damaged: {error}") from error
