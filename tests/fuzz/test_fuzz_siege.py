"""A small dose of what `python -m fuzz` does: a real run whose every socket is under attack ends as if it were not."""

from __future__ import annotations

from pathlib import Path

import pytest

from distbelief.control import signatures
from tests.fuzz.__main__ import GROWTH_MB, undisturbed
from tests.fuzz.siege import Siege
from tests.support.runs.watched import check_servers_lost, check_workers_lost

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
        result, refused, fenced = siege.result(), siege.refused(), siege.fenced()
    finally:
        siege.close()
    assert result["weights_sha256"] == expected
    assert result["steps"] == STEPS
    check_workers_lost(siege.run_dir)
    check_servers_lost(siege.run_dir, result)
    gone = before.rss_mb.keys() - after.rss_mb.keys()
    assert {int(name.split()[1]) for name in gone} <= fenced, "no process has died of what it was sent"
    assert max(mb - before.rss_mb[name] for name, mb in after.rss_mb.items() if name in before.rss_mb) < GROWTH_MB
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
