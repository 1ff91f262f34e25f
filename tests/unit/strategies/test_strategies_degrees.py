"""Degrees: who holds which part of the model, what a run may start with, and what is made of any number of workers."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from distbelief.strategies.rules.degrees import MORE_MEMORY, Degrees, Place, Wish, fit, problem, ranges

degree = st.integers(1, 4)
meshes = st.builds(Degrees, degree, degree, degree, degree)
wishes = st.builds(
    Wish,
    data=st.none() | st.integers(1, 5),
    sharded=st.just(1) | st.integers(1, 4),
    tensor=st.integers(1, 8),
    pipeline=st.integers(1, 6),
) | st.builds(Wish, data=st.just(1), sharded=st.none())


@given(meshes)
def test_ranks_go_row_by_row_over_pipeline_data_sharded_and_tensor(degrees: Degrees) -> None:
    sizes = (degrees.pipeline, degrees.data, degrees.sharded, degrees.tensor)
    places = [Place(*indices) for indices in itertools.product(*map(range, sizes))]
    assert [degrees.place(rank) for rank in range(degrees.size)] == places
    assert [degrees.rank(place) for place in places] == list(range(degrees.size))
    assert Degrees(*degrees.as_list()) == degrees


@given(meshes, st.sets(st.sampled_from(["pipeline", "data", "sharded", "tensor"])))
def test_groups_are_the_ranks_that_differ_in_the_named_dimensions_only(degrees: Degrees, named: set[str]) -> None:
    groups = degrees.groups(*named)
    assert sorted(rank for group in groups for rank in group) == list(range(degrees.size))
    size = 1
    for dimension in named:
        size *= getattr(degrees, dimension)
    others = {"pipeline", "data", "sharded", "tensor"} - named
    for group in groups:
        assert len(group) == size
        assert list(group) == sorted(group)
        assert len({tuple(getattr(degrees.place(rank), name) for name in sorted(others)) for rank in group}) == 1


def test_what_is_no_rank_and_no_dimension_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no rank 4 in dp2\.pp2"):
        Degrees(2, 2).place(4)
    with pytest.raises(ValueError, match="stages: a dimension is one of pipeline, data"):
        Degrees(2, 2).groups("stages")


@given(meshes, st.integers(1, 40))
def test_members_of_one_data_index_share_their_shards_and_all_shards_are_somebodys(
    degrees: Degrees, shards: int
) -> None:
    if degrees.rows > shards:
        with pytest.raises(ValueError, match="too few"):
            ranges(degrees, shards)
        return
    of_ranks = ranges(degrees, shards)
    rows = {}
    for rank, mine in enumerate(of_ranks):
        place = degrees.place(rank)
        assert rows.setdefault(place.data * degrees.sharded + place.sharded, mine) == mine
    cuts = [rows[row] for row in range(degrees.rows)]
    assert [shard for first, end in cuts for shard in range(first, end)] == list(range(shards))
    sizes = [end - first for first, end in cuts]
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) > 0


# --- the start -------------------------------------------------------------------------------------------------------

PIPELINE, TENSOR, SHARDED = Wish(None, 1, pipeline=2), Wish(None, 1, tensor=4), Wish(1, None)


@pytest.mark.parametrize(
    ("wish", "workers", "shards", "text"),
    [
        (PIPELINE, 3, 8, "pipeline:2 takes a multiple of 2 workers, not 3: use --workers 2 or 4, or pipeline:3"),
        (PIPELINE, 1, 8, "pipeline:2 takes at least 2 workers, not 1: use --workers 2"),
        (Wish(None, 1, pipeline=4), 3, 8, "pipeline:4 takes at least 4 workers, not 3: use --workers 4, or pipeline:3"),
        (TENSOR, 6, 8, "tensor:4 takes a multiple of 4 workers, not 6: use --workers 4 or 8, or tensor:2"),
        (TENSOR, 7, 8, "tensor:4 takes a multiple of 4 workers, not 7: use --workers 4 or 8"),
        (Wish(None, 1, 2, 2), 6, 8, "tp2.pp2 takes a multiple of 4 workers, not 6: use --workers 4 or 8"),
        (Wish(2, 1, pipeline=2), 3, 8, "dp2.pp2 takes 4 workers, not 3: use --workers 4"),
        (Wish(2, 1, pipeline=2), 2, 8, "dp2.pp2 takes 4 workers, not 2: use --workers 4, or dp1.pp2"),
        (Wish(2, 2), 8, 8, "dp2.fsdp2 takes 4 workers, not 8: use --workers 4, or dp4.fsdp2"),
        (Wish(1, 1, pipeline=2), 4, 8, "dp1.pp2 takes 2 workers, not 4: use --workers 2"),
        (PIPELINE, 8, 3, "pipeline:2 on 8 workers divides the data 4 ways, but a step has 3 shards: "
         "use --workers 6, or shards=4 in the job"),
        (SHARDED, 8, 1, "sharded on 8 workers divides the data 8 ways, but a step has 1 shard: "
         "use --workers 1, or shards=8 in the job"),
        (Wish(2, 2), 4, 3, "dp2.fsdp2 on 4 workers divides the data 4 ways, but a step has 3 shards: "
         "use fewer groups, or shards=4 in the job"),
    ],
)  # fmt: skip
def test_what_cannot_start_says_what_could(wish: Wish, workers: int, shards: int, text: str) -> None:
    assert problem(wish, workers, shards) == text


@given(wishes, st.integers(1, 60), st.integers(1, 40))
def test_what_can_start_is_exactly_what_fits_with_every_degree_as_wished(wish: Wish, workers: int, shards: int) -> None:
    degrees = fit(wish, workers, shards)
    met = (
        degrees.size == workers
        and (degrees.pipeline, degrees.tensor) == (wish.pipeline, wish.tensor)
        and degrees.sharded == (wish.sharded or degrees.sharded)
        and degrees.data == (wish.data or degrees.data)
    )
    assert (problem(wish, workers, shards) == "") == met


@pytest.mark.parametrize("wish", [PIPELINE, TENSOR, SHARDED, Wish(2, 2)])
def test_as_long_as_the_shards_are_not_known_nothing_is_said_of_them(wish: Wish) -> None:
    assert problem(wish, 4, None) == ""


# --- later on --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wish", "workers", "found"),
    [
        (Wish(None, 1, pipeline=4), 4, "pp4"),
        (Wish(None, 1, pipeline=4), 3, "pp3"),
        (Wish(None, 1, pipeline=4), 1, "dp1"),
        (Wish(None, 1, pipeline=4), 5, "pp4"),
        (Wish(None, 1, pipeline=4), 7, "dp2.pp3"),
        (Wish(None, 1, pipeline=4), 8, "dp2.pp4"),
        (PIPELINE, 3, "pp2"),  # with a spare: the whole model may not fit on one worker
        (TENSOR, 3, "tp2"),
        (TENSOR, 8, "dp2.tp4"),
        (SHARDED, 3, "fsdp3"),
        (Wish(2, 1, pipeline=2), 3, "pp2"),
        (Wish(2, 1, pipeline=2), 9, "dp2.pp2"),
        (Wish(2, 1, tensor=2), 3, "tp2"),
        (Wish(None, 1, 2, 2), 3, "pp2"),
        (Wish(2, 1, 2, 2), 7, "tp2.pp2"),
        (Wish(2, 1, 2, 2), 3, "pp2"),
        (Wish(2, 2), 3, "fsdp2"),
        (Wish(2, 3), 5, "fsdp3"),
    ],
)
def test_what_is_made_of_the_workers_that_are_there(wish: Wish, workers: int, found: str) -> None:
    assert str(fit(wish, workers, shards=16)) == found


@given(wishes, st.integers(1, 40), st.integers(1, 40))
def test_whatever_number_of_workers_there_is_the_best_of_all_meshes_is_found(
    wish: Wish, workers: int, shards: int
) -> None:
    def allowed(degrees: Degrees) -> bool:
        return (
            degrees.size <= workers
            and degrees.rows <= shards
            and wish.tensor % degrees.tensor == 0
            and (wish.data is None or degrees.data <= wish.data)
            and (wish.sharded is None or degrees.sharded <= wish.sharded)
        )

    degrees = fit(wish, workers, shards)
    assert allowed(degrees)
    every = [
        Degrees(pipeline, data, sharded, tensor)
        for pipeline in range(1, wish.pipeline + 1)
        for tensor in range(1, wish.tensor + 1)
        if pipeline * tensor <= workers
        for sharded in range(1, min(wish.sharded or shards, workers // (pipeline * tensor)) + 1)
        for data in range(1, workers // (pipeline * tensor * sharded) + 1)
    ]
    every = [one for one in every if allowed(one)]
    most_parts = max(one.parts for one in every)
    assert degrees.parts * MORE_MEMORY >= most_parts, "nobody holds much more than it must"
    assert degrees.size == max(one.size for one in every if one.parts * MORE_MEMORY >= most_parts)
    assert degrees.parts == max(one.parts for one in every if one.size == degrees.size)


@given(wishes, st.integers(1, 40), st.integers(1, 40))
def test_one_more_worker_never_gives_a_smaller_mesh(wish: Wish, workers: int, shards: int) -> None:
    assert fit(wish, workers, shards).size <= fit(wish, workers + 1, shards).size


def test_nothing_can_be_made_of_nobody() -> None:
    with pytest.raises(ValueError, match="0 workers and 4 shards"):
        fit(PIPELINE, 0, 4)
