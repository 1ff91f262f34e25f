"""The switch: compression stays where it saves time, goes off where it does not, and does not flutter between."""

from __future__ import annotations

import pytest

from distbelief.compression.switch import ENOUGH, PROBE, Message, Switch

SIZE = 4_000_000
RATIO = 4.0
CODEC = 1e-9  # seconds per byte: encode and decode at 1 GB/s together


def message(switch: Switch, link: float, codec: float = CODEC, size: int = SIZE) -> Message:
    """What such a link (bytes/s) and codec take for the next message: compressed, plain, or plain with a probe."""
    wire = round(size / RATIO) if switch.on else size
    if switch.on:
        return Message(size, wire, wire / link, codec_s=codec * size)
    if switch.probe_due:
        return Message(size, wire, wire / link, codec_s=codec * size, encoded_bytes=round(size / RATIO))
    return Message(size, wire, wire / link)


def after(switch: Switch, messages: int, link: float, codec: float = CODEC) -> Switch:
    for _ in range(messages):
        switch = switch.after(message(switch, link, codec))
    return switch


@pytest.mark.parametrize(
    ("link", "pays"), [(1e6, True), (12.5e6, True), (125e6, True), (500e6, True), (1e9, False), (20e9, False)]
)
def test_it_pays_where_the_link_is_slower_than_the_compressor(link: float, pays: bool) -> None:
    switch = after(Switch("int8"), 20, link)
    assert switch.on == pays
    plain, compressed = 1 / link, CODEC + 1 / (RATIO * link)
    assert switch.gain == pytest.approx(plain / compressed)


def test_nothing_is_decided_from_the_first_messages() -> None:
    fast = Switch("int8")
    for _ in range(ENOUGH - 1):
        fast = fast.after(message(fast, 50e9))
        assert fast.on
        assert fast.why == "int8 is on: too little is measured yet"
    assert not fast.after(message(fast, 50e9)).on


def test_between_the_limits_it_stays_as_it_is() -> None:
    on = after(Switch("int8"), 20, 100e6)
    off = after(Switch("int8"), 20, 5e9)
    for gain in (0.97, 1.0, 1.1):
        link = (1 / gain - 1 / RATIO) / CODEC
        assert after(on, 300, link).on
        assert not after(off, 300, link).on


def test_noise_about_the_limit_does_not_make_it_flutter() -> None:
    switch, changes = Switch("int8"), 0
    for at in range(400):
        following = switch.after(message(switch, 0.75e9 * (1.2 if at % 2 else 0.8)))
        changes += following.on != switch.on
        switch = following
    assert changes <= 1


def test_it_follows_the_link() -> None:
    switch = after(Switch("int8"), 20, 100e6)
    switch = after(switch, 60, 10e9)
    assert not switch.on
    assert after(switch, 60, 100e6).on


def test_one_slow_moment_changes_nothing() -> None:
    off = after(Switch("int8"), 50, 10e9)
    assert not off.after(message(off, 10e9 / 3)).on


def test_a_codec_that_was_slow_while_the_machine_was_busy_gets_another_chance() -> None:
    switch = after(Switch("int8"), 20, 200e6, codec=20 * CODEC)
    assert not switch.on
    assert not switch.probe_due
    waited = 0
    while not switch.probe_due:
        switch, waited = after(switch, 1, 200e6), waited + 1
        assert waited <= PROBE
    assert not switch.on
    assert after(switch, 1, 200e6).on
    assert not after(switch, 1, 200e6, codec=20 * CODEC).on


def test_large_messages_count_for_more_than_small_ones() -> None:
    """Small ones are slow for their size: they say nothing of the link's speed."""
    switch = Switch("int8")
    for at in range(40):
        size = SIZE if at % 4 == 0 else 400
        wire = size // 4 if switch.on else size
        switch = switch.after(Message(size, wire, 5e-5 + wire / 10e9, codec_s=CODEC * size if switch.on else None))
    assert not switch.on


def test_empty_messages_and_clocks_without_ticks_do_no_harm() -> None:
    switch = Switch("topk=0.01")
    for _ in range(5):
        switch = switch.after(Message(0, 0, 0.0, codec_s=0.0))
    assert switch.on
    assert "too little" in switch.why
    for _ in range(5):
        switch = switch.after(Message(100, 0, 0.0, codec_s=0.0))
    assert switch.on
    for _ in range(5):
        switch = switch.after(Message(SIZE, SIZE // 4, 0.0, codec_s=0.001))
    assert not switch.on
    assert "more than can be measured" in switch.why


def test_it_explains_itself_in_one_line() -> None:
    slow, fast = after(Switch("int8"), 20, 12.5e6), after(Switch("int8"), 20, 20e9)
    assert slow.why == (
        "int8 is on: the link carries 12.5 MB/s, 4.0 times fewer bytes go over it,"
        " and messages take 3.8 times less time"
    )
    assert fast.why == ("int8 is off: the link carries 20.0 GB/s, and compressing 1.0 GB/s: it would save no time")
    same = after(slow, 100, 0.75e9)
    assert same.why.endswith("about the same time")
