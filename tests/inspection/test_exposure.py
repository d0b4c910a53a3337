"""Why compute waits for a collective, and what would help, of schedules written by hand."""

import pytest
from support.problems import LinePrices

from graphshard.inspection.events import walk
from graphshard.inspection.exposure import Explainer
from graphshard.planner.search import Collective, Problem, Task
from graphshard.planner.search.machine import Step


@pytest.mark.parametrize(
    ("made_by", "budget", "remedy"),
    [
        ("passes", None, 'plan="auto", which places and merges collectives by cost'),
        ("graph", None, "graphshard.schedule_graph, which places and merges collectives by cost"),
        ("plan", 100, "a larger memory_budget"),
        (
            "plan",
            None,
            "less to send at this point (4 B): smaller dtypes, smaller units, or more tokens per rank",
        ),
    ],
)
def test_who_may_wait_for_what_is_late_is_told_what_is_possible(made_by, budget, remedy):
    """It ends a second before its reader, give or take 8. A plan without a budget has taken all the room there is."""
    gather = Collective(
        name="g", kind="all_gather", queue="dp", in_bytes=2, out_bytes=4, earliest=0, deadline=1
    )
    problem = Problem(
        tasks=[Task(seconds=4.0), Task(seconds=1.0)],
        collectives=[gather],
        prices=LinePrices(spread=8.0),
        budget_bytes=budget,
    )
    found = walk(problem, [Step(0, True, (0,)), Step(1, False, (0,))])
    [flight] = found.flights
    assert flight.finished <= flight.needed < flight.resumed
    explainer = Explainer(
        problem, found, made_by=made_by, declined={}, unit_of={}, label_of=str, where="before task {}".format
    )
    why = explainer.explain(flight)
    assert why.cause == "spread" and why.reason.startswith(
        "on average it ends 1 s before its result is needed"
    )
    assert why.remedy == remedy
