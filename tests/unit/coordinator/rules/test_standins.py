"""A host is lost, workers are started elsewhere, and the host, or another one in its place, comes back."""

from __future__ import annotations

from distbelief.control import messages as m
from distbelief.coordinator.rules import state as s
from tests.support.coordinator.hosts import offer, placed
from tests.support.coordinator.play import Run, heartbeat, sends, starts, texts


def led() -> Run:
    """Two workers of the launching process, 0 and 1, and two of a host b that was started by hand, 2 and 3."""
    run = Run(workers=2, transport="gloo", local_workers=2, takes_hosts=True)
    run.feed(m.EngineAttached("here", running={0: 100, 1: 101}))
    run.feed(offer("b", "y", room=2, grows=True), m.EngineAttached("b", room=2))
    for worker in range(4):
        run.join(worker, host="here" if worker < 2 else "b")
    run.ready(*range(4))
    assert run.members == [0, 1, 2, 3]
    return run


def lost(run: Run, host: str = "b", stand_ins: tuple[int, ...] = (4, 5)) -> None:
    """The host is lost; workers of these numbers are started beside the launching process's own."""
    run.feed(m.HostLost(host, "its power has failed"))
    outputs = run.feed(m.EngineAttached("here", running={0: 100, 1: 101}))
    assert placed(outputs) == dict.fromkeys(stand_ins, "here")
    for worker in stand_ins:
        run.join(worker, host="here")
    run.ready(*stand_ins)
    assert run.members == [0, 1, *stand_ins]


def retired(outputs: list[s.Output]) -> list[int]:
    return sorted(worker for worker, command in sends(outputs) if isinstance(command, m.Retire))


def leave(run: Run, *workers: int) -> list[s.Output]:
    return [output for worker in workers for output in run.feed(m.WorkerLeft(worker, run.state.generation))]


def test_stand_ins_leave_when_the_workers_of_the_lost_host_are_back() -> None:
    run = led()
    lost(run)
    outputs = run.feed(heartbeat(worker=3, generation=1))
    assert retired(outputs) == [5], "the newest one"
    assert "worker 3 (host b, pid 103) is back: 1 worker started meanwhile leaves" in texts(outputs)
    leave(run, 5)
    outputs = run.feed(heartbeat(worker=2, generation=1))
    assert retired(outputs) == [4]
    leave(run, 4)
    assert sorted(run.members) == [0, 1, 2, 3]
    assert run.state.target == run.restarted().state.target == 4


def test_a_stand_in_that_is_still_starting_is_not_waited_for() -> None:
    run = led()
    run.feed(m.HostLost("b", "its power has failed"), m.EngineAttached("here", running={0: 100, 1: 101}))
    outputs = run.feed(heartbeat(worker=2, generation=1))
    assert starts(outputs).keys() == {0, 1, 2}
    assert run.state.hired.keys() == {4}
    run.feed(heartbeat(worker=3, generation=1))
    assert run.state.hired == {}
    assert run.members == [0, 1, 2, 3]


def test_a_worker_that_is_back_before_another_one_was_started_lets_nobody_leave() -> None:
    run = led()
    run.feed(m.HostLost("b", "its power has failed"))
    outputs = run.feed(heartbeat(worker=2, generation=1), heartbeat(worker=3, generation=1))
    assert retired(outputs) == []
    assert run.members == [0, 1, 2, 3]


def test_a_host_that_is_started_again_and_again_does_not_leave_more_workers_each_time() -> None:
    run, first = led(), 4
    for restart in range(3):
        host = "b" if restart == 0 else f"b{restart}"
        lost(run, host, (first, first + 1))
        name = f"b{restart + 1}"
        run.feed(offer(name, name, room=2, grows=True))
        outputs = run.feed(m.EngineAttached(name, room=2))
        assert run.state.target == 4
        assert retired(outputs) == [first, first + 1], "those that were started in its place"
        assert placed(outputs) == {first + 2: name, first + 3: name}
        leave(run, first, first + 1)
        for worker in (first + 2, first + 3):
            run.join(worker, host=name)
        run.ready(first + 2, first + 3)
        assert run.members == [0, 1, first + 2, first + 3]
        assert run.restarted().state.offers == run.state.offers
        first += 4


