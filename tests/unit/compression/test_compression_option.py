"""Compression as text: what people write is understood or refused with what is known, and comes back as it was."""

from __future__ import annotations

import pytest

from distbelief.compression.methods import Bf16, Int8, TopK, codec_of, method_of
from distbelief.compression.powersgd import LowRank
from distbelief.errors import JobError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("bf16", Bf16()),
        (" int8 ", Int8(1024)),
        ("int8=256", Int8(256)),
        ("int8:block=256", Int8(256)),
        ("int8:256", Int8(256)),
        ("topk=0.01", TopK(0.01)),
        ("topk=1e-4", TopK(0.0001)),
        ("topk:fraction=0.5", TopK(0.5)),
        ("powersgd", LowRank(4)),
        ("powersgd=2", LowRank(2)),
    ],
)
def test_text_and_value_are_the_same_thing(text: str, value: object) -> None:
    assert method_of(text) == value
    assert method_of(str(value)) == value
    assert hash(method_of(text)) == hash(value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no compression ''"),
        ("zip", "no compression 'zip'"),
        ("BF16", "no compression 'BF16'"),
        ("int8=", "nothing follows 'int8='"),
        ("int8:", "nothing follows 'int8:'"),
        ("bf16=2", "bf16 has no number"),
        ("int8=-8", "'-8' in the compression 'int8=-8' is not a whole number"),
        ("int8=rank=8", "'rank=8' in the compression"),
        ("int8=7", "blocks of 7 elements"),
        ("int8=2000000", "blocks of 2000000"),
        ("topk", "which fraction"),
        ("topk=one", "'one' in the compression 'topk=one' is not a fraction"),
        ("topk=0", "the fraction 0 of"),
        ("topk=0.6", "the fraction 0.6"),
        ("topk=nan", "the fraction nan"),
        ("powersgd=0", "the rank 0"),
        ("powersgd=four", "'four' in the compression 'powersgd=four' is not a whole number"),
    ],
)
def test_errors_say_what_is_wrong_and_what_to_write(text: str, says: str) -> None:
    with pytest.raises(JobError) as caught:
        method_of(text)
    assert says in caught.value.message
    assert caught.value.hint


def test_servers_are_not_given_powersgd() -> None:
    assert codec_of("int8") == Int8()
    with pytest.raises(JobError, match="servers"):
        codec_of("powersgd")
