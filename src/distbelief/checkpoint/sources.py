"""Where trained weights come from: a run directory or a safetensors file. Only here does a path become tensors."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec
import safetensors
import safetensors.torch
import torch

from distbelief.errors import DistBeliefError

SUFFIX = ".safetensors"


class RecordedJob(msgspec.Struct, frozen=True):
    """What job.json says of where the job came from."""

    file: str = ""
    """Empty: the job was made by a Python program."""
    settings: dict[str, str] = {}


@dataclass(frozen=True)
class Source:
    """Tensors as `load_state_dict` wants them, and the run that they are from, if that is known."""

    path: Path
    tensors: dict[str, torch.Tensor]
    run_dir: Path | None


def read_source(path: Path) -> Source:
    """The weights at `path`, whichever form they have there."""
    if path.is_dir():
        return Source(path, _read_tensors(_weights_of_run(path)), path)
    if not path.exists():
        raise DistBeliefError(f"there is no {path}", hint=_WANTED)
    if path.suffix != SUFFIX:
        raise DistBeliefError(f"{path} is neither a run directory nor a {SUFFIX} file", hint=_WANTED)
    return Source(path, _read_tensors(path), None)


def recorded_job(run_dir: Path) -> RecordedJob:
    """The job of a run, from its job.json."""
    file = run_dir / "job.json"
    try:
        return msgspec.json.decode(file.read_bytes(), type=RecordedJob)
    except OSError as error:
        raise DistBeliefError(f"cannot read {file}: {error.strerror}") from error
    except msgspec.MsgspecError as error:
        raise DistBeliefError(f"{file} is damaged: {error}") from error


_WANTED = f"give a run directory, as `train` printed it, or a {SUFFIX} file"


def _weights_of_run(run_dir: Path) -> Path:
    weights = run_dir / "weights.safetensors"
    if weights.exists():
        return weights
    if not any((run_dir / name).exists() for name in ("job.json", "journal.jsonl")):
        raise DistBeliefError(f"{run_dir} is not a run directory: it has no job.json", hint=_WANTED)
    raise DistBeliefError(
        f"the run {run_dir} has no weights yet: it has not finished, or it failed",
        hint="weights.safetensors is written when the last step is done",
    )


def _read_tensors(file: Path) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = safetensors.torch.load_file(file)
    except safetensors.SafetensorError as error:
        raise DistBeliefError(f"{file} is damaged, or no safetensors file: {error}") from error
    except OSError as error:
        raise DistBeliefError(f"cannot read {file}: {error.strerror or error}") from error
    if not tensors:
        raise DistBeliefError(f"{file} holds no tensors")
    return tensors
