"""The pool of ranks: results, failures, deaths and hangs, and that the next call is not affected."""

import os
import threading

import pytest
import torch
import torch.distributed as dist
from support.gloo_pool import MAX_GROUPS, RankError


def sum_of_ranks() -> tuple[int, float, int]:
    total = torch.tensor(float(dist.get_rank()))
    dist.all_reduce(total)
    return dist.get_rank(), total.item(), os.getpid()


def fail_on_rank(failing_rank: int) -> None:
    if dist.get_rank() == failing_rank:
        raise LookupError("no such shard")


def exit_on_rank(failing_rank: int) -> None:
    if dist.get_rank() == failing_rank:
        os._exit(7)


def hang_on_rank(hanging_rank: int) -> None:
    if dist.get_rank() == hanging_rank:
        threading.Event().wait()


def leave_collective_unwaited() -> None:
    torch.ops._c10d_functional.all_reduce(torch.ones(2), "sum", "0")


def random_number() -> float:
    return torch.rand(()).item()


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_results_come_in_rank_order(run_on_gloo_ranks, world_size):
    results = run_on_gloo_ranks(world_size, sum_of_ranks)
    assert [rank for rank, _, _ in results] == list(range(world_size))
    assert {total for _, total, _ in results} == {sum(range(world_size))}


def test_processes_and_seeds_are_the_same_in_every_call(run_on_gloo_ranks):
    first, second = (run_on_gloo_ranks(2, sum_of_ranks) for _ in range(2))
    assert [pid for _, _, pid in first] == [pid for _, _, pid in second]
    assert run_on_gloo_ranks(2, random_number) == run_on_gloo_ranks(2, random_number)


def make_groups(count: int) -> int:
    for _ in range(count):
        dist.new_group()
    return os.getpid()


def test_ranks_with_many_process_groups_are_replaced(run_on_gloo_ranks):
    first = run_on_gloo_ranks(2, make_groups, 1)
    assert run_on_gloo_ranks(2, make_groups, MAX_GROUPS) == first
    assert run_on_gloo_ranks(2, make_groups, 1) != first


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_exception_on_one_rank_is_raised_with_its_traceback(run_on_gloo_ranks, failing_rank):
    report = rf"(?s)rank {failing_rank} ---.*in fail_on_rank.*LookupError: no such shard"
    with pytest.raises(RankError, match=report):
        run_on_gloo_ranks(2, fail_on_rank, failing_rank)
    assert len(run_on_gloo_ranks(2, sum_of_ranks)) == 2


def test_death_of_a_rank_is_reported(run_on_gloo_ranks):
    with pytest.raises(RankError, match="rank 1 ---\nprocess died with exit code 7"):
        run_on_gloo_ranks(2, exit_on_rank, 1)
    assert len(run_on_gloo_ranks(2, sum_of_ranks)) == 2


def test_hang_is_ended_with_a_stack_of_the_hung_rank(run_on_gloo_ranks):
    with pytest.raises(RankError, match=r"(?s)rank 1 ---\nno answer.*in hang_on_rank"):
        run_on_gloo_ranks(2, hang_on_rank, 1, timeout_s=1)
    assert len(run_on_gloo_ranks(2, sum_of_ranks)) == 2


def test_unwaited_collective_is_an_error(run_on_gloo_ranks):
    with pytest.raises(RankError, match="1 collectives started and never waited"):
        run_on_gloo_ranks(2, leave_collective_unwaited)


def test_nested_function_is_refused(run_on_gloo_ranks):
    with pytest.raises(ValueError, match="define it at module level"):
        run_on_gloo_ranks(2, lambda: None)
