"""Ranks that come to one card of their machine: one measures for all, or has a card in its cache."""

import copy
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.implementations import compile_if_asked, pick_fully_shard
from support.parity import check_sharded_parity
from support.toy_models import WORKLOADS
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Shard

import graphshard
from graphshard.backend import dynamo_graph
from graphshard.coordination import agreement
from graphshard.cost import ProbeSizes, load_card
from graphshard.cost.cards import MeasuredCollective
from graphshard.errors import AgreementError, GraphShardError
from graphshard.hardware import GroupNeed, MachineNeed, OwnCard, keep_calibrated, kept_cards, own_card

#: By its name: the door gives the function of that name.
MODULE = sys.modules["graphshard.hardware.own_card"]

#: Of a group one of whose ranks does not come any more.
LIMIT_S = 1.0


def quick_sizes(need: MachineNeed, group: Any = None) -> ProbeSizes:
    kinds = ("all_gather",) if group is None else group.kinds
    return ProbeSizes(
        matmul=(64, 128), memory_bytes=(2**16, 2**20), collective_bytes=(2**10, 2**16), num_samples=2,
        sample_seconds=1e-4, dtypes=(torch.float32,), classes=(), kinds=kinds, compiles=False,
    )  # fmt: skip


def another_mesh() -> DeviceMesh:
    """All ranks in a new process group, whose store is empty."""
    return DeviceMesh.from_group(dist.new_group(list(range(dist.get_world_size()))), "cpu")


@contextmanager
def seeing(cards: list[str]) -> Iterator[None]:
    """Inside, each card that the backend comes to is appended."""
    real = dynamo_graph.own_card

    def seen(*arguments: Any, **named: Any) -> Any:
        found = real(*arguments, **named)
        cards.append(repr(found.card))
        return found

    with mock.patch.object(dynamo_graph, "own_card", seen):
        yield


def train(mesh: DeviceMesh, cards: list[str], **options: Any) -> None:
    """One step beside the unsharded model, with the card of the machine; it is appended to ``cards``."""
    torch.manual_seed(42)
    workload, rank = WORKLOADS["mlp_7_15_3"], dist.get_rank()
    reference = workload.build()
    model = copy.deepcopy(reference)
    for module in [*workload.list_units(model), model]:
        pick_fully_shard("sharded")(module, mesh=mesh)
    with seeing(cards):
        forward = compile_if_asked("compiled", model, hardware="auto", **options)
        for other in range(dist.get_world_size()):
            (workload.loss(reference, workload.batch_of(other, 0)) / dist.get_world_size()).backward()
        workload.loss(forward, workload.batch_of(rank, 0)).backward()
    if mesh.ndim == 1:
        check_sharded_parity(reference, model)


def come_to_cards(folder: str) -> tuple[list[int], list[bool]]:
    """How often this rank has measured after each training, and whether all ranks had one card in each."""
    rank = dist.get_rank()
    cards: list[str] = []
    times = []
    measure = mock.Mock(wraps=MODULE.measure_card)
    with (
        mock.patch.dict(os.environ, {"GRAPHSHARD_CACHE": f"{folder}/rank{rank}"}),
        mock.patch.object(MachineNeed, "sizes", quick_sizes),
        mock.patch.object(MODULE, "measure_card", measure),
    ):
        train(another_mesh(), cards)
        times.append(measure.call_count)
        assert len(kept_cards()) == (rank == 0)
        train(another_mesh(), cards)  # rank 0 has a card in its cache, the others have none
        times.append(measure.call_count)
        dist.barrier()
        if rank == 1:
            kept = Path(f"{folder}/rank0/cards")
            shutil.copytree(kept, f"{folder}/rank1/cards")
            shutil.rmtree(kept)
        dist.barrier()
        train(another_mesh(), cards)  # now the other way round
        times.append(measure.call_count)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, cards)
    return times, [len(set(of_one)) == 1 for of_one in zip(*everyone, strict=True)]


def test_one_rank_measures_for_all(run_on_gloo_ranks: Callable[..., list[Any]], tmp_path: Path) -> None:
    for times, are_equal in run_on_gloo_ranks(2, come_to_cards, str(tmp_path)):
        assert times == [1, 1, 2]
        assert are_equal == [True] * 3


