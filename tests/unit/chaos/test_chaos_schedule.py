"""Sentences in, faults out; and what is said about a sentence that is not understood."""

from __future__ import annotations

import doctest

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distbelief.chaos import inject
from distbelief.chaos.inject import random_schedule
from distbelief.chaos.rules import schedule
from distbelief.chaos.rules.schedule import KINDS, LASTING, NUMBERED, Fault, ScheduleError, When, check, parse, write

ISSUE = (
    "kill worker every 3s, freeze worker 2 at step 40 for 5s, slow worker 1 by 3x, kill coordinator at step 60, "
    "join at step 80, cut worker 3 at step 90"
)


def one(text: str) -> Fault:
    (fault,) = parse(text)
    return fault


def failure(text: str) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        parse(text)
    return caught.value


def test_every_form_of_the_issue() -> None:
    assert parse(ISSUE) == (
        Fault("kill worker", when=When(3, "s", every=True)),
        Fault("freeze worker", 2, When(40), for_s=5),
        Fault("slow worker", 1, factor=3),
        Fault("kill coordinator", when=When(60)),
        Fault("join", when=When(80)),
        Fault("cut worker", 3, When(90)),
    )
    assert write(parse(ISSUE)) == ISSUE


def test_the_other_forms() -> None:
    assert one("leave worker 2 at step 70") == Fault("leave worker", 2, When(70))
    assert one("scale to 4 at step 50") == Fault("scale", when=When(50), count=4)
    assert one("cut worker 3 at step 90 for 5s") == Fault("cut worker", 3, When(90), for_s=5)
    assert one("slow worker 1 by 2.5x at step 10 for 3s") == Fault("slow worker", 1, When(10), 3, 2.5)
    assert one("kill worker every 40 steps") == Fault("kill worker", when=When(40, every=True))
    assert one("kill worker at 3s") == Fault("kill worker", when=When(3, "s"))
    assert one("join") == Fault("join")
    assert one("fill disk at step 4 for 2s") == Fault("fill disk", when=When(4), for_s=2)
    assert one("kill worker 0 at step 0").worker == 0
    assert one("set clock back 3h at step 7") == Fault("set clock", when=When(7), by_s=-10_800)
    assert one("drop terminal at step 20") == Fault("drop terminal", when=When(20))
    assert one("set clock forward 90 min") == Fault("set clock", by_s=5400)


def test_spaces_capitals_and_the_order_of_the_parts_do_not_matter() -> None:
    assert one("  Freeze  WORKER 2 for 500 ms at step 4 ") == Fault("freeze worker", 2, When(4), for_s=0.5)
    assert parse("join;\nkill worker at 2 min,") == (Fault("join"), Fault("kill worker", when=When(120, "s")))


@pytest.mark.parametrize(
    ("text", "word", "said"),
    [
        ("join, frieze worker 2", "frieze", "'frieze' is not a fault; did you mean 'freeze'?"),
        ("kill wroker 2", "wroker", "write 'kill worker' or 'kill reader' or 'kill coordinator'"),
        ("freeze coordinator", "coordinator", "write 'freeze worker'"),
        ("kill", "", "the end of the sentence cannot follow 'kill'"),
        ("fill disk at step 4", "", "a run on a full disk does not come to its end: for 5s"),
        ("slow worker 1", "", "'by' was expected, not the end of the sentence"),
        ("set clock 3h", "3h", "'back' was expected, not '3h'"),
        ("set clock back far", "far", "how far, as in 3h, was expected"),
        ("drop terminal for 5s", "for", "'drop terminal' has no duration"),
        ("set time back 3h", "time", "write 'set clock'"),
        ("slow worker 1 by 3", "3", "a factor above 1, as in 3x, was expected, not '3'"),
        ("slow worker 1 by 1x", "1x", "a factor above 1"),
        ("slow worker 1 by 3x every 2s", "", "needs an end"),
        ("scale 4", "4", "'to' was expected, not '4'"),
        ("scale to 0", "0", "a number of workers was expected, not '0'"),
        ("kill worker at 40", "40", "a time as in 3s, or 'step' and a number"),
        ("kill worker at step soon", "soon", "a step was expected, not 'soon'"),
        ("kill worker every 40", "", "'steps' was expected, not the end of the sentence"),
        ("kill worker every 0s", "0s", "a time as in 3s"),
        ("kill worker every 0 steps", "0", "a number of steps"),
        ("kill worker for 5s", "for", "'kill worker' has no duration"),
        ("kill worker at 3s every 3s", "every", "repeats an earlier part"),
        ("freeze worker 2 on step 4", "on", "'on' is not understood here"),
        ("freeze worker -1", "-1", "'-1' is not understood here"),
        ("freeze worker 2 for ever", "ever", "a duration was expected, not 'ever'"),
    ],
)
def test_a_wrong_sentence_shows_the_place_and_the_forms(text: str, word: str, said: str) -> None:
    error = failure(text)
    assert error.exit_code == 2
    assert said in error.message
    line, caret = error.details.split("\n")
    assert line == text
    assert caret.strip() == "^"
    assert text[caret.index("^") :].startswith(word)
    if not word:
        assert caret.index("^") == len(text)
    assert schedule.FORMS in error.hint


