"""Compression as text: what people write is understood or refused with what is known, and comes back as it was."""

from __future__ import annotations

import pytest

from distbelief.compression.bf16 import Bf16
from distbelief.compression.int8 import Int8
from distbelief.compression.powersgd import LowRank
from distbelief.compression.spec import parse, parse_codec
from distbelief.compression.topk import TopK
from distbelief.errors import JobError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("bf16", Bf16()),
        (" int8 ", Int8(1024)),
        ("int8:block=256", Int8(256)),
        ("topk:0.01", TopK(0.01)),
        ("topk:1e-4", TopK(0.0001)),
        ("topk:fraction=0.5", TopK(0.5)),
        ("powersgd", LowRank(4)),
        ("powersgd:rank=2", LowRank(2)),
    ],
)
def test_text_and_value_are_the_same_thing(text: str, value: object) -> None:
    assert parse(text) == value
    assert parse(str(value)) == value
    assert hash(parse(text)) == hash(value)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no compression ''"),
        ("zip", "no compression 'zip'"),
        ("BF16", "no compression 'BF16'"),
        ("int8:", "nothing follows the colon"),
        ("bf16:block=2", "bf16 has no options"),
        ("int8:1024", "its option is block=NUMBER, not '1024'"),
        ("int8:block=", "'' is not a whole number"),
        ("int8:block=-8", "'-8' is not a whole number"),
        ("int8:block=7", "blocks of 7 elements"),
        ("int8:block=2000000", "blocks of 2000000"),
        ("topk", "which fraction"),
        ("topk:one", "'one' is not a fraction"),
        ("topk:0", "the fraction 0 of"),
        ("topk:0.6", "the fraction 0.6"),
        ("topk:nan", "the fraction nan"),
        ("powersgd:rank=0", "the rank 0"),
        ("powersgd:rank=four", "'four' is not a whole number"),
        ("powersgd:4", "its option is rank=NUMBER"),
    ],
)
def test_errors_say_what_is_wrong_and_what_to_write(text: str, says: str) -> None:
    with pytest.raises(JobError) as caught:
        parse(text)
    assert says in caught.value.message
    assert caught.value.hint


def test_servers_are_not_given_powersgd() -> None:
    assert parse_codec("int8") == Int8()
    with pytest.raises(JobError, match="servers"):
        parse_codec("powersgd")
