"""What a run needs to be resumed without its run directory: one file beside its checkpoints.

The disk of the leading machine may be lost while the checkpoints are safe in an object store. So a run whose
checkpoints lie outside of its run directory keeps its options and the code of its job beside them. `adopt` makes a new
run directory from that file. The file holds no secret of the run, and no address, key or host: these are chosen anew.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import msgspec

from distbelief.checkpoint.storage import Folder, create_file, entries, folder_at, read_file, remove_file, write_file
from distbelief.errors import DistBeliefError, JobError
from distbelief.launch.jobcode import collect_code, has_code, unpack_code
from distbelief.launch.launch import Launch, Placement, from_data, is_launched, keep_launch, read_launch, to_data
from distbelief.launch.rundir import begun
from distbelief.version import __version__

FILE = "run.json"
_CODE = "code"


class KeptRun(msgspec.Struct, frozen=True):
    """The content of the file."""

    version: str
    """The version of DistBelief that wrote it."""
    launch: dict[str, Any]
    """See `launch.to_data`."""
    code: dict[str, bytes] = {}
    """The job file and what it imports from its folder: path below that folder -> content. The job file is the first.
    Empty: the job came from a Python program."""


def keep_beside_checkpoints(launch: Launch) -> None:
    """Write the file, if the run saves checkpoints outside of its run directory. Raises StorageFailed, and
    DistBeliefError if the folder is another run's."""
    if not _is_kept(launch):
        return
    alone = Launch(launch.run_dir, launch.options, launch.job, run_id=launch.run_id)  # any machine's placement
    code = collect_code(Path(launch.job.file)) if launch.job.file else {}
    kept = KeptRun(__version__, to_data(alone), code)
    content = msgspec.json.format(msgspec.json.encode(kept), indent=1)
    folder = folder_at(launch.checkpoint_folder)
    if not create_file(folder, FILE, content, private=True):
        _require_own(folder, launch.run_id)
        write_file(folder, FILE, [content], private=True)
    _require_own(folder, launch.run_id)


def give_up_folder(launch: Launch) -> None:
    """Remove the file of a run that has saved no checkpoint and goes on no more, unless it is resumed: another run may
    take the folder."""
    from distbelief.checkpoint.manifest import step_of

    if not _is_kept(launch):
        return
    folder = folder_at(launch.checkpoint_folder)
    with contextlib.suppress(DistBeliefError):  # the run's own end is what counts
        is_used = any(step_of(name) is not None for name in entries(folder))
        if not is_used and _run_id_at(folder) == launch.run_id:
            remove_file(folder, FILE)


def _is_kept(launch: Launch) -> bool:
    return launch.options.saves and bool(launch.options.checkpoints)


def _require_own(folder: Folder, run_id: str) -> None:
    if _run_id_at(folder) not in ("", run_id):
        raise DistBeliefError(
            f"{folder.url} is the checkpoint folder of another run, as {FILE} in it says",
            hint="give each run a folder of its own (--checkpoints), or resume that run. "
            f"If that run is gone and has saved no checkpoint, delete {folder.url_of(FILE)}",
        )


def _run_id_at(folder: Folder) -> str:
    """Of the run that has the folder; "": none, a run of an earlier version, or the file is damaged."""
    content = read_file(folder, FILE)
    try:
        return str(msgspec.json.decode(content or b"", type=KeptRun).launch.get("run_id", ""))
    except msgspec.MsgspecError:
        return ""


def names_checkpoints(where: str) -> bool:
    """Whether `where` is a folder or URL of checkpoints, from which a run can be adopted, and no run directory."""
    return "://" in where or (not is_launched(Path(where)) and (Path(where) / FILE).is_file())


def require_run_dir(where: Path, wants_new: bool) -> None:
    """Raises unless `where` is a run directory, in which the run continues. `wants_new`: the user has named another."""
    from distbelief.checkpoint.manifest import step_of

    if is_launched(where):
        if wants_new:
            raise DistBeliefError(
                f"{where} is a run directory, and the run continues in it",
                hint="a new run directory is for a run that is resumed from its checkpoints alone",
            )
        return
    if not where.exists():
        raise DistBeliefError(f"there is no {where}", hint="give the folder that `train` printed")
    if where.is_dir() and any(step_of(path.name) is not None for path in where.iterdir()):
        raise DistBeliefError(
            f"{where} holds checkpoints, but no {FILE}, from which a run could be resumed",
            hint="resume its run directory; or begin another run with these weights: "
            "distbelief train JOB --from CHECKPOINTS",
        )
    raise DistBeliefError(
        f"{where} is no run directory: there is no launch.json in it", hint="give the folder that `train` printed"
    )


def adopt(checkpoints: str, run_dir: Path) -> None:
    """Make `run_dir` the run directory of the run with these checkpoints, ready to be resumed. A directory that has
    adopted the same run already is left as it is, so that the same command can be started again."""
    from distbelief.checkpoint.reading import list_checkpoints  # imports torch, which the start of a run does without

    if is_launched(run_dir):
        known = read_launch(run_dir)
        if folder_at(known.checkpoint_folder).url == folder_at(checkpoints).url:
            return
        raise DistBeliefError(
            f"{run_dir} is the directory of a run with other checkpoints, in {known.checkpoint_folder}",
            hint="give another --run-dir",
        )
    kept = _read(checkpoints)
    if not list_checkpoints(checkpoints):
        raise DistBeliefError(
            f"there is no complete checkpoint in {checkpoints}: no state to continue from",
            hint="start the run again with `distbelief train`",
        )
    try:
        launch = from_data(run_dir, kept.launch)
    except JobError:  # this version of DistBelief does not have the strategy
        raise
    except (msgspec.MsgspecError, DistBeliefError) as error:
        raise _damaged(folder_at(checkpoints), error) from error
    with begun(run_dir):
        job = launch.job
        if kept.code and not has_code(Path(job.file), kept.code):
            folder = run_dir.resolve() / _CODE
            unpack_code(kept.code, folder)
            job = msgspec.structs.replace(job, file=str(folder / next(iter(kept.code))))
        # The weights that the run began with are not needed: a checkpoint holds all of the state.
        options = msgspec.structs.replace(launch.options, checkpoints=checkpoints, begin_from="")
        keep_launch(Launch(run_dir, options, job, Placement(), launch.run_id))


def _read(checkpoints: str) -> KeptRun:
    folder = folder_at(checkpoints)
    content = read_file(folder, FILE)
    if content is None:
        raise DistBeliefError(
            f"there is no {folder.url_of(FILE)}, which a run keeps beside its checkpoints",
            hint="give the folder of a run's checkpoints as --checkpoints had it, or a run directory",
        )
    try:
        return msgspec.json.decode(content, type=KeptRun)
    except msgspec.MsgspecError as error:
        raise _damaged(folder, error) from error


def _damaged(folder: Folder, error: Exception) -> DistBeliefError:
    return DistBeliefError(
        f"{folder.url_of(FILE)} is damaged: {error}", hint="was it written by a newer version of DistBelief?"
    )
