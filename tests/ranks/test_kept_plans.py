"""A plan of an earlier process: used by all ranks or by none, and by none once anything has changed."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from support.implementations import compile_if_asked
from support.parity import start_lockstep
from support.toy_models import WORKLOADS
from torch._functorch import config as functorch_config

from graphshard.passes import plan_collectives

CARD = "cpu-ethernet-1g"


def train(folder: str, plans: str, **options: Any) -> int:
    """A step of a new model, whose code is not kept; returns how many graphs this rank has planned itself."""
    torch._dynamo.reset()  # as in a new process, nothing is compiled
    planned = []
    real = plan_collectives.plan_graph

    def plan_graph(*arguments: Any, **named: Any) -> Any:
        planned.append(named["known"] is None)
        return real(*arguments, **named)

    with (
        mock.patch.dict(os.environ, {"GRAPHSHARD_CACHE": f"{folder}/{plans}"}),
        functorch_config.patch(enable_autograd_cache=False),
        mock.patch.object(plan_collectives, "plan_graph", plan_graph),
    ):
        lockstep = start_lockstep(WORKLOADS["mlp_7_15_3"], "sharded")
        lockstep.forward = compile_if_asked("compiled", lockstep.model, hardware=CARD, verify="full", **options)
        lockstep.train(1)
    return sum(planned)


def start_again(folder: str) -> list[int]:
    """Trainings one after the other, as in processes that start again; each rank has a cache of its own."""
    rank = dist.get_rank()
    return [
        train(folder, f"rank{rank}"),
        train(folder, f"rank{rank}"),  # rank 0 has plans, the other has none
        train(folder, f"rank{1 - rank}"),  # the other way round: rank 0 plans anew
        train(folder, f"rank{rank}", move_compute=False),  # another option
    ]


def test_a_kept_plan_is_used_by_all_ranks_or_by_none(
    run_on_gloo_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    first, second = run_on_gloo_ranks(2, start_again, str(tmp_path))
    assert first[0] > 0 and first[1] == 0 and first[2] == first[0] and first[3] == first[0]
    assert second == [0, 0, 0, 0]
