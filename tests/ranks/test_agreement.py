"""Ranks that would issue different collectives get an error on every rank, within the time limit."""

import re
import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor.exc import InductorError
from torch.distributed.device_mesh import DeviceMesh

from graphshard import fully_shard
from graphshard.backend import compilation
from graphshard.coordination import refusals
from graphshard.errors import AgreementError

#: For ranks that all come, however slowly; and for one that never does.
COME_S, MISSING_S = 120.0, 3.0


def _mesh(limit_s: float = COME_S) -> DeviceMesh:
    group = dist.new_group(timeout=timedelta(seconds=limit_s))
    return DeviceMesh.from_group(group, "cpu")


def _error_of_compiling(model: nn.Module, **options: Any) -> str:
    try:
        torch.compile(model, backend="graphshard", options=options)(torch.ones(2, 4))
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


def _one_compiles_and_one_gathers(compiles: int, **options: Any) -> tuple[str, float]:
    mesh = _mesh()
    model = fully_shard(nn.Linear(4, 4), mesh=mesh)
    other = fully_shard(nn.Linear(4, 4), mesh=mesh)
    started = time.monotonic()
    if dist.get_rank() == compiles:
        return _error_of_compiling(model, **options), time.monotonic() - started
    with pytest.raises(AgreementError) as caught:
        other(torch.ones(2, 4))
    return str(caught.value), time.monotonic() - started


def test_a_rank_that_compiles_and_one_that_gathers_stop_in_seconds(
    run_on_gloo_ranks: Callable[..., list[Any]],
) -> None:
    for message, seconds in run_on_gloo_ranks(2, _one_compiles_and_one_gathers, 0):
        assert (
            "rank 0 waits for all ranks to compile graph 0 (forward), but rank 1 is about to gather"
            in message
        )
        assert seconds < COME_S / 3


def _one_asks_for_a_card(compiles: int) -> tuple[str, float]:
    with mock.patch.object(refusals, "_CROSSED_SECONDS", 0.5):
        return _one_compiles_and_one_gathers(compiles, hardware="auto")


@pytest.mark.parametrize("compiles", [0, 1])
def test_so_do_they_where_the_machine_is_not_measured_yet(
    run_on_gloo_ranks: Callable[..., list[Any]], compiles: int
) -> None:
    """Rank 0 waits for the names of the hosts, and any other for what rank 0 decides."""
    for message, seconds in run_on_gloo_ranks(2, _one_asks_for_a_card, compiles):
        assert f"rank {compiles} waits for all ranks to compile graph 0, but rank" in message
        assert seconds < COME_S / 3


def _rank_one_fails(how: str, folder: str) -> tuple[str, float]:
    """The error of this rank, and after how many seconds it came."""
    model = fully_shard(nn.Linear(4, 4), mesh=_mesh())
    options: dict[str, Any] = {}
    if dist.get_rank() == 1 and how == "dump":
        Path(folder, "file").touch()
        options["dump"] = f"{folder}/file"
    if dist.get_rank() == 1 and how == "card":
        options["hardware"] = f"{folder}/card.json"

    def no_compiler(*_: Any, **__: Any) -> None:
        raise InductorError(RuntimeError("no C++ compiler"), None)

    is_broken = dist.get_rank() == 1 and how == "Inductor"
    broken = mock.patch.object(compilation, "compile_fx_inner", no_compiler) if is_broken else nullcontext()
    started = time.monotonic()
    with broken, pytest.raises((BackendCompilerFailed, AgreementError)) as caught:
        torch.compile(model, backend="graphshard", options=options)(torch.ones(2, 4))
    return str(caught.value), time.monotonic() - started


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("Inductor", r"rank 1 could not compile graph 0 \(forward\): RuntimeError: no C\+\+ compiler"),
        ("dump", "rank 1 could not begin to compile a graph: .*cannot be made"),
        ("card", "rank 1 could not read the options of the backend: no hardware card"),
    ],
    ids=["Inductor", "dump", "card"],
)
def test_what_fails_on_one_rank_reaches_the_others_in_seconds(
    run_on_gloo_ranks: Callable[..., list[Any]], tmp_path: Path, how: str, told: str
) -> None:
    (other, seconds), (own, _) = run_on_gloo_ranks(2, _rank_one_fails, how, str(tmp_path))
    assert re.search(told, other), other
    assert "rank 1 could not" not in own
    assert seconds < COME_S / 3
