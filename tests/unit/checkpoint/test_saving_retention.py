"""Which checkpoints go, and that what goes is never half there."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from distbelief.checkpoint.reading import list_checkpoints, newest_sound, verify
from distbelief.checkpoint.saving import delete, surplus, tidy, write_part
from tests.support.checkpoint.samples import cut, files, save, state

METRICS = st.dictionaries(st.sampled_from(["loss", "accuracy"]), st.none() | st.floats())
CHECKPOINTS = st.dictionaries(st.integers(0, 60), METRICS, max_size=20)
RULES = st.fixed_dictionaries(
    {
        "last": st.integers(1, 5),
        "every": st.none() | st.integers(1, 20),
        "best": st.none() | st.tuples(st.sampled_from(["loss", "accuracy"]), st.booleans()),
    }
)


@given(CHECKPOINTS, RULES)
def test_what_must_be_kept_is_kept_and_nothing_else(checkpoints: dict, rules: dict) -> None:
    gone = surplus(checkpoints, **rules)
    kept = checkpoints.keys() - set(gone)
    assert gone == sorted(set(gone) & checkpoints.keys())
    newest = sorted(checkpoints, reverse=True)[: rules["last"]]
    assert kept >= set(newest)
    if rules["every"]:
        assert all(step % rules["every"] for step in gone)
    number = {}
    if rules["best"]:
        metric, higher = rules["best"]
        number = {s: v for s, m in checkpoints.items() if (v := m.get(metric)) is not None and not math.isnan(v)}
        if number:
            top = (max if higher else min)(number.values())
            assert any(number.get(step) == top for step in kept)
    others = [s for s in kept if s not in newest and not (rules["every"] and s % rules["every"] == 0)]
    assert len(others) <= bool(number)


@given(CHECKPOINTS, RULES)
def test_doing_it_twice_changes_nothing(checkpoints: dict, rules: dict) -> None:
    gone = set(surplus(checkpoints, **rules))
    assert surplus({s: m for s, m in checkpoints.items() if s not in gone}, **rules) == []


@given(CHECKPOINTS, RULES)
def test_the_order_in_which_they_are_given_does_not_matter(checkpoints: dict, rules: dict) -> None:
    assert surplus(dict(reversed(checkpoints.items())), **rules) == surplus(checkpoints, **rules)


@given(st.sets(st.integers(0, 200), max_size=30), RULES)
def test_deleting_as_one_goes_keeps_what_deleting_at_the_end_would(steps: set[int], rules: dict) -> None:
    kept: dict[int, dict] = {}
    for step in sorted(steps):
        kept[step] = {}
        for gone in surplus(kept, **rules):
            del kept[gone]
    everything: dict[int, dict] = {step: {} for step in steps}
    assert kept.keys() == everything.keys() - set(surplus(everything, **rules))


@pytest.mark.parametrize("rules", [{"last": 0}, {"last": 1, "every": 0}])
def test_rules_that_keep_nothing_are_refused(rules: dict) -> None:
    with pytest.raises(ValueError, match="1 or more"):
        surplus({1: {}}, **rules)


@pytest.fixture(params=["local", "memory"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "local":
        yield str(tmp_path)
    else:
        yield "memory://retention"
        fsspec.filesystem("memory").rm("/retention", recursive=True)


def test_a_deleted_checkpoint_is_gone_and_the_others_are_sound(folder: str) -> None:
    for step in (1, 2, 3):
        save(folder, step)
    delete(folder, 2)
    delete(folder, 2)
    assert list_checkpoints(folder) == [3, 1]
    verify(folder, 1)
    verify(folder, 3)
    save(folder, 2)
    assert list_checkpoints(folder) == [3, 2, 1]


def test_tidying_removes_unfinished_saves_before_the_newest_sealed_one_only(folder: str) -> None:
    for step in (1, 3, 5):
        write_part(folder, step, 1, 3, [])
    assert tidy(folder) == []
    save(folder, 2)
    save(folder, 4)
    assert tidy(folder) == [1, 3]
    assert tidy(folder) == []
    assert list_checkpoints(folder) == [4, 2]
    assert newest_sound(folder, verify)[1] == []
    write_part(folder, 5, 2, 3, [])  # the save that was under way goes on


def test_tidying_removes_what_an_earlier_try_left_in_a_sealed_folder(tmp_path: Path) -> None:
    write_part(tmp_path, 1, 3, 3, cut(state(), 3)[2])
    (tmp_path / "step-000000001" / ".part-00001-of-00003.safetensors.draft-0badcafe").write_bytes(b"torn")
    (tmp_path / "step-000000001" / "notes.txt").write_text("not ours")
    save(tmp_path, 1, parts=2)
    assert tidy(tmp_path) == []
    assert files(tmp_path, 1) == [
        "manifest.json",
        "notes.txt",
        "part-00001-of-00002.safetensors",
        "part-00002-of-00002.safetensors",
    ]
    verify(tmp_path, 1)


def test_tidying_a_folder_that_is_not_there(tmp_path: Path) -> None:
    assert tidy(tmp_path / "nothing") == []
