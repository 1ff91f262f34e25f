"""What is said on the way."""

from __future__ import annotations

import io

from distbelief.replaying.report import WayShown


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(stream: io.StringIO, seconds_per_step: float) -> str:
    now = [0.0]
    way = WayShown(stream, lambda: now[0])
    for step in range(101, 111):
        now[0] += seconds_per_step
        way(100, step, 110)
    way.close()
    way.close()
    return stream.getvalue()


def test_whole_lines_for_a_file_seconds_apart() -> None:
    assert shown(io.StringIO(), 0.7).splitlines() == [
        f"executing steps 100 … 109 again: {done} of 10 done" for done in (4, 7)
    ]


def test_a_short_way_is_no_news() -> None:
    assert shown(io.StringIO(), 0.01) == ""
    assert shown(Terminal(), 0.001) == ""


def test_one_line_that_moves_on_a_terminal_and_is_gone_at_the_end() -> None:
    said = shown(Terminal(), 0.05)
    assert "\n" not in said
    assert said.startswith("\r\x1b[Kexecuting steps 100 … 109 again: 3 of 10 done")
    assert said.endswith("\r\x1b[K")
    assert not said.endswith("\r\x1b[K\r\x1b[K"), "once"