def test_a_host_that_comes_before_another_worker_was_started_takes_the_lost_ones_places() -> None:
    run = led()
    run.feed(m.HostLost("b", "its power has failed"), offer("c", "z", room=3, grows=True))
    outputs = run.feed(m.EngineAttached("c", room=3))
    assert placed(outputs) == {4: "c", 5: "c", 6: "c"}, "two instead of b's, and one more"
    assert (run.state.target, retired(outputs)) == (5, [])
    run.feed(offer("d", "d", room=1, grows=True))
    assert placed(run.feed(m.EngineAttached("d", room=1))) == {7: "d"}, "b is replaced already"
    assert run.state.target == 6


def restarted_at_once(*, stand_ins: bool) -> Run:
    """b's agent is killed and started again before b counts as lost."""
    run = led()
    if stand_ins:  # b was silent for a while, so others are started elsewhere
        run.feed(m.EngineAttached("here", running={0: 100, 1: 101}), now=5.0)
    run.feed(m.WorkerExited(2, -9), m.WorkerExited(3, -9), now=5.0 if stand_ins else 1.0)
    run.feed(offer("b", "new", room=2, grows=True), m.EngineAttached("b-2", room=2), now=5.1)
    assert run.state.target == 6
    return run


def test_an_agent_that_is_started_again_before_its_host_is_lost_adds_nothing_in_the_end() -> None:
    run = restarted_at_once(stand_ins=False)
    run.feed(m.HostLost("b", "silence"), now=11.0)
    run.feed(m.EngineAttached("here", running={0: 100, 1: 101}), m.EngineAttached("b-2", room=2), now=11.0)
    assert run.state.target == run.restarted().state.target == 4
    assert [run.state.placed[worker] for worker in sorted(run.state.hired)] == ["b-2", "b-2"]
    run.feed(offer("c", "c", room=1, grows=True), m.EngineAttached("c", room=1), now=12.0)
    assert run.state.target == 5, "b is replaced already"


def test_stand_ins_leave_too_when_the_loss_of_the_first_agent_is_certain() -> None:
    run = restarted_at_once(stand_ins=True)
    assert sorted(run.state.hired) == [4, 5, 6, 7]
    assert [run.state.placed[worker] for worker in (4, 5, 6, 7)] == ["here", "here", "b-2", "b-2"]
    run.feed(m.HostLost("b", "silence"), now=11.0)
    assert run.state.target == 4
    assert sorted(run.state.hired) == [6, 7]


def test_the_third_agent_of_a_machine_takes_the_place_of_the_second() -> None:
    run = restarted_at_once(stand_ins=False)
    run.feed(m.HostLost("b", "silence"), now=11.0)
    run.feed(offer("b", "newest", room=2, grows=True), m.EngineAttached("b-3", room=2), now=12.0)
    run.feed(m.HostLost("b-2", "silence"), now=20.0)
    again = run.restarted()
    assert run.state.target == again.state.target == 4
    assert run.state.offers == again.state.offers


def test_two_machines_of_one_name_are_two() -> None:
    run = led()
    run.feed(offer("b", "new", room=2, grows=True), m.EngineAttached("b-2", room=2))
    assert run.state.target == 6
    assert sorted(run.state.hired) == [4, 5]
    run.feed(m.HostLost("b-2", "silence"), now=11.0)
    assert run.state.target == 6, "the one that came later is no machine that b is started on again"


def test_a_host_whose_workers_left_adds_them_when_it_comes_again() -> None:
    run = led()
    run.feed(m.LeaveRequested(2), m.LeaveRequested(3))
    leave(run, 2, 3)
    assert run.state.target == 2
    again = run.restarted()
    for one in (run, again):
        one.feed(m.EngineAttached("here", running={0: 100, 1: 101}))
        one.feed(m.HostLost("b", "it left"), offer("b", "z", room=2, grows=True))
        one.feed(m.EngineAttached(replies_name(one), room=2))
        assert one.state.target == 4


def test_a_coordinator_that_has_just_started_does_not_take_a_living_host_for_lost() -> None:
    again = led().restarted()
    again.feed(offer("c", "z", room=1, grows=True))
    again.feed(m.EngineAttached("c", room=1))
    assert again.state.target == 5


def replies_name(run: Run) -> str:
    """The name that the newest host was given."""
    return list(run.state.offers.values())[-1].host
