"""Ranks that would issue different collectives get an error on every rank, within the time limit."""

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.distributed.device_mesh import DeviceMesh

from graphshard import fully_shard
from graphshard.errors import AgreementError

#: For ranks that all come, however slowly; and for one that never does.
COME_S, MISSING_S = 120.0, 3.0


def _mesh(limit_s: float = COME_S) -> DeviceMesh:
    group = dist.new_group(timeout=timedelta(seconds=limit_s))
    return DeviceMesh.from_group(group, "cpu")


def _error_of_compiling(model: nn.Module) -> str:
    try:
        torch.compile(model, backend="graphshard")(torch.ones(2, 4))
    except BackendCompilerFailed as error:
        assert isinstance(error.inner_exception, AgreementError)
        return str(error.inner_exception)
    return ""


def _different_widths() -> str:
    mesh = _mesh()
    width = 4 if dist.get_rank() == 0 else 6
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, width))
    fully_shard(model[0], mesh=mesh)
    return _error_of_compiling(fully_shard(model, mesh=mesh))


def test_different_models_raise_on_every_rank(run_on_gloo_ranks: Callable[..., list[Any]]) -> None:
    messages = run_on_gloo_ranks(2, _different_widths)
    assert len(set(messages)) == 1
    assert "the first difference is collective 1" in messages[0]
    assert "rank 0 (graph 0 (forward)) has all_gather_into_tensor(f32[10]) over shard" in messages[0]
    assert "rank 1 (graph 0 (forward)) has all_gather_into_tensor(f32[15]) over shard" in messages[0]


def _only_rank_zero_compiles() -> str:
    model = fully_shard(nn.Linear(4, 4), mesh=_mesh(MISSING_S))
    return _error_of_compiling(model) if dist.get_rank() == 0 else "not compiled"


def test_a_rank_that_compiles_nothing_is_named(run_on_gloo_ranks: Callable[..., list[Any]]) -> None:
    message, other = run_on_gloo_ranks(2, _only_rank_zero_compiles)
    assert other == "not compiled"
    assert "rank(s) [1] did not compile a graph with new collectives within 3 s" in message


def _verify_off() -> int:
    mesh = _mesh()
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    torch.compile(model, backend="graphshard", options={"verify": "off"})(torch.ones(2, 4))
    store = dist.distributed_c10d._world.pg_map[mesh.get_group()][1]
    return int(store.add(f"graphshard/{mesh.get_group().group_name}/0/count/{dist.get_rank()}", 0))


def test_verify_off_exchanges_nothing(run_on_gloo_ranks: Callable[..., list[Any]]) -> None:
    assert run_on_gloo_ranks(2, _verify_off) == [0, 0]


def _one_compiles_and_one_gathers() -> tuple[str, float]:
    mesh = _mesh()
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    other = fully_shard(nn.Linear(4, 4), mesh=mesh)
    started = time.monotonic()
    if dist.get_rank() == 0:
        return _error_of_compiling(model), time.monotonic() - started
    with pytest.raises(AgreementError) as caught:
        other(torch.ones(2, 4))
    return str(caught.value), time.monotonic() - started


def test_a_rank_that_compiles_and_one_that_gathers_stop_in_seconds(
    run_on_gloo_ranks: Callable[..., list[Any]],
) -> None:
    for message, seconds in run_on_gloo_ranks(2, _one_compiles_and_one_gathers):
        assert (
            "rank 0 waits for all ranks to compile graph 0 (forward), but rank 1 is about to gather"
            in message
        )
        assert seconds < COME_S / 3
