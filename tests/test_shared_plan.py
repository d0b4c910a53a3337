"""One rank plans, the others follow, over stores."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from graphshard.context import KnownPlan
from graphshard.errors import AgreementError, OptionError
from graphshard.shared_plan import PlanStore, read_plan

PLAN = KnownPlan(num_tasks=3, steps=((0, True, (0, 1)), (2, False, (0, 1))))
OTHER = KnownPlan(num_tasks=4, steps=((0, True, (0,)), (1, False, (0,))))


def _stores(store, *ranks, seconds=5.0):
    return [PlanStore(store=store, rank=rank, timeout_seconds=seconds) for rank in ranks]


def test_rank_0_makes_the_plan_and_the_others_read_it():
    first, second = _stores(dist.HashStore(), 0, 1)
    assert read_plan([first], "key", what="a graph") is None
    first.write("key", PLAN)
    assert read_plan([second], "key", what="a graph") == PLAN


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
    assert read_plan([second], "key", what="a graph") == PLAN
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
        known = read_plan([rows, columns], "key", what="a graph")
        found[rank] = known or PLAN
        for store in (rows, columns):
            store.write("key", found[rank])
        assert (known is None) == (rank == 0)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in (3, 2, 1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    assert found == dict.fromkeys(range(4), PLAN)
