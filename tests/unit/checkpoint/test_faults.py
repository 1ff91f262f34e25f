"""Each way in which a checkpoint can be damaged: named, skipped, and never half loaded."""

from __future__ import annotations

import errno
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distbelief.checkpoint.faults import CheckpointDamaged, CheckpointFormat, CheckpointUnusable, StorageFailed
from distbelief.checkpoint.manifest import decode
from distbelief.checkpoint.parts import Slice, _Stream
from distbelief.checkpoint.reading import newest_sound, read_manifest, read_tensors, verify
from distbelief.checkpoint.saving import delete, seal, write_part
from distbelief.checkpoint.storage import Where
from tests.support.checkpoint.samples import FACTS, same_bits, save

SECOND = "part-00002-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Steps 100 and 200, the second one to be damaged."""
    save(tmp_path, 100)
    save(tmp_path, 200)
    return tmp_path


def newest(folder: Path) -> Path:
    return folder / "step-000000200"


def rewritten(path: Path, change: Any) -> None:
    """Change what a manifest says, and let its checksum be right again: as a program would that does not like us."""
    content = json.loads(path.read_bytes())
    del content["checksum"]
    change(content)
    body = json.dumps(content).encode()[:-1]
    path.write_bytes(body + b',"checksum":"sha256:' + hashlib.sha256(body).hexdigest().encode() + b'"}')


def refused(folder: Path, kind: type[CheckpointUnusable] = CheckpointDamaged) -> str:
    """It is refused by all who read it, with one message; the checkpoint before it is found instead."""
    with pytest.raises(kind) as caught:
        verify(folder, 200)
    assert caught.value.hint
    manifest, skipped = newest_sound(folder, verify)
    assert manifest is not None
    assert manifest.step == 100
    assert skipped == [(200, caught.value.message)]
    return caught.value.message


def test_a_torn_part(folder: Path) -> None:
    path = newest(folder) / SECOND
    size = path.stat().st_size
    for length in (size - 1, 100, 7, 0):
        with path.open("r+b") as file:
            file.truncate(length)
        assert refused(folder) == f"{path} is torn: it has {length} of {size} bytes"


def test_a_part_that_has_grown(folder: Path) -> None:
    path = newest(folder) / SECOND
    size = path.stat().st_size
    with path.open("ab") as file:
        file.write(b"x")
    assert refused(folder) == f"{path} is too long: it has {size + 1} of {size} bytes"


def test_a_missing_part(folder: Path) -> None:
    (newest(folder) / SECOND).unlink()
    assert refused(folder) == f"{newest(folder) / SECOND} is missing"


def test_a_missing_manifest_means_no_checkpoint(folder: Path) -> None:
    (newest(folder) / "manifest.json").unlink()
    manifest, skipped = newest_sound(folder, verify)
    assert manifest is not None
    assert (manifest.step, skipped) == (100, [])


def test_newer_ones_than_asked_for_are_not_looked_at(folder: Path) -> None:
    flip(newest(folder) / SECOND, 0)
    manifest, skipped = newest_sound(folder, verify, at_most=199)
    assert manifest is not None
    assert (manifest.step, skipped) == (100, [])


def test_one_that_its_reader_passes_over_is_no_fault(folder: Path) -> None:
    assert newest_sound(folder, lambda _, step: step if step < 200 else None) == (100, [])


def test_one_that_is_sealed_while_another_one_cannot_be_read_is_found(folder: Path) -> None:
    def read(where: Where, step: int) -> int:
        if step == 200:
            save(where, 300)
            delete(where, 200)
        return read_manifest(where, step).step

    assert newest_sound(folder, read)[0] == 300


@given(data=st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
def test_a_flipped_bit_anywhere_in_a_part(folder: Path, data: st.DataObject) -> None:
    path = newest(folder) / data.draw(st.sampled_from(["part-00001-of-00002.safetensors", SECOND]))
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    position = data.draw(st.one_of(st.integers(0, header - 1), st.integers(header, len(whole) - 1)))
    try:
        flip(path, position, data.draw(st.integers(0, 7)))
        assert refused(folder) == f"{path} is damaged: its checksum differs"
    finally:
        path.write_bytes(whole)


def flip(path: Path, position: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 1 << bit]))


def test_a_flipped_bit_anywhere_in_the_manifest(folder: Path) -> None:
    path = newest(folder) / "manifest.json"
    whole = path.read_bytes()
    decode(whole, "x", 200)
    for position in range(len(whole)):
        for bit in (0, 5, 7):
            with pytest.raises(CheckpointDamaged):
                decode(whole[:position] + bytes([whole[position] ^ 1 << bit]) + whole[position + 1 :], "x", 200)
    flip(path, 20)
    assert refused(folder) == f"{path} is damaged: its checksum differs"


def test_a_torn_manifest(folder: Path) -> None:
    path = newest(folder) / "manifest.json"
    whole = path.read_bytes()
    for length in range(len(whole)):
        with pytest.raises(CheckpointDamaged):
            decode(whole[:length], "x", 200)
    path.write_bytes(b"")
    assert refused(folder) == f"{path} is torn: it does not end with its checksum"


def test_nothing_is_read_when_the_last_part_is_damaged(folder: Path) -> None:
    path = newest(folder) / SECOND
    flip(path, path.stat().st_size - 1)
    manifest = read_manifest(folder, 200)
    with pytest.raises(CheckpointDamaged, match="its checksum differs"):
        read_tensors(folder, manifest)


