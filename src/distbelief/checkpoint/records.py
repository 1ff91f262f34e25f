"""The JSON files that a run leaves in its directory. Without torch: what only looks at a run need not wait for it."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import msgspec

from distbelief.errors import DistBeliefError

Kind = TypeVar("Kind")


def read_record(file: Path, kind: type[Kind]) -> Kind:
    """Fields that `kind` does not have are passed over."""
    try:
        return msgspec.json.decode(file.read_bytes(), type=kind)
    except OSError as error:
        raise DistBeliefError(f"cannot read {file}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise DistBeliefError(f"{file} is damaged: {error}") from error
