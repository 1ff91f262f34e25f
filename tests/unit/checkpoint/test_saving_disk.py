"""Disks that are full, read-only or somebody else's, and processes that are killed while they save."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from distbelief.checkpoint.reading import list_checkpoints, newest_sound, read_tensors, verify
from distbelief.checkpoint.saving import delete, seal, tidy, write_part
from tests.support.checkpoint.samples import (
    FACTS,
    cut,
    files,
    forked,
    in_child,
    mount_small_disk,
    same_bits,
    save,
    state,
)

MIB = 1 << 20
NOBODY = 65534


def large(seed: int) -> dict[str, torch.Tensor]:
    return {f"w{n}": torch.full((MIB // 4,), float(seed + n)) for n in range(4)}


def soundly(folder: Path) -> tuple[int, list[tuple[int, str]], bool]:
    """The newest sound step, what was skipped, and whether it holds the bits that were saved."""
    manifest, skipped = newest_sound(folder, verify)
    assert manifest is not None
    return manifest.step, skipped, same_bits(read_tensors(folder, manifest), large(manifest.step))


def test_a_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"

    def trial() -> object:
        mount_small_disk(disk, "7m")
        save(disk, 1, large(1))
        try:
            save(disk, 2, large(2))
        finally:
            assert soundly(disk) == (1, [], True)
            assert list_checkpoints(disk) == [1]
            assert files(disk, 2) == ["part-00001-of-00002.safetensors"]  # the rest gave its space back
            delete(disk, 2)
            delete(disk, 1)
            save(disk, 3, large(3))
            assert soundly(disk) == (3, [], True)

    kind, message, hint = in_child(trial)
    path = disk / "step-000000002" / "part-00002-of-00002.safetensors"
    assert (kind, message) == ("StorageFailed", f"cannot write {path}: No space left on device")
    assert "free some space" in hint


def test_a_disk_that_is_full_when_the_manifest_is_written(tmp_path: Path) -> None:
    disk = tmp_path / "disk"

    def trial() -> object:
        mount_small_disk(disk, "6m")
        save(disk, 1, state(1))
        records = [write_part(disk, 2, k, 2, slices) for k, slices in enumerate(cut(state(2), 2), start=1)]
        free = os.statvfs(disk).f_bavail * os.statvfs(disk).f_frsize
        (disk / "filler").write_bytes(b"x" * free)
        try:
            seal(disk, 2, FACTS, records)
        finally:
            assert list_checkpoints(disk) == [1]
            assert newest_sound(disk, verify)[1] == []
            (disk / "filler").unlink()
            seal(disk, 2, FACTS, records)  # the same parts, once there is room
            manifest = newest_sound(disk, verify)[0]
            assert manifest is not None
            assert same_bits(read_tensors(disk, manifest), state(2))

    kind, message, _ = in_child(trial)
    path = disk / "step-000000002" / "manifest.json"
    assert (kind, message) == ("StorageFailed", f"cannot write {path}: No space left on device")


def test_a_limit_on_the_size_of_a_file(tmp_path: Path) -> None:
    save(tmp_path, 1, large(1))

    def trial() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (MIB, MIB))
        save(tmp_path, 2, large(2))

    kind, message, hint = in_child(trial)
    path = tmp_path / "step-000000002" / "part-00001-of-00002.safetensors"
    assert (kind, message) == ("StorageFailed", f"cannot write {path}: File too large")
    assert "ulimit -f" in hint
    assert files(tmp_path, 2) == []
    assert soundly(tmp_path) == (1, [], True)


def test_a_read_only_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"

    def trial(change: Callable[[], object]) -> object:
        mount_small_disk(disk, "10m")
        save(disk, 1, large(1))
        write_part(disk, 2, 1, 1, [])
        assert os.system(f"mount -o remount,ro {disk}") == 0
        assert soundly(disk) == (1, [], True)
        try:
            return change()
        finally:
            assert soundly(disk) == (1, [], True)

    for change, path, verb in (
        (lambda: save(disk, 3, large(3)), disk / "step-000000003" / "part-00001-of-00002.safetensors", "write"),
        (lambda: save(disk, 2, large(3)), disk / "step-000000002" / "part-00001-of-00002.safetensors", "write"),
        (lambda: delete(disk, 1), disk / "step-000000001" / "manifest.json", "remove"),
    ):
        kind, message, hint = in_child(lambda change=change: trial(change))
        assert (kind, message) == ("StorageFailed", f"cannot {verb} {path}: Read-only file system")
        assert "read-only" in hint
        disk.rmdir()


def test_a_deletion_that_fails_half_way_leaves_an_unfinished_save(tmp_path: Path) -> None:
    disk = tmp_path / "disk"

    def trial() -> object:
        mount_small_disk(disk, "10m")
        save(disk, 1, large(1))
        save(disk, 2, large(2))
        part = disk / "step-000000002" / "part-00002-of-00002.safetensors"
        assert os.system(f"mount --bind {part} {part}") == 0  # then it cannot be removed
        try:
            delete(disk, 2)
        finally:
            assert part.exists()
            assert list_checkpoints(disk) == [1]
            assert soundly(disk) == (1, [], True)

    kind, message, _ = in_child(trial)
    assert (kind, message) == ("StorageFailed", f"cannot remove {disk}/step-000000002: Device or resource busy")


@pytest.fixture
def open_path() -> Iterator[Path]:
    """A folder that other users can reach; pytest's own are closed to them."""
    path = Path(tempfile.mkdtemp(prefix="distbelief-test-"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_a_folder_of_somebody_else(open_path: Path) -> None:
    save(open_path, 1, large(1))
    hidden = open_path / "hidden"
    save(hidden, 1, large(1))
    hidden.chmod(0o700)

    def trial(change: Callable[[], object]) -> object:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
        assert soundly(open_path) == (1, [], True)
        return change()

    for change, message in (
        (
            lambda: save(open_path, 2, large(2)),
            f"cannot write {open_path}/step-000000002/part-00001-of-00002.safetensors: Permission denied",
        ),
        (lambda: delete(open_path, 1), f"cannot remove {open_path}/step-000000001/manifest.json: Permission denied"),
        (lambda: newest_sound(hidden, verify), f"cannot list {hidden}: Permission denied"),
    ):
        kind, said, hint = in_child(lambda change=change: trial(change))
        assert (kind, said) == ("StorageFailed", message)
        assert "check the read and write permissions" in hint
    assert soundly(open_path) == (1, [], True)


def _save_and_die(folder: Path, in_manifest: bool, at_byte: int) -> None:
    """Save step 2; the kernel kills the process when a file grows beyond that byte."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_FSIZE, (at_byte, at_byte))
    if in_manifest:  # a part of one element is smaller than the manifest
        save(folder, 2, {"w0": torch.ones(1)}, parts=1)
    else:
        save(folder, 2, large(2))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("in_manifest", [False, True])
def test_a_death_at_any_byte_leaves_the_earlier_checkpoint(tmp_path: Path, in_manifest: bool, seed: int) -> None:
    save(tmp_path, 1, large(1))
    chance = random.Random(seed)
    at_byte = chance.randrange(200, 500) if in_manifest else chance.choice([0, 5, 100, chance.randrange(2 * MIB)])
    child = forked(lambda: _save_and_die(tmp_path, in_manifest, at_byte))
    child.join()
    assert child.exitcode == -signal.SIGXFSZ
    left = files(tmp_path, 2)
    assert [name for name in left if not name.startswith(".")] == (
        ["part-00001-of-00001.safetensors"] if in_manifest else []
    )
    draft = next(name for name in left if name.startswith("."))
    assert ("manifest" in draft) == in_manifest
    assert (tmp_path / "step-000000002" / draft).stat().st_size == at_byte
    assert soundly(tmp_path) == (1, [], True)
    save(tmp_path, 2, large(2))
    assert soundly(tmp_path) == (2, [], True)
    tidy(tmp_path)
    assert files(tmp_path, 2) == [
        "manifest.json",
        "part-00001-of-00002.safetensors",
        "part-00002-of-00002.safetensors",
    ]
    assert soundly(tmp_path) == (2, [], True)


def _save_steps(folder: Path) -> None:
    for step in range(2, 1000):
        save(folder, step, large(step))
        delete(folder, step - 1)


@pytest.mark.parametrize("seed", range(8))
def test_sigkill_in_the_middle_of_saves(tmp_path: Path, seed: int) -> None:
    """Step after step is saved and the one before removed, until the process is killed: one is always sound."""
    save(tmp_path, 1, large(1))
    chance = random.Random(seed)
    bytes_there = chance.randrange(1, 4 * MIB)
    step = chance.choice([2, 3])
    child = forked(lambda: _save_steps(tmp_path))
    folder = tmp_path / f"step-{step:09d}"
    # On a busy machine the step may be saved and removed before this process looks again.
    while _size(folder) < bytes_there and not any(path.name > folder.name for path in tmp_path.glob("step-*")):
        time.sleep(0.0005)
    child.kill()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    sealed = list_checkpoints(tmp_path)
    found, skipped, right = soundly(tmp_path)
    assert (found, skipped, right) == (sealed[0], [], True)
    assert found >= step - 1


def _size(folder: Path) -> int:
    total = 0
    for path in folder.glob("*"):
        try:
            total += path.stat().st_size
        except FileNotFoundError:  # renamed or removed since
            continue
    return total
