"""Several hosts: who is started where, and what happens when one is lost."""

from __future__ import annotations

from distbelief.control import messages as m
from distbelief.coordinator.rules import state as s
from distbelief.coordinator.rules.hosts import ASK_AGAIN_S, LOST_S
from tests.support.coordinator.hosts import offer, placed, spread, trained
from tests.support.coordinator.play import Run, heartbeat, hired, records, replies, report, sends, starts, texts


def test_a_host_is_given_a_name_of_its_own_and_keeps_it_when_it_asks_again() -> None:
    run = Run(workers=1, transport="gloo", takes_hosts=True)
    run.feed(m.EngineAttached("node"))
    assert replies(run.feed(offer("node", "x"))) == [m.Welcome(7, "node-2")]
    assert replies(run.feed(offer("node", "x"))) == [m.Welcome(7, "node-2")]
    assert replies(run.feed(offer("node", "y"))) == [m.Welcome(7, "node-3")]
    again = run.restarted()
    assert replies(again.feed(offer("node", "x"))) == [m.Welcome(8, "node-2")], "the next coordinator knows it too"


def test_where_members_share_memory_no_other_host_is_let_in() -> None:
    (answer,) = replies(Run(workers=1).feed(offer("node", "x")))
    assert isinstance(answer, m.Answer)
    assert not answer.ok
    assert "--listen" in answer.text


def test_workers_that_are_waited_for_are_started_where_there_is_room_as_soon_as_there_is() -> None:
    run = Run(workers=3, transport="gloo", local_workers=1, takes_hosts=True)
    assert hired(run.feed(m.EngineAttached("here", running={0: 0}, room=1))) == [], "it starts its own by itself"
    run.feed(offer("a", "x", room=1))
    assert placed(run.feed(m.EngineAttached("a", room=1))) == {1: "a"}
    run.feed(offer("b", "y", room=5))
    assert placed(run.feed(m.EngineAttached("b", room=5))) == {2: "b"}
    assert run.state.target == 3
    assert placed(run.feed(m.EngineAttached("a", room=1), now=1.5)) == {}
    late = 1.0 + 2 * ASK_AGAIN_S
    assert placed(run.feed(m.EngineAttached("a", room=1), now=late)) == {1: "a"}, "it may not have heard"
    assert placed(run.feed(m.EngineAttached("b", running={2: 0}, room=5), now=late)) == {}, "it will start it"


def test_the_next_coordinator_asks_the_same_host_for_the_same_worker() -> None:
    again = spread().restarted(now=2.0)
    assert placed(again.feed(m.EngineAttached("b", room=1), now=2.0)) == {}, "0 and 1 are a's, and may be starting"
    assert placed(again.feed(m.EngineAttached("b", room=1), now=2.0 + 2 * ASK_AGAIN_S)) == {2: "b"}


def test_a_host_started_by_hand_adds_its_workers_once_nobody_is_waited_for() -> None:
    run = Run(workers=2, transport="gloo", local_workers=1, takes_hosts=True)
    run.feed(offer("b", "y", room=2, grows=True))
    run.join(0)
    outputs = run.feed(m.EngineAttached("b", room=2))
    assert run.state.target == 3, "one of b's is the one that was waited for"
    assert placed(outputs) == {1: "b", 2: "b"}
    run.feed(offer("c", "z", room=1, grows=True))
    assert placed(run.feed(m.EngineAttached("here", running={0: 100}), now=2.0)) == {}, "it is c that grows the run"
    assert placed(run.feed(m.EngineAttached("c", room=1), now=2.0)) == {3: "c"}
    assert run.state.target == 4
    run.feed(m.EngineAttached("c", room=1), offer("c", "z", room=1, grows=True), now=2.0)
    assert run.state.target == 4, "said again, it counts once"
    again = run.restarted()
    again.feed(m.EngineAttached("b", running={1: 0, 2: 0}, room=2))
    assert again.state.target == 4, "also for the next coordinator"


def test_a_worker_that_dies_is_replaced_on_a_host_with_room_or_not_at_all() -> None:
    run = trained(spread())
    assert placed(run.kill(2)) == {3: "b"}, "where it was: there is room again"
    run.join(3, host="b")
    run.ready(3)
    run.feed(m.EngineAttached("b", running={3: 103}, exited={2: -9}, room=1))
    run.feed(m.EngineAttached("a", running={0: 100, 1: 101}, room=1))  # it takes one less from now on
    outputs = run.kill(1)
    assert starts(outputs).keys() == {0, 3}
    assert hired(outputs) == [], "there is no room for another one"
    run.feed(offer("c", "z"))
    assert placed(run.feed(m.EngineAttached("c", room=1))) == {4: "c"}


