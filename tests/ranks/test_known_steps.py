"""Uncompiled ranks that take known steps do not meet, and an error still reaches each of them when one parts."""

import re
import time
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from graphshard import fully_shard
from graphshard.coordination import Refusals, Steps, known_steps
from graphshard.errors import AgreementError

LIMIT_S = 60.0
"""Time limit of the groups. An error at this limit would say so, and come too late."""

SOON_S = 15.0
"""Within this time, on a busy machine, all ranks have the error."""


class Experts(nn.Module):
    """Units of equal size; the caller says which of them run."""

    def __init__(self, num: int = 3) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4) for _ in range(num))

    def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
        for index in order:
            x = self.experts[index](x)
        return x


def _experts() -> tuple[Experts, str]:
    group = dist.new_group(timeout=timedelta(seconds=LIMIT_S))
    mesh = DeviceMesh.from_group(group, "cpu")
    torch.manual_seed(0)
    model = Experts()
    for expert in model.experts:
        fully_shard(expert, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, group.group_name


@contextmanager
def _counted_meetings() -> Any:
    with patch.object(known_steps, "meet", wraps=known_steps.meet) as meet:
        yield meet


def _train(model: nn.Module, *orders: tuple[int, ...]) -> None:
    for order in orders:
        model(torch.ones(2, 4), order).sum().backward()


def count_meetings() -> list[int]:
    """Those of: first steps, the same again, evaluation, again, micro-batches, again, several forwards, again."""
    model, _ = _experts()
    found = []

    def accumulate() -> None:
        for is_last in (False, False, True):
            model.set_requires_gradient_sync(is_last)
            _train(model, (0, 1, 2))

    def evaluate() -> None:
        with torch.no_grad():
            model(torch.ones(2, 4), (0, 1, 2))
        _train(model, (0, 1, 2))

    def use_twice() -> None:
        (model(torch.ones(2, 4), (0, 1, 0, 2)) + model(torch.ones(2, 4), (2, 1))).sum().backward()

    for step in (lambda: _train(model, (0, 1, 2)), evaluate, accumulate, use_twice):
        with _counted_meetings() as meet:
            for _ in range(3):
                step()
            found.append(meet.call_count)
            for _ in range(2):
                step()
            found.append(meet.call_count - found[-1])
    return found


def test_known_steps_need_no_meeting(run_on_gloo_ranks: Callable[..., list[Any]]) -> None:
    for first, again, evaluated, evaluated_again, *others in run_on_gloo_ranks(2, count_meetings):
        assert first >= 9 and again == 0
        # Whether a forward is followed by a backward or by another forward is not known: one meeting for each.
        assert evaluated > 0 and evaluated_again <= 4
        assert all(count > 0 for count in others[::2]) and all(count <= 6 for count in others[1::2])


def _error_in_time(step: Callable[[], Any]) -> str:
    started = time.monotonic()
    with pytest.raises(AgreementError) as caught:
        step()
    assert time.monotonic() - started < SOON_S
    return str(caught.value)


def part_after_agreed_steps() -> list[tuple[str, str]]:
    """What each rank is told: where it parts, and when it goes on nevertheless."""
    rank = dist.get_rank()
    found = []

    def other_unit(model: nn.Module) -> None:
        _train(model, (0, 1, 2) if rank == 0 else (0, 2, 1))

    def other_backward(model: nn.Module) -> None:
        # Rank 1 begins another forward where the others run a backward.
        model(torch.ones(2, 4), (0, 1, 2)) if rank == 1 else None
        _train(model, (0, 1, 2))

    def more_units(model: nn.Module) -> None:
        _train(model, (0, 1, 2) if rank == 0 else (0, 1, 2, 0))

    for step in (other_unit, other_backward, more_units):
        model, name = _experts()
        for _ in range(3):
            _train(model, (0, 1, 2))
        told = _error_in_time(lambda step=step, model=model: step(model))
        again = _error_in_time(lambda model=model: [_train(model, (0, 1, 2)) for _ in range(4)])
        assert Steps.of_group(name).position > 9
        found.append((told, again))
    return found


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_ranks_that_part_after_agreed_steps(
    run_on_gloo_ranks: Callable[..., list[Any]], num_ranks: int
) -> None:
    for rank, (unit, backward, more) in enumerate(run_on_gloo_ranks(num_ranks, part_after_agreed_steps)):
        assert re.search(r"rank [12] is about to gather unit experts\.2", unit[0]), unit[0]
        assert "is about to reduce" in unit[0], unit[0]
        assert "gather unit experts" in backward[0] and "rank 1 is about to" in backward[0], backward[0]
        assert "gather unit experts.0" in more[0], more[0]
        if rank == 0:
            assert "has left a collective open" in unit[0] + unit[1]
        for told, again in (unit, backward, more):
            assert "as one unit" in told or "on some ranks need" in told, told
            assert "the process group cannot be used any more" in again, again


def forget_on_one_rank() -> list[int]:
    """Rank 1 knows no step any more, and asks for a meeting before each; the gradients stay right."""
    model, name = _experts()
    counts = []
    for step in range(5):
        if step == 3 and dist.get_rank() == 1:
            Steps.of_group(name)._next.clear()
        with _counted_meetings() as meet:
            _train(model, (0, 1))
        counts.append(meet.call_count)
    expected = torch.full((4, 4), 5.0)
    weight = (
        torch.ones(2, 4) @ model.experts[0].weight.full_tensor().t() + model.experts[0].bias.full_tensor()
    )
    torch.testing.assert_close(
        model.experts[1].weight.grad.full_tensor(), expected[:, :1] * weight.sum(0).expand(4, 4)
    )
    return counts


def test_a_rank_that_knows_a_step_joins_the_meeting_of_one_that_does_not(
    run_on_gloo_ranks: Callable[..., list[Any]],
) -> None:
    first, second = run_on_gloo_ranks(2, forget_on_one_rank)
    assert first[2] == second[2] == 0
    assert first[3] == second[3] > 0


def stop_while_another_takes_known_steps(compiles: bool) -> str:
    """Rank 0 refuses something, or waits for all ranks to compile."""
    group = dist.new_group(timeout=timedelta(seconds=LIMIT_S))
    model = fully_shard(nn.Linear(4, 4), mesh=DeviceMesh.from_group(group, "cpu"))

    def step() -> None:
        model(torch.ones(2, 4)).sum().backward()

    for _ in range(3):
        step()
    if dist.get_rank() == 1:
        return _error_in_time(step)
    if compiles:
        with pytest.raises(Exception, match="rank 0 waits for all ranks to compile"):
            torch.compile(model, backend="graphshard")(torch.ones(2, 4))
    else:
        Refusals.of_group(group.group_name).refuse(0, "rank 0 could not go on")
    return ""


def test_a_refusal_reaches_a_rank_in_a_known_step(run_on_gloo_ranks: Callable[..., list[Any]]) -> None:
    _, message = run_on_gloo_ranks(2, stop_while_another_takes_known_steps, False)
    assert "rank 0 could not go on" in message


@pytest.mark.slow
def test_a_rank_that_compiles_and_one_in_a_known_step(run_on_gloo_ranks: Callable[..., list[Any]]) -> None:
    _, message = run_on_gloo_ranks(2, stop_while_another_takes_known_steps, True)
    assert "rank 0 waits for all ranks to compile graph" in message and "rank 1 is about to gather" in message
