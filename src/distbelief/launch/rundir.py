"""The run directory around a run: made before it, checked for another process that uses it, read for the verdict."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from distbelief.coordinator.journal import NO_LOCKS, JournalDamaged, lock_file, replace_damaged
from distbelief.coordinator.journal import read as read_journal
from distbelief.errors import DistBeliefError, JobError, RunFailed, RunInterrupted
from distbelief.launch.pollloop import Signals

IDLE_S = 3.0  # a coordinator whose launching process was killed ends within moments
CLOSING_S = 60.0  # after the end of the run the process that led it ends the others, and reads the profile

_LOCK = "launch.lock"

COMMAND_LOG = "command.log"
"""In the folder `logs`: the output of a command that has no terminal (`train --detach`)."""

STOP_COMMAND = "distbelief stop"


_BEFORE_THE_FIRST_GENERATION = re.compile(
    r"launch\.(json|lock)|logs|profile|code|parcel\.bin|begin\.safetensors|rendezvous\.json|join\.sock"
    r"|journal\.jsonl(\.lock)?|metrics\.jsonl|coordinator\.json|\.seen-by-ray|\..+\.draft"
)
_OF_A_RUN_THAT_BEGAN = ("generation", "resumed", "loaded", "checkpoint", "damaged")


def make_run_dir(run_dir: Path) -> None:
    """Make an empty run directory, or say why that cannot be. The directory of a run that never trained counts as
    empty: its job was refused, or a batch system killed it at its start and starts the same command again."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        # A run that was refused before it began leaves empty folders, and the output of a detached command. The user
        # mends the error and starts it again.
        full = [
            entry.name
            for entry in run_dir.iterdir()
            if not entry.is_dir() or any(one.name != COMMAND_LOG for one in entry.iterdir())
        ]
        if full and not _never_began(run_dir, full):
            hint = "give another --run-dir"
            if (run_dir / "launch.json").exists():
                hint += f", or go on with the run in it: `distbelief resume {shlex.quote(str(run_dir))}`"
            raise DistBeliefError(f"the run directory '{run_dir}' is not empty", hint=hint)
        (run_dir / "logs").mkdir(exist_ok=True)
    except OSError as error:
        if isinstance(error, FileExistsError):
            message = f"the run directory '{run_dir}' is a file"
            raise DistBeliefError(message, hint="give another --run-dir") from error
        raise _cannot_write(run_dir, error) from error


def _cannot_write(run_dir: Path, error: OSError) -> DistBeliefError:
    return DistBeliefError(
        f"cannot write to the run directory '{run_dir}': {error.strerror or error}",
        hint="free some space there, or give a --run-dir on a disk that you can write to",
    )


def _never_began(run_dir: Path, names: Iterable[str]) -> bool:
    """Whether a launch has written these files, and no members have trained: it was refused, or killed at its start."""
    if not {"launch.json", _LOCK} & set(names) or not all(map(_BEFORE_THE_FIRST_GENERATION.fullmatch, names)):
        return False
    try:
        records = read_journal(run_dir / "journal.jsonl") if (run_dir / "journal.jsonl").exists() else []
    except JournalDamaged:
        return False
    return all(record.get("kind") not in _OF_A_RUN_THAT_BEGAN for record in records)


@contextlib.contextmanager
def begun(run_dir: Path) -> Iterator[None]:
    """Make a run directory, and lead the run in it."""
    make_run_dir(run_dir)
    with led(run_dir):
        make_run_dir(run_dir)  # another command may have begun a run in it meanwhile
        _forget_failed_start(run_dir)
        yield


def _forget_failed_start(run_dir: Path) -> None:
    if not (run_dir / "journal.jsonl").exists():
        return
    check_idle(run_dir)
    for name in ("journal.jsonl", "metrics.jsonl", "coordinator.json"):
        (run_dir / name).unlink(missing_ok=True)


@contextlib.contextmanager
def led(run_dir: Path) -> Iterator[None]:
    """While this process leads the run, from before it writes launch.json: another command can then neither change that
    file nor start a second coordinator. Raises while another process leads the run."""
    since = time.monotonic()
    while (fd := _try_to_lock(run_dir)) is None:
        check_idle(run_dir)
        # Between two coordinators of a living run its journal is not locked either.
        if time.monotonic() - since > (CLOSING_S if _has_ended(run_dir) else IDLE_S):
            raise _is_running(run_dir)
        time.sleep(0.1)
    try:
        yield
    finally:
        fcntl.flock(fd, fcntl.LOCK_UN)  # also for forked processes that have inherited the descriptor
        os.close(fd)


def _try_to_lock(run_dir: Path) -> int | None:
    try:
        return lock_file(run_dir / _LOCK)
    except BlockingIOError:
        return None
    except OSError as error:
        raise _cannot_write(run_dir, error) from error


def _has_ended(run_dir: Path) -> bool:
    return (run_dir / "journal.jsonl").exists() and ended(run_dir) is not None


def _is_running(run_dir: Path) -> DistBeliefError:
    return DistBeliefError(
        f"the run in {run_dir} is running",
        hint=f"to stop it: `{STOP_COMMAND} {shlex.quote(str(run_dir))}`; another run needs another --run-dir",
    )


