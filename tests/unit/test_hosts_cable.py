"""A bad cable: what it does to frames, by plain calls. (The labs themselves are used in e2e.)"""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.cable import Badness, Way, parse


@pytest.mark.parametrize(
    ("words", "badness"),
    [
        ("delay 20ms 5ms loss 1%", Badness(0.02, 0.005, 0.01)),
        ("rate 10mbit", Badness(bytes_per_s=1.25e6)),
        ("loss 0.5% delay 1s", Badness(delay_s=1.0, loss=0.005)),
        ("", Badness()),
    ],
)
def test_netems_words(words: str, badness: Badness) -> None:
    assert parse(words.split()) == badness


@pytest.mark.parametrize("words", ["corrupt 1%", "delay 20", "rate 10", "loss 1ms"])
def test_words_that_are_not_known(words: str) -> None:
    with pytest.raises(ValueError, match=r"knows|units"):
        parse(words.split())


@given(
    st.builds(Badness, st.floats(0, 1), st.floats(0, 1), st.just(0.0), st.sampled_from([0.0, 1e3, 1e6])),
    st.lists(st.tuples(st.floats(0, 0.5), st.integers(1, 1500)), max_size=30),
)
def test_frames_come_out_late_whole_and_in_order(badness: Badness, sent: list[tuple[float, int]]) -> None:
    way, chance, now, frames = Way(badness), random.Random(0), 0.0, []
    for number, (pause_s, size) in enumerate(sent):
        now += pause_s
        frames.append((now, bytes([number]) * size))
        way.put(frames[-1][1], now, chance)
    came = [(at, frame) for at, frame in way.waiting]
    assert [frame for _, frame in came] == [frame for _, frame in frames]
    assert all(at >= put + badness.delay_s - badness.jitter_s for (at, _), (put, _) in zip(came, frames, strict=True))
    assert way.take(float("inf")) == [frame for _, frame in frames]
    assert way.held_bytes == 0


def test_a_rate_is_kept_and_what_does_not_fit_is_lost() -> None:
    way = Way(Badness(bytes_per_s=1e6))
    for _ in range(100):
        way.put(bytes(100_000), 0.0, random.Random(0))
    assert len(way.waiting) < 100, "it holds 4 MiB"
    assert [at for at, _ in way.waiting][:2] == [0.1, 0.2]


def test_losses() -> None:
    way, chance = Way(Badness(loss=0.5)), random.Random(0)
    for _ in range(1000):
        way.put(b"frame", 0.0, chance)
    assert 400 < len(way.waiting) < 600
