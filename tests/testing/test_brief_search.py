"""A brief search looks at few states, and ends with the best schedule of the beams."""

from dataclasses import replace

import pytest
from support import brief_search as module
from support import thorough
from support.brief_search import STATES, brief_search, briefly
from support.problems import random_problem

from graphshard.planner.search import EXACT_STATES, Effort, leanest_schedule, plan, simulate


def test_few_states_are_looked_at():
    with brief_search():
        assert Effort().states(EXACT_STATES) == STATES
        assert Effort(exact_states=10).states(EXACT_STATES) == 10
    assert Effort().states(EXACT_STATES) == EXACT_STATES


@pytest.mark.parametrize("is_thorough", [True, False])
def test_thorough_runs_search_in_full(is_thorough, monkeypatch):
    monkeypatch.setattr(thorough, "_run", {"is_thorough": is_thorough})
    with briefly():
        assert Effort().states(EXACT_STATES) == (EXACT_STATES if is_thorough else STATES)


def test_plans_are_those_of_the_beams_and_no_better(monkeypatch):
    monkeypatch.setattr(module, "STATES", 1)
    problem = random_problem(23, most=8, num_tasks=6, is_tight=True)
    with brief_search():
        brief = plan(problem)
    full = plan(problem)
    assert (brief.solver, full.solver) == ("beam", "exact")
    assert full.bounds == brief.bounds and full.seconds <= brief.seconds


def test_the_least_memory_is_that_of_the_beams(monkeypatch):
    """It may not be the least, and says so."""
    monkeypatch.setattr(module, "STATES", 1)
    problem = random_problem(23, most=8, num_tasks=6, is_tight=True)
    with brief_search():
        brief, is_least = leanest_schedule(problem)
    full, is_surely_least = leanest_schedule(problem)
    peaks = [simulate(replace(problem, budget_bytes=None), steps).peak_bytes for steps in (brief, full)]
    assert (is_least, is_surely_least) == (False, True) and peaks[1] <= peaks[0]