def mend_journal(run_dir: Path, checkpoints: str) -> str:
    """Put a damaged journal away, if the run can go on from a checkpoint. Returns a notice, or "" if it is whole."""
    path = run_dir / "journal.jsonl"
    try:
        if path.exists():
            read_journal(path)
        return ""
    except JournalDamaged as error:
        from distbelief.checkpoint.reading import newest_sound, verify  # imports torch

        sound = newest_sound(checkpoints, verify)[0] if checkpoints else None
        if sound is None:
            error.hint = "restore the file, or start in a new run directory: there is no sound checkpoint to go on from"
            raise
        check_idle(run_dir)
        kept = replace_damaged(path)
        return (
            f"{error.message}: it is kept as {kept.name}, and the run goes on from the checkpoint of step {sound.step}"
        )


def check_idle(run_dir: Path) -> None:
    """Raises while another process runs this run, before anything in the directory is changed."""
    try:
        fd = os.open(run_dir / "journal.jsonl.lock", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:  # the run has never begun; or the file is not readable, which the coordinator reports
        return
    try:
        deadline = time.monotonic() + IDLE_S
        while not _is_free(fd):
            if time.monotonic() > deadline:
                raise _is_running(run_dir)
            time.sleep(0.1)
    finally:
        os.close(fd)


def _is_free(lock_fd: int) -> bool:
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        return True  # the coordinator says what to do
    return True


def ended(run_dir: Path) -> dict[str, Any] | None:
    """The record of the run's end, if it has ended since it was last resumed."""
    for record in reversed(read_journal(run_dir / "journal.jsonl")):
        if record.get("kind") in ("ended", "resumed"):
            return record if record["kind"] == "ended" else None
    return None


def is_complete(run_dir: Path) -> bool:
    try:
        record = ended(run_dir) if (run_dir / "journal.jsonl").exists() else None
    except JournalDamaged:  # `mend_journal` decides
        return False
    return record is not None and record["status"] == "completed"


def verdict(run_dir: Path, signals: Signals, failure: str = "") -> dict[str, Any]:
    """The journal's last record, for the process that has led the run. Raises if the run is not complete. `failure`:
    why, if the disk has no record."""
    record = ended(run_dir)
    if signals.received and (record is None or record["status"] == "stopped"):
        raise _interrupted(run_dir, signal.Signals(signals.received).name)
    if record is None:
        if failure:
            hint = f"free some space, or check the disk; then `distbelief resume {shlex.quote(str(run_dir))}` goes on"
            raise RunFailed(failure, hint=hint)
        raise RunFailed("the coordinator ended without a reason", hint=f"see {run_dir}/logs/coordinator.log")
    return outcome(record, run_dir)


def outcome(record: dict[str, Any], run_dir: Path) -> dict[str, Any]:
    """The record of the run's end if the run is complete; else raises as the process that led the run did."""
    if record["status"] == "completed":
        return record
    reason = record.get("reason", "the run failed")
    if record["status"] == "stopped" and (who := stopper_in(reason)):
        raise _interrupted(run_dir, who)
    raise _explain(record.get("failure", {}), reason, run_dir)


def stopper_in(reason: str) -> str:
    """The signal or command of a user that stopped a run, by the reason in its journal; "" if nobody wished it.

    >>> stopper_in("SIGTERM received; a checkpoint of step 35 is saved"), stopper_in("the coordinator received nothing")
    ('SIGTERM', '')
    """
    who, received, _ = reason.partition(" received")
    return who if received and (who == STOP_COMMAND or who in signal.Signals.__members__) else ""


def _interrupted(run_dir: Path, who: str) -> RunInterrupted:
    saved = _newest_checkpoint(run_dir)
    what = f"the newest checkpoint is of step {saved}" if saved else "there is no checkpoint"
    error = RunInterrupted(
        f"stopped by {who}; {what}; nothing is left running",
        hint=f"go on with `distbelief resume {shlex.quote(str(run_dir))}`",
    )
    if who in signal.Signals.__members__:
        error.exit_code = 128 + signal.Signals[who]
    return error


def _newest_checkpoint(run_dir: Path) -> int:
    """The checkpoint that a run was resumed from counts as the newest: later ones could not be used."""
    kinds = ("checkpoint", "loaded")
    steps = [record["step"] for record in read_journal(run_dir / "journal.jsonl") if record.get("kind") in kinds]
    return int(steps[-1]) if steps else 0


def _explain(failure: dict[str, Any], reason: str, run_dir: Path) -> DistBeliefError:
    """The failure as the user reads it: which worker, on which host, at which step, where these are known."""
    message = failure.get("message", reason)
    hint = failure.get("hint", "").replace("logs/", f"{run_dir}/logs/")
    details = failure.get("traceback", "")
    if failure.get("kind") == "job" and failure["step"] < 0:  # while loading: every worker has the same error
        return JobError(message, hint=hint, details=details)
    if failure.get("kind") in ("job", "user", "data", "internal", "memory") and failure["worker"] >= 0:
        message = f"worker {failure['worker']} on {failure['host']}: {message}"
        if failure["step"] >= 0 and failure["shard"] >= 0:
            message += f" (step {failure['step']}, shard {failure['shard']})"
    return RunFailed(message, hint=hint, details=details)
