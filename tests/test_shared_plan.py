"""One rank plans, the others follow, over stores."""

import json
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from graphshard.context import KnownPlan
from graphshard.errors import AgreementError, OptionError
from graphshard.shared_plan import PlanStore, decide_together

PLAN, OTHER = {"steps": [1, 2]}, {"steps": [3]}


def _decision(stores, made=PLAN):
    """What one rank follows, and whether it made that itself."""
    found = []

    def decide(plan):
        found.append((plan or made, plan is None))
        return found[0][0]

    decide_together(stores, "key", decide, what="a graph")
    return found[0]


def test_a_known_plan_survives_json():
    plan = KnownPlan(num_tasks=3, steps=((0, True, (0, 1)), (2, False, (0, 1))), splits=((1, 4),))
    assert KnownPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_without_others_each_rank_makes_its_own():
    assert _decision([]) == (PLAN, True)


def _stores(store, *ranks, seconds=5.0):
    return [PlanStore(store=store, rank=rank, timeout_seconds=seconds) for rank in ranks]


def test_rank_0_makes_the_plan_and_the_others_read_it():
    first, second = _stores(dist.HashStore(), 0, 1)
    assert _decision([first]) == (PLAN, True)
    assert _decision([second], OTHER) == (PLAN, False)
    assert _decision([first], OTHER) == (PLAN, False)


def test_the_plan_that_is_there_stays():
    """A rank that compiles alone later, rank 0 too, finds the plan that all have."""
    first, second = _stores(dist.HashStore(), 0, 1)
    first.write("key", PLAN)
    first.write("key", OTHER)
    assert first.read("key", what="a graph") == second.read("key", what="a graph") == PLAN
    assert first.read("another key", what="a graph") is None


def test_others_wait_for_rank_0():
    first, second = _stores(dist.HashStore(), 0, 1)
    timer = threading.Timer(0.3, first.write, ("key", PLAN))
    timer.start()
    assert _decision([second]) == (PLAN, False)
    timer.join()


def test_only_rank_0_writes():
    store = dist.HashStore()
    first, second = _stores(store, 0, 1)
    second.write("key", OTHER)
    assert first.read("key", what="a graph") is None


def test_why_rank_0_has_no_plan_reaches_all():
    first, second = _stores(dist.HashStore(), 0, 1)
    first.write("key", OptionError("the budget is too small"))
    with pytest.raises(AgreementError, match="rank 0 could not plan a graph: the budget is too small"):
        second.read("key", what="a graph")


def test_waiting_has_a_limit():
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=5))
    (second,) = _stores(store, 1, seconds=0.2)
    with pytest.raises(AgreementError, match="rank 0 has no plan of a graph after 0 s"):
        second.read("key", what="a graph")


def test_one_plan_reaches_all_ranks_of_a_mesh():
    """2 x 2 ranks: rank 3 shares no group with rank 0."""
    shard = [dist.HashStore(), dist.HashStore()]
    replicate = [dist.HashStore(), dist.HashStore()]
    found = {}

    def run(rank):
        row, column = divmod(rank, 2)
        (rows,), (columns,) = _stores(shard[row], column), _stores(replicate[column], row)
        found[rank] = _decision([rows, columns], {"steps": [rank]})

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (3, 2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert found == {rank: ({"steps": [0]}, rank == 0) for rank in range(4)}


@pytest.mark.parametrize("kind", [OptionError, AssertionError])
def test_a_failed_decision_is_told_to_the_others_and_raised(kind):
    first, second = _stores(dist.HashStore(), 0, 1)

    def fail(plan):
        raise kind("the budget is too small")

    with pytest.raises(kind, match="the budget is too small"):
        decide_together([first], "key", fail, what="a graph")
    with pytest.raises(AgreementError, match="rank 0 could not plan a graph: the budget is too small"):
        _decision([second])
