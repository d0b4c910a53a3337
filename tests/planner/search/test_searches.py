"""Which searches are left out."""

from dataclasses import replace

from support.problems import random_problem

from graphshard.planner.search import searches, solve
from graphshard.progress import TimeLimit


def test_a_wide_search_is_left_out_where_its_narrow_twin_is_behind_or_found_nothing():
    wide, other = searches.WIDE_BEAMS[0], searches.BEAMS[0]
    narrow = replace(wide, width=searches.NARROW)
    assert narrow in searches.FREE
    assert searches.is_hopeless(wide, {other: 1.0, narrow: 1.05})
    assert not searches.is_hopeless(wide, {other: 1.0, narrow: 1.02})
    assert searches.is_hopeless(wide, {other: 1.0})
    assert not searches.is_hopeless(wide, {})


def test_searches_that_are_asked_for_all_run():
    wide = searches.WIDE_BEAMS[0]
    problem = random_problem(900, most=6, num_tasks=6, with_memory=True)
    found = solve._searched(problem, (searches.ALIGNED[0], wide), limit=TimeLimit())
    assert [search for search, _ in found] == [searches.ALIGNED[0], wide]


def test_searches_with_free_buckets_are_left_out_where_the_first_is_far_behind():
    first, second = searches.FREE[:2]
    aligned = searches.ALIGNED[0]
    assert searches.is_hopeless(second, {aligned: 1.0, first: 1.2})
    assert not searches.is_hopeless(second, {aligned: 1.0, first: 1.05})
    assert not searches.is_hopeless(second, {aligned: 1.0})
    assert not searches.is_hopeless(aligned, {first: 1.2, second: 1.0})