def test_the_place_is_shown_in_its_own_line() -> None:
    assert failure("join,\n  jion").details == "  jion\n  ^"


@pytest.mark.parametrize("text", ["", "  ", " , ,"])
def test_an_empty_schedule(text: str) -> None:
    assert "is empty" in failure(text).message


def test_a_worker_that_cannot_be() -> None:
    check(parse("kill worker 3"), 4)
    with pytest.raises(ScheduleError, match="there is no worker 4"):
        check(parse("kill worker 4"), 4)
    check(parse("scale to 5 at step 1, kill worker 4 at step 9"), 4)
    check(parse("join every 3s, kill worker 9 at step 90"), 4)


def test_a_run_in_a_terminal_has_no_relay() -> None:
    check(parse("drop terminal, kill worker 1 at step 9"), 4)
    with pytest.raises(ScheduleError, match="cannot be combined"):
        check(parse("cut worker 1 at step 9, drop terminal"), 4)


def test_a_server_that_cannot_be() -> None:
    check(parse("kill server, kill server 1 at step 4"), 4, servers=2)
    with pytest.raises(ScheduleError, match="there is no parameter server 2") as raised:
        check(parse("kill server 2"), 4, servers=2)
    assert raised.value.hint == "the servers of this run are 0 to 1"
    for servers in (0, 1):
        with pytest.raises(ScheduleError, match=f"has {servers or 'no'} parameter server") as raised:
            check(parse("join, kill server"), 4, servers)
        assert "ps:sync" in raised.value.hint


whens = st.one_of(
    st.builds(When, st.integers(0, 10**6)),
    st.builds(When, st.integers(1, 10**5), every=st.just(True)),
    st.builds(When, st.integers(1, 999), st.just("s"), st.booleans()),
)
seconds = st.integers(1, 9999).map(lambda n: n / 100)


@st.composite
def fault_values(draw: st.DrawFn) -> Fault:
    kind = draw(st.sampled_from(KINDS))
    return Fault(
        kind,
        draw(st.none() | st.integers(0, 99)) if kind in NUMBERED else None,
        draw(whens),
        draw(seconds) if kind in LASTING else None,
        draw(st.integers(11, 99)) / 10 if kind == "slow worker" else 1.0,
        draw(st.integers(1, 99)) if kind == "scale" else 0,
        draw(st.integers(1, 99)) * draw(st.sampled_from([-3600, -1, 1, 3600])) if kind == "set clock" else 0.0,
    )


@settings(deadline=None)  # a noisy machine is no failure
@given(st.lists(fault_values(), min_size=1, max_size=5).map(tuple))
def test_what_is_written_is_what_is_read(faults: tuple[Fault, ...]) -> None:
    assert parse(write(faults)) == faults


def test_random_schedules_are_valid_repeatable_and_cover_every_kind() -> None:
    texts = [random_schedule(seed, 4, 100, servers=2, readers=1) for seed in range(50)]
    assert texts == [random_schedule(seed, 4, 100, servers=2, readers=1) for seed in range(50)]
    assert len(set(texts)) > 40
    found = [parse(text) for text in texts]
    wanted = {*KINDS} - {"fill disk", "set clock", "drop terminal"}
    assert {fault.kind for faults in found for fault in faults} == wanted
    for faults in found:
        assert all(1 <= fault.when.amount <= 80 for fault in faults)
        assert all(fault.worker is None or fault.worker < 4 for fault in faults)


def test_the_only_server_is_spared() -> None:
    for servers in (0, 1):
        assert not [seed for seed in range(50) if "server" in random_schedule(seed, 4, 100, servers)]


def test_a_job_without_readers_loses_none() -> None:
    assert not [seed for seed in range(50) if "reader" in random_schedule(seed, 4, 100)]


@pytest.mark.parametrize(("workers", "steps"), [(1, 1), (2, 3), (100, 10**6)])
def test_random_schedules_of_any_size(workers: int, steps: int) -> None:
    for seed in range(20):
        assert parse(random_schedule(seed, workers, steps))


def test_the_examples_in_the_docstrings() -> None:
    assert doctest.testmod(schedule).failed == 0
    assert doctest.testmod(inject).failed == 0
