"""Key files: made once, read by their owner alone."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from distbelief.control.keyfiles import new_key, read_key, required_key, run_secret
from distbelief.errors import DistBeliefError


def test_a_key_is_read_as_it_was_made(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        new_key(tmp_path / "key")
    finally:
        os.umask(before)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600
    assert re.fullmatch(r"[0-9a-f]{64}\n", (tmp_path / "key").read_text())
    key = read_key(tmp_path / "key")
    assert key.hex() == (tmp_path / "key").read_text().strip()
    new_key(tmp_path / "other")
    assert read_key(tmp_path / "other") != key
    assert run_secret(read_key(tmp_path / "other")) != run_secret(key) != key


def test_a_key_is_never_overwritten_not_even_through_a_link(tmp_path: Path) -> None:
    new_key(tmp_path / "key")
    kept = read_key(tmp_path / "key")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("key", "link"):
        with pytest.raises(DistBeliefError, match="exists already"):
            new_key(tmp_path / name)
    assert read_key(tmp_path / "key") == kept
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_a_file_that_others_can_read_is_refused(tmp_path: Path, mode: int) -> None:
    new_key(tmp_path / "key")
    (tmp_path / "key").chmod(mode)
    with pytest.raises(DistBeliefError, match=f"can be read by others .its mode is {mode:o}.") as caught:
        read_key(tmp_path / "key")
    assert "chmod 600" in caught.value.hint


@pytest.mark.parametrize("content", [b"", b"ab" * 31, b"ab" * 33, b"x" * 64, b"\xff" * 64, b"ab" * 1000000])
def test_what_is_no_key_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "key").write_bytes(content)
    (tmp_path / "key").chmod(0o600)
    with pytest.raises(DistBeliefError, match="holds no key") as caught:
        read_key(tmp_path / "key")
    assert "distbelief keys new" in caught.value.hint


def test_what_cannot_be_read_or_written_is_said(tmp_path: Path) -> None:
    with pytest.raises(DistBeliefError, match=r"cannot read the key file .*No such file"):
        read_key(tmp_path / "key")
    with pytest.raises(DistBeliefError, match=r"cannot read the key file .*Is a directory"):
        read_key(tmp_path)
    with pytest.raises(DistBeliefError, match=r"cannot write a key to .*No such file"):
        new_key(tmp_path / "nowhere" / "key")
    with pytest.raises(DistBeliefError, match="you need its key file") as caught:
        required_key(None, "tcp://10.0.0.1:5000")
    assert "--key FILE" in caught.value.hint
