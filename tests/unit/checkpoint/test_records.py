"""Files of a run directory that are there, that are not, and that are damaged."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from distbelief.checkpoint.records import read_record
from distbelief.errors import DistBeliefError


class Named(msgspec.Struct):
    name: str


def test_only_what_is_wanted_is_read(tmp_path: Path) -> None:
    (tmp_path / "job.json").write_text('{"name": "digits", "shards": 8}')
    assert read_record(tmp_path / "job.json", Named) == Named("digits")


@pytest.mark.parametrize(
    ("content", "fault"),
    [(None, "cannot read .*: No such file"), ("{", "is damaged"), ('{"name": 1}', "is damaged: Expected `str`")],
)
def test_what_cannot_be_read_is_an_error_in_words(tmp_path: Path, content: str | None, fault: str) -> None:
    if content is not None:
        (tmp_path / "job.json").write_text(content)
    with pytest.raises(DistBeliefError, match=fault):
        read_record(tmp_path / "job.json", Named)