def test_a_part_that_is_not_needed_is_not_read(folder: Path) -> None:
    records = [write_part(folder, 300, k, 2, [Slice.whole(f"w{k}", torch.ones(k))]) for k in (1, 2)]
    manifest = seal(folder, 300, FACTS, records)
    (folder / "step-000000300" / SECOND).unlink()
    assert same_bits(read_tensors(folder, manifest, ["w1"]), {"w1": torch.ones(1)})
    with pytest.raises(CheckpointDamaged, match="missing"):
        read_tensors(folder, manifest, ["w2"])


@pytest.mark.parametrize(("version", "word", "advice"), [(0, "older", "save it anew"), (3, "newer", "upgrade")])
def test_another_format_version(folder: Path, version: int, word: str, advice: str) -> None:
    path = newest(folder) / "manifest.json"

    def change(content: dict[str, Any]) -> None:
        content["format_version"] = version
        content["something of that version"] = 1

    rewritten(path, change)
    message = refused(folder, CheckpointFormat)
    assert message == f"{path} is in the {word} checkpoint format {version}; this version reads formats 1 to 2"
    with pytest.raises(CheckpointFormat) as caught:
        read_manifest(folder, 200)
    assert advice in caught.value.hint


@pytest.mark.parametrize("outside", ["../step-000000100/" + SECOND, "/etc/passwd", "s3://other/" + SECOND, "..", ""])
def test_a_manifest_that_points_outside_its_folder(folder: Path, outside: str) -> None:
    rewritten(newest(folder) / "manifest.json", lambda content: content["parts"][1].update(file=outside))
    assert refused(folder).endswith(f"is refused: it names the file {outside!r} where {SECOND} belongs")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(step=100), "it is of step 100"),
        (lambda c: c.update(step="200"), "is not a manifest: Expected `int`, got `str`"),
        (lambda c: c.update(more=1), "is not a manifest: Object contains unknown field `more`"),
        (lambda c: c.pop("random"), "is not a manifest: Object missing required field `random`"),
        (lambda c: c["tensors"][0].update(dtype="os.system"), "has the unknown type 'os.system'"),
        (lambda c: c["tensors"].append(c["tensors"][0]), "it names a tensor twice"),
        (lambda c: c["tensors"][0]["stretches"][0].update(part=3), "lies in a part that is not listed"),
        (lambda c: c["tensors"][0]["stretches"][0].update(part=0), "lies in a part that is not listed"),
        (lambda c: c["tensors"][0]["stretches"].pop(), "are in no part"),
        (lambda c: c["tensors"][0].update(stretches=[]), "are in no part"),
        (lambda c: c["tensors"][0].update(shape=[5]), "of shape 5 is held with 1000 elements"),
        (lambda c: c["tensors"][0].update(shape=[-5, -200]), "is held with"),
        (lambda c: c["tensors"][0]["stretches"][0].update(first=-1), "from -1 on"),
    ],
)
def test_a_manifest_that_contradicts_itself(folder: Path, change: Any, message: str) -> None:
    rewritten(newest(folder) / "manifest.json", change)
    assert message in refused(folder)


def test_a_part_that_does_not_match_the_manifest(folder: Path) -> None:
    """The bytes are those that were written, but the manifest says that they are something else."""

    def swap(content: dict[str, Any]) -> None:
        table = {t["name"]: t for t in content["tensors"]}
        table["float64"]["name"], table["int64"]["name"] = "int64", "float64"
        table["float64"]["dtype"], table["int64"]["dtype"] = "float64", "int64"

    rewritten(newest(folder) / "manifest.json", swap)
    assert "has another type or shape there" in refused(folder)
    save(folder, 150)
    rewritten(folder / "step-000000150" / "manifest.json", lambda c: c["tensors"][0].update(name="renamed"))
    with pytest.raises(CheckpointDamaged, match=r"does not match the manifest: 'renamed.* is not in it"):
        verify(folder, 150)


def test_a_checkpoint_under_another_steps_name(folder: Path) -> None:
    shutil.rmtree(newest(folder))
    shutil.copytree(folder / "step-000000100", newest(folder))
    assert "it is of step 100" in refused(folder)


def test_no_sound_checkpoint_at_all(folder: Path) -> None:
    for step in (100, 200):
        (folder / f"step-{step:09d}" / SECOND).unlink()
    manifest, skipped = newest_sound(folder, verify)
    assert manifest is None
    assert [step for step, _ in skipped] == [200, 100]


def test_a_fault_of_the_disk_itself_is_damage_of_that_file() -> None:
    with open("/proc/self/mem", "rb", buffering=0) as unreadable:  # page 0 of a process gives EIO
        with pytest.raises(OSError) as caught:
            unreadable.read(8)
        assert caught.value.errno == errno.EIO
        with pytest.raises(CheckpointDamaged, match="part-1 cannot be read: the disk reports a fault"):
            _Stream(unreadable, "part-1", 100).fill((), 100)


def test_a_folder_that_cannot_be_listed_is_no_reason_to_start_anew(tmp_path: Path) -> None:
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    with pytest.raises(StorageFailed, match=r"cannot list .*loop: Too many levels of symbolic links"):
        newest_sound(loop, verify)
