"""Which seeds to simulate: as a user writes them, and those of a day."""

from __future__ import annotations

from datetime import UTC, date, datetime

SEEDS_A_DAY = 200


def seeds_of(day: date) -> range:
    """The seeds of a day, so that the tests try other ones each day, and a day can be repeated.

    >>> seeds_of(date(2026, 11, 19))
    range(739939000, 739939200)
    """
    first = day.toordinal() * 1000
    return range(first, first + SEEDS_A_DAY)


def seeds_of_today() -> range:
    return seeds_of(datetime.now(UTC).date())


def again(seeds: range) -> str:
    """
    >>> again(range(4, 7))
    'make sim SEEDS=4-6'
    """
    return f"make sim SEEDS={seeds[0]}-{seeds[-1]}"


def parse_seeds(text: str) -> list[int]:
    """
    >>> parse_seeds("1,4-6")
    [1, 4, 5, 6]
    """
    seeds: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        seeds += range(int(first), int(last or first) + 1)
    return seeds