def test_whoever_wants_more_workers_than_there_is_room_for_is_told_so() -> None:
    run = trained(spread(rooms={"a": 2, "b": 2}))
    (answer,) = replies(run.feed(m.ScaleRequested(5)))
    assert answer == m.Answer(
        7, True, "1 more worker is being started; for 1 more no host has room: another host may join"
    )
    run.feed(offer("c", "z"))
    assert placed(run.feed(m.EngineAttached("c", room=1))) == {4: "c"}


def test_a_lost_host_takes_its_members_with_it_and_others_get_their_places() -> None:
    run = trained(spread())
    for tick in range(50):  # steps are committed, so that the usual times are known
        run.feed(
            m.EngineAttached("here", room=0),
            m.EngineAttached("a", room=2),
            m.EngineAttached("b", room=1),
            now=tick * 0.2,
        )
        run.beat(1, 2, step=tick, now=tick * 0.2)
        run.beat(0, step=tick, now=tick * 0.2, reports=[report(tick, at=tick * 0.2)])
        run.feed(s.Ticked(), now=tick * 0.2)
    outputs: list[s.Output] = []
    for tick in range(100):  # nothing is heard of the host b from now on
        now = 10.0 + tick * 0.2
        outputs += run.feed(m.EngineAttached("here", room=0), m.EngineAttached("a", room=2), now=now)
        outputs += run.beat(0, 1, step=50, waiting=True, now=now)
        outputs += run.feed(s.Ticked(), now=now)
    assert [entry["worker"] for entry in records(outputs, "estranged")] == [2]
    assert run.members == [0, 1]
    assert "the host b has not been heard of" in texts(outputs)
    assert "b" not in run.state.hosts
    assert hired(outputs) == [], "there is no room for another one"
    run.feed(offer("c", "z"))
    assert placed(run.feed(m.EngineAttached("c", room=1), now=31.0)) == {3: "c"}
    outputs = run.feed(heartbeat(worker=2, generation=1), now=32.0)
    assert starts(outputs).keys() == {0, 1, 2}, "and it may come back"


def test_a_lost_host_that_was_asked_for_workers_is_not_waited_for() -> None:
    run = spread()
    now = 2 * LOST_S
    for tick in range(int(now / 0.2)):
        run.feed(s.Ticked(), m.EngineAttached("a", running={0: 0, 1: 0}, room=2), now=tick * 0.2)
    run.feed(offer("c", "z"), now=now)
    assert placed(run.feed(m.EngineAttached("c", room=1), now=now)) == {3: "c"}


def test_servers_are_spread_over_the_hosts_when_all_are_there() -> None:
    run = Run(workers=2, servers=2, transport="gloo", local_workers=0, takes_hosts=True, strategy="ps:sync:servers=2")
    run.feed(m.EngineAttached("here", room=0, server_room=0))

    def asked(outputs: list[s.Output]) -> dict[int, str]:
        return {c.server: c.host for _, c in sends(outputs) if isinstance(c, m.StartServer)}

    run.feed(offer("a", "x"), offer("b", "y"))
    assert asked(run.feed(m.EngineAttached("a", room=1))) == {}, "else a would have both"
    assert asked(run.feed(m.EngineAttached("b", room=1))) == {0: "a", 1: "b"}
    again = run.restarted(now=2.0)
    assert asked(again.feed(m.EngineAttached("b", room=1), m.EngineAttached("a", room=1), now=2.0)) == {}


def test_what_the_launching_process_starts_by_itself_fills_its_room() -> None:
    run = Run(workers=2, transport="gloo", local_workers=1, takes_hosts=True)
    assert placed(run.feed(m.EngineAttached("here", room=1))) == {}, "its own worker 0 is not running yet"
    run.feed(offer("a", "x", room=1))
    assert placed(run.feed(m.EngineAttached("a", room=1))) == {1: "a"}


def test_the_launching_process_is_never_taken_for_lost() -> None:
    """Somebody has stopped it, with Ctrl-Z; its servers go on, and say so."""
    run = Run(workers=1, servers=2, strategy="ps:sync:servers=2")
    run.feed(m.EngineAttached("here", running={0: 100}, servers={0: 200, 1: 201}))
    for server in (0, 1):
        run.feed(m.ServerReady(server, "here", 200 + server, "tcp://127.0.0.1:1", [4, 4], {}))
    run.arrive(0)
    assert run.state.phase == "training"
    for tick in range(10 * int(LOST_S)):
        run.feed(s.Ticked(), m.ServerBeat(0, 7, 1), m.ServerBeat(1, 7, 1), now=tick * 0.2)
    assert run.state.fleet.there.keys() == {0, 1}
    assert "here" in run.state.hosts


