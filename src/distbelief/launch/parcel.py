"""The parcel that the coordinator sends to another host's agent with its welcome: the launch, the job with its code,
the run's start, and the address of torch's rendezvous store.

The parcel lies in the run directory while the run lives, readable by its owner alone. A host that sees this file sees
the run directory. The coordinator sends the file's bytes to other hosts. An agent opens the parcel of an authenticated
coordinator only, because the job in it may be pickled.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from distbelief.atomicfile import replace_file
from distbelief.errors import DistBeliefError
from distbelief.launch.jobcode import collect_code, has_code, unpack_code
from distbelief.launch.launch import Launch, from_data, to_data

FILE = "parcel.bin"


class Parcel(msgspec.Struct, frozen=True):
    run_dir: str
    launch: dict[str, Any]
    resumed: bool
    start: str
    """See `credentials.Authority`."""
    job_pickle: bytes = b""
    code: dict[str, bytes] = {}
    store: tuple[str, int] | None = None


def write(launch: Launch, start: str, store: tuple[str, int] | None) -> Path:
    code = collect_code(Path(launch.job.file)) if launch.job.file else {}
    run_dir = str(launch.run_dir.resolve())
    whole = Parcel(run_dir, to_data(launch), launch.resumed, start, launch.job.pickled, code, store)
    path = launch.run_dir / FILE
    replace_file(path, msgspec.msgpack.encode(whole), private=True)
    return path


def read(content: bytes) -> Parcel:
    try:
        return msgspec.msgpack.decode(content, type=Parcel)
    except msgspec.MsgspecError as error:
        raise DistBeliefError(
            f"the parcel from the coordinator cannot be read: {error}", hint="is it of another version of DistBelief?"
        ) from error


def store_left_behind(run_dir: Path) -> tuple[str, int] | None:
    """Where torch's rendezvous store was, if a launching process was killed in this run directory."""
    try:
        return read((run_dir / FILE).read_bytes()).store
    except (OSError, DistBeliefError):
        return None


def open_here(parcel: Parcel, content: bytes, folder: Path, host: str) -> Launch:
    """The launch with the paths of this host. `folder`: a private folder for files that the host does not have.
    `host`: what this machine is called in the run."""
    run_dir = Path(parcel.run_dir)
    launch = from_data(run_dir, parcel.launch, host)
    if not _sees(run_dir, content):
        if launch.options.saves and "://" not in launch.checkpoint_folder:
            raise DistBeliefError(
                f"this host does not see the run directory {run_dir}, where checkpoints are saved",
                hint="give a --run-dir on a folder that all hosts share, or --checkpoints s3://… when starting the run",
            )
        run_dir = folder / "run"
        launch = replace(launch, is_away=True)
        (run_dir / "logs").mkdir(parents=True)
    job = msgspec.structs.replace(launch.job, pickled=parcel.job_pickle)
    if job.file and not has_code(Path(job.file), parcel.code):
        code = folder / "code"
        unpack_code(parcel.code, code)
        job = msgspec.structs.replace(job, file=str(code / Path(job.file).name))
    here = tuple(path for path in job.sys_path if path == "" or os.path.exists(path))
    job = msgspec.structs.replace(job, sys_path=here)
    return replace(launch, run_dir=run_dir, job=job, resumed=parcel.resumed)


def _sees(run_dir: Path, content: bytes) -> bool:
    try:
        return (run_dir / FILE).read_bytes() == content
    except OSError:
        return False
