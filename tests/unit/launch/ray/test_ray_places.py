"""Which nodes of a Ray cluster get how many workers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from distbelief.launch.ray.rules.places import Need, Node, Place, place, room, shortage


def node(name: str, cpus: float, free: float | None = None, **more: object) -> Node:
    return Node(name, name, cpus, cpus if free is None else free, **more)


def chosen(places: list[Place]) -> dict[str, int]:
    return {one.node: one.workers for one in places}


def test_the_smallest_node_that_takes_all_is_chosen() -> None:
    assert chosen(place([node("a", 8), node("b", 4), node("c", 2)], Need(), 3)) == {"b": 3}


def test_else_the_largest_first_so_that_few_nodes_are_used() -> None:
    assert chosen(place([node("a", 2), node("b", 4), node("c", 3)], Need(), 6)) == {"b": 4, "a": 2}


def test_what_others_have_taken_is_not_counted() -> None:
    assert chosen(place([node("a", 8, free=1), node("b", 4, free=0)], Need(), 3)) == {"a": 1}


def test_threads_are_cpus_and_parts_of_a_worker_are_nothing() -> None:
    assert chosen(place([node("a", 5), node("b", 3)], Need(cpus=2), 9)) == {"a": 2, "b": 1}


def test_gpus_count_as_much_as_cpus() -> None:
    nodes = [node("a", 8, gpus=2.0, free_gpus=1.0), node("b", 8), node("c", 1, gpus=4.0, free_gpus=4.0)]
    assert chosen(place(nodes, Need(1, 1), 4)) == {"a": 1, "c": 1}
    assert Need(2, 1).bundle(2) == {"CPU": 4.0, "GPU": 2.0}


def test_a_node_with_an_agent_comes_last_although_it_is_larger() -> None:
    nodes = [node("a", 8, free=6, is_ours=True), node("b", 1)]
    assert chosen(place(nodes, Need(), 3)) == {"b": 1, "a": 2}


def test_a_shortage_says_what_there_is_and_what_is_wanted() -> None:
    assert shortage([node("a", 4, free=0)], Need(), 4) == "", "others will end some day"
    assert shortage([node("a", 1)], Need(), 2) == "the Ray cluster has 1 CPU on 1 node; 2 workers want 2"
    text = shortage([node("a", 4, gpus=1.0), node("b", 4)], Need(1, 1), 2)
    assert text == (
        "the Ray cluster has 8 CPUs and 1 GPU on 2 nodes, with room for 1 worker of 1 CPU and 1 GPU each; 2 are wanted"
    )


nodes = st.lists(
    st.builds(
        Node,
        id=st.uuids().map(str),
        name=st.just("n"),
        cpus=st.integers(0, 9).map(float),
        free_cpus=st.floats(0, 9),
        gpus=st.integers(0, 3).map(float),
        free_gpus=st.integers(0, 3).map(float),
        is_ours=st.booleans(),
    ),
    max_size=6,
)


@given(nodes, st.builds(Need, cpus=st.integers(1, 3), gpus=st.integers(0, 2)), st.integers(0, 30))
def test_nobody_gets_more_than_it_has_and_all_room_is_used(nodes: list[Node], need: Need, wanted: int) -> None:
    places = place(nodes, need, wanted)
    by_id = {one.id: one for one in nodes}
    assert len({one.node for one in places}) == len(places), "one agent on each"
    assert all(0 < one.workers <= by_id[one.node].room(need) for one in places)
    assert sum(one.workers for one in places) == min(wanted, room(nodes, need))
