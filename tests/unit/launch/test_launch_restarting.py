"""When a coordinator is taken for frozen, and when it was we who stood still."""

from __future__ import annotations

from distbelief.launch.rules.restarting import LOOK_S, SILENT_S, Silence


def first_too_long(silence: Silence, looks: list[float], answered_at: float) -> float | None:
    return next((now for now in looks if silence.is_too_long(now, min(now, answered_at))), None)


def every(step_s: float, start: float, end: float) -> list[float]:
    return [start + step_s * number for number in range(1, int((end - start) / step_s) + 1)]


def test_a_silent_coordinator_is_noticed_in_time() -> None:
    noticed = first_too_long(Silence(0.0), every(0.25, 0.0, 60.0), answered_at=2.0)
    assert noticed is not None
    assert 2.0 + SILENT_S < noticed < 3.0 + SILENT_S


def test_answers_keep_it_alive() -> None:
    silence = Silence(0.0)
    assert not any(silence.is_too_long(now, answered_at=now - 2.0) for now in every(0.25, 0.0, 60.0))


def test_our_own_pause_is_no_evidence_against_it() -> None:
    """All processes of a run were stopped, and go on: its answer is on its way."""
    silence = Silence(0.0)
    assert first_too_long(silence, every(0.25, 0.0, 5.0), answered_at=4.9) is None
    assert not silence.is_too_long(500.0, answered_at=4.9)
    assert first_too_long(silence, every(0.25, 500.0, 503.0), answered_at=4.9) is None
    assert first_too_long(silence, every(0.25, 503.0, 600.0), answered_at=503.1) is not None


def test_on_a_slow_machine_a_frozen_one_is_noticed_too() -> None:
    """Each look comes late; that must not excuse it for ever."""
    noticed = first_too_long(Silence(0.0), every(3 * LOOK_S, 0.0, 200.0), answered_at=0.0)
    assert noticed is not None
    assert noticed <= 3 * SILENT_S + 6 * LOOK_S


def test_the_next_one_has_its_whole_time() -> None:
    silence = Silence(0.0)
    assert first_too_long(silence, every(0.25, 0.0, 30.0), answered_at=0.0)
    silence.begin()
    assert first_too_long(silence, every(0.25, 30.0, 30.0 + SILENT_S - 1), answered_at=0.0) is None
