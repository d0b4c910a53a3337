"""One rank plans, the others follow, over stores."""

import json
import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from graphshard.coordination.refusals import Refusals
from graphshard.coordination.shared_plan import Decision, PlanStore, decide_together
from graphshard.errors import AgreementError, OptionError, RefusedError
from graphshard.pipeline.known_plan import KnownPlan

PLAN, OTHER = {"steps": [1, 2]}, {"steps": [3]}


def _decision(stores, made=PLAN):
    """What one rank follows, and whether it made that itself."""

    def decide(plan):
        return Decision(plan=plan or made, result=(plan or made, plan is None))

    return decide_together(stores, "key", decide, what="a graph")


def test_a_known_plan_survives_json():
    moves = ((2, "aten.mm.default", 5, (0, 3)),)
    plan = KnownPlan(
        num_tasks=3, steps=((0, True, (0, 1)), (2, False, (0, 1))), splits=((1, 4),), moves=moves
    )
    assert KnownPlan.from_dict(json.loads(json.dumps(plan.to_dict()))) == plan


def test_without_others_each_rank_makes_its_own():
    assert _decision([]) == (PLAN, True)


def _stores(store, *ranks, seconds=5.0):
    board = dist.PrefixStore("refusals", store)
    return [
        PlanStore(store=store, rank=rank, timeout_seconds=seconds, refusals=Refusals(store=board, rank=rank))
        for rank in ranks
    ]


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


@pytest.mark.parametrize("is_late", [False, True])
def test_a_refusal_reaches_who_waits_for_a_plan(is_late):
    first, second = _stores(dist.HashStore(), 0, 1, seconds=30.0)
    timer = threading.Timer(0.2 if is_late else 0.0, first.refusals.refuse, (0, "the budget is too small"))
    timer.start()
    if not is_late:
        timer.join()
    with pytest.raises(RefusedError, match=r"^the budget is too small$"):
        second.read("key", what="a graph")
    timer.join()


def test_a_refusal_comes_before_a_plan_that_was_made_after_it():
    """Rank 0 has refused, and has planned for a smaller batch, before another rank asks for the first plan."""
    first, second = _stores(dist.HashStore(), 0, 1)
    first.refusals.refuse(0, "the budget is too small")
    assert _decision([first]) == (PLAN, True)
    with pytest.raises(RefusedError, match="the budget is too small"):
        second.read("key", what="a graph")
    second.refusals.leave(0)
    assert _decision([second], OTHER) == (PLAN, False)


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
def test_a_failed_decision_leaves_nothing_behind(kind):
    first, second = _stores(dist.HashStore(), 0, 1)

    def fail(plan):
        raise kind("the budget is too small")

    with pytest.raises(kind, match="the budget is too small"):
        decide_together([first], "key", fail, what="a graph")
    assert _decision([first]) == (PLAN, True)
    assert _decision([second], OTHER) == (PLAN, False)