def with_servers() -> Run:
    """Two hosts, each with a worker and a server."""
    run = Run(workers=2, servers=2, transport="gloo", local_workers=0, takes_hosts=True, strategy="ps:sync:servers=2")
    run.feed(m.EngineAttached("here", room=0, server_room=0))
    run.feed(offer("a", "x"), offer("b", "y"), m.EngineAttached("a", room=1), m.EngineAttached("b", room=1))
    for number, host in enumerate("ab"):
        run.feed(m.ServerReady(number, host, 200 + number, "tcp://10.0.0.1:1", [4, 4], {}))
        run.join(number, host=host)
    run.ready(0, 1)
    assert run.state.phase == "training"
    return run


def test_servers_of_a_lost_host_are_given_up_also_by_a_coordinator_that_never_heard_of_it() -> None:
    again = with_servers().restarted(now=2.0)
    outputs: list[s.Output] = []
    for tick in range(10 * int(LOST_S)):
        now = 2.0 + tick * 0.2
        outputs += again.feed(m.EngineAttached("a", running={0: 100}, servers={0: 200}, room=1), now=now)
        outputs += again.feed(m.ServerBeat(0, 8, 1), s.Ticked(), now=now)
    assert again.state.fleet.there.keys() == {0}
    placement = again.state.fleet.placement
    assert placement is not None
    assert set(placement.map.primaries) == {0}


def test_the_servers_of_a_host_that_leaves_hand_over_what_they_have() -> None:
    run = with_servers()
    outputs = run.feed(m.EngineAttached("b", running={1: 101}, servers={1: 201}, room=0, server_room=0))
    assert run.state.fleet.there[1].leaving
    assert {c.server: c.host for _, c in sends(outputs) if isinstance(c, m.StartServer)} == {2: "a"}


def test_a_host_that_had_added_workers_and_is_lost_before_the_start_is_not_waited_for() -> None:
    run = Run(workers=1, transport="gloo", local_workers=0, takes_hosts=True)
    run.feed(offer("a", "x", room=1, grows=True), m.EngineAttached("a", room=1))
    run.feed(offer("b", "y", room=2, grows=True), m.EngineAttached("b", room=2))
    assert run.state.target == 3
    run.feed(m.HostLost("b", "its power has failed"))
    assert run.state.target == run.restarted().state.target == 1
    run.join(0, host="a")
    run.ready(0)
    assert run.members == [0]


def test_a_host_that_declines_is_shown_and_the_run_waits_for_another_one() -> None:
    run = Run(workers=2, transport="gloo", local_workers=1, takes_hosts=True)
    run.feed(m.EngineAttached("here", running={0: 0}, room=1), offer("b", "y"))
    declined = m.HostDeclined("b", "it has no strategy 'vote'", "y")
    outputs = run.feed(declined)
    assert texts(outputs) == (
        "the host b is refused: it has no strategy 'vote'; the run waits for room for 1 more worker"
    )
    assert replies(outputs) == [m.Answer(7, True, "heard")]
    outputs = run.feed(declined)
    assert (texts(outputs), replies(outputs)) == ("", [m.Answer(7, True, "heard")]), "said again, it counts once"
    for one in (run, run.restarted()):
        assert one.state.offers == {}
        assert one.state.phase == "gathering"
    assert replies(run.feed(offer("b", "z"))) == [m.Welcome(7, "b")], "its name is free again"
    assert placed(run.feed(m.EngineAttached("b", room=1))) == {1: "b"}


def test_a_host_that_declines_during_training_changes_nothing() -> None:
    run = trained(spread())
    run.feed(offer("c", "z", grows=True))
    state, outputs = run.state, run.feed(m.HostDeclined("c", "it has no strategy 'vote'", "z"))
    assert texts(outputs) == "the host c is refused: it has no strategy 'vote'"
    assert starts(outputs) == {}
    assert (run.state.target, run.state.generation, run.members) == (3, state.generation, [0, 1, 2])


def test_a_host_that_declines_after_it_has_reported_is_lost() -> None:
    run = trained(spread())
    outputs = run.feed(m.HostDeclined("a", "the process that starts workers ended", "nonce a"))
    assert "the host a is lost: the process that starts workers ended" in texts(outputs)
    assert starts(outputs).keys() == {2}, "b's worker alone"
    assert len(replies(outputs)) == 1


def test_a_worker_started_by_hand_that_cannot_take_part_is_shown() -> None:
    run = trained(spread())
    outputs = run.feed(m.HostDeclined("here", "it has no strategy 'vote'"))
    assert texts(outputs) == "a worker that was started by hand on here is refused: it has no strategy 'vote'"
    assert run.members == [0, 1, 2]
