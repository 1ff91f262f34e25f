"""A small dose of what `python -m fuzz` does: a real run whose every socket is under attack ends as if it were not."""

from __future__ import annotations

from pathlib import Path

import pytest

from distbelief.control import signatures
from tests.fuzz.__main__ import GROWTH_MB, undisturbed
from tests.fuzz.siege import Siege

STEPS = 200
FRAMES = 2000


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    return undisturbed(tmp_path_factory.mktemp("twin") / "run", STEPS)


def test_a_run_under_siege(tmp_path: Path, expected: str) -> None:
    siege = Siege(tmp_path, "ps:sync:tcp", steps=STEPS)
    try:
        assert len(siege.doors()) == 4  # the coordinator, two servers, and where torch groups meet
        before = siege.measure()
        siege.attack(FRAMES)
        siege.has_refused(signatures.REPLAYED, siege.sent["replayed"] - 1)
        siege.has_refused(signatures.WRONG_SENDER, siege.sent["in another's name"])
        after = siege.measure()
        result, refused = siege.result(), siege.refused()
    finally:
        siege.close()
    assert result["weights_sha256"] == expected
    assert (result["steps"], result["recoveries"], result["servers_lost"]) == (STEPS, 0, 0)
    assert after.rss_mb.keys() == before.rss_mb.keys(), "no process has died"
    assert max(after.rss_mb[name] - mb for name, mb in before.rss_mb.items()) < GROWTH_MB
    assert sum(siege.sent.values()) > FRAMES / 2
    for reason in (
        signatures.UNSIGNED,
        signatures.WRONG_SIGNATURE,
        signatures.REPLAYED,
        signatures.WRONG_SENDER,
        signatures.MALFORMED,
    ):
        assert refused[reason] > 0, reason
    assert result["refused"] == refused, "it is in the summary"
    assert refused[signatures.REPLAYED] == siege.sent["replayed"] - 1