def train_beside_tensor_parallelism(cards: list[str]) -> None:
    """One step on a mesh of two axes with the card of the machine, which is appended to ``cards``."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(42)
    model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 4))
    graphshard.parallelize(model, mesh["tp"], {"0.*": Shard(0), "2.weight": Shard(1)})
    graphshard.fully_shard(model, mesh=mesh["dp"])
    with seeing(cards):
        compile_if_asked("compiled", model, hardware="auto")(torch.ones(2, 4)).sum().backward()


def measure_a_mesh(folder: str) -> list[Any]:
    """Hybrid sharding: the card has rows of gathers, of reductions in parts and of sums of replicas."""
    cards: list[str] = []
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    with (
        mock.patch.dict(os.environ, {"GRAPHSHARD_CACHE": f"{folder}/rank{dist.get_rank()}"}),
        mock.patch.object(MachineNeed, "sizes", quick_sizes),
    ):
        train(mesh, cards)
        train_beside_tensor_parallelism(cards)
        kept = [sorted({row.op for row in each.card.intra_node.measured}) for each in kept_cards()]
    everyone: list[Any] = [None] * 4
    dist.all_gather_object(everyone, cards)
    assert [len(set(of_one)) for of_one in zip(*everyone, strict=True)] == [1, 1] and len(set(everyone[0])) == 2
    return kept


def test_the_groups_of_a_mesh_are_measured_together(
    run_on_gloo_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    first, *others = run_on_gloo_ranks(4, measure_a_mesh, str(tmp_path))
    assert first == [["all_gather", "all_reduce", "reduce_scatter"]] and others == [[], [], []]


def find_what_calibrate_kept(folder: str) -> tuple[int, list[str]]:
    """How often this rank has measured beside a card of ``graphshard calibrate``, and the cards that it came to."""
    card = load_card("cpu-loopback")
    rows = [
        MeasuredCollective(op=op, num_ranks=2, num_bytes=num_bytes, seconds=1e-4 + num_bytes * 1e-9)
        for op in ("all_gather", "reduce_scatter")
        for num_bytes in (2**10, 2**20)
    ]
    card = replace(card, name="calibrated", intra_node=replace(card.intra_node, measured=tuple(rows)))
    cards: list[str] = []
    measure = mock.Mock(wraps=MODULE.measure_card)
    with (
        mock.patch.dict(os.environ, {"GRAPHSHARD_CACHE": f"{folder}/rank{dist.get_rank()}"}),
        mock.patch.object(MODULE, "measure_card", measure),
    ):
        if dist.get_rank() == 0:
            cpu, threads = torch.device("cpu"), torch.get_num_threads()
            assert keep_calibrated(card, "gloo", cpu, num_ranks=2, num_threads=threads) is not None
        train(another_mesh(), cards)
    return measure.call_count, cards


def test_a_card_that_calibrate_kept_is_found(
    run_on_gloo_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    for times, (card,) in run_on_gloo_ranks(2, find_what_calibrate_kept, str(tmp_path)):
        assert times == 0
        assert "calibrated" in card


def fail_to_measure(folder: str) -> str:
    """Rank 0 cannot write down what it measured: a fault while it decides."""
    with mock.patch.dict(os.environ, {"GRAPHSHARD_CACHE": f"{folder}/rank{dist.get_rank()}"}):
        if dist.get_rank() == 0:
            broken = mock.patch.object(MODULE, "read_kept", side_effect=GraphShardError("no cache today"))
        else:
            broken = mock.patch.object(MODULE, "measure_card", side_effect=AssertionError("nobody asked"))
        with broken, pytest.raises(Exception, match="no cache today") as raised:
            train(another_mesh(), [])
        return type(getattr(raised.value, "inner_exception", raised.value)).__name__


def test_a_rank_that_fails_before_measuring_tells_the_others(
    run_on_gloo_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    assert run_on_gloo_ranks(2, fail_to_measure, str(tmp_path)) == ["GraphShardError", "RefusedError"]


def need_more_alone(folder: str) -> int:
    """Rank 0 compiles what needs more than was measured, and rank 1 does not; how often this rank has measured."""
    name = dist.new_group().group_name
    group = GroupNeed.of_parameters(2, ("all_gather", "reduce_scatter"), 2**20)
    need = MachineNeed(device_type="cpu", groups=(group,), dtypes=("float32",))
    measure = mock.Mock(wraps=MODULE.measure_card)

    def come(need: MachineNeed) -> OwnCard:
        return own_card(need, [name], torch.device("cpu"), what="graph 0", report=lambda line: None)

    with (
        mock.patch.dict(os.environ, {"GRAPHSHARD_CACHE": f"{folder}/rank{dist.get_rank()}"}),
        mock.patch.object(MachineNeed, "sizes", quick_sizes),
        mock.patch.object(MODULE, "measure_card", measure),
    ):
        assert come(need).card is not None
        if dist.get_rank() == 0:
            # Not the limit of the group: a slow machine takes longer to measure.
            limited = mock.patch.object(agreement, "group_timeout_seconds", lambda group: LIMIT_S)
            with limited, pytest.raises(AgreementError, match=r"rank\(s\) \[1\] did not compile a graph"):
                come(replace(need, dtypes=("bfloat16", "float32")))
    dist.barrier()
    return measure.call_count


def test_a_rank_that_compiles_alone_does_not_measure(
    run_on_gloo_ranks: Callable[..., list[Any]], tmp_path: Path
) -> None:
    """Its collectives would meet those of a step of the others."""
    assert run_on_gloo_ranks(2, need_more_alone, str(tmp_path)) == [1, 1]
