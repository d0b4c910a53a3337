"""A sharded model is an instance of torch's FSDPModule, and what torch and trainers do with such a module is right."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.implementations import EVERY, GRAPHSHARD, UNCOMPILED, pick_fully_shard
from support.parity import check_sharded_parity
from support.torch_versions import NEEDS_SPLIT_BACKWARDS, NEEDS_STAGES_ON_ONE_RANK
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

Run = Callable[..., list[Any]]


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).mean()


def _pair(implementation: str) -> tuple[nn.Module, Any, Any]:
    """A plain model, the sharded one, and a mesh (pp, dp) whose axis pp has one rank."""
    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5))
    model = copy.deepcopy(reference)
    fully_shard = pick_fully_shard(implementation)
    fully_shard(model[0], mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    if implementation == "compiled":
        model.compile(backend="graphshard")
    return reference, model, mesh


def _batches() -> list[Tensor]:
    return [
        torch.randn(4, 4, generator=torch.Generator().manual_seed(rank))
        for rank in range(dist.get_world_size())
    ]


def _train_reference(reference: nn.Module, target: Tensor) -> None:
    """The mean gradient over two micro-batches of each rank."""
    num_ranks = dist.get_world_size()
    for batch in _batches():
        for x, y in zip(batch.chunk(2), target.chunk(2), strict=True):
            (_loss(reference(x), y) / 2 / num_ranks).backward()


def accumulate_as_fabric_does(implementation: str) -> None:
    """Fabric's `no_backward_sync` sets the flag of each torch.distributed.fsdp.FSDPModule, without recursion."""
    reference, model, _ = _pair(implementation)
    assert isinstance(model, FSDPModule) and isinstance(model[0], FSDPModule)
    assert not isinstance(model[2], FSDPModule) and not isinstance(model[1:], FSDPModule)
    target = torch.ones(4, 5)
    x, other_x = _batches()[dist.get_rank()].chunk(2)
    y, other_y = target.chunk(2)
    units = [module for module in model.modules() if isinstance(module, FSDPModule)]
    for unit in units:
        unit.set_requires_gradient_sync(False, recurse=False)
    (_loss(model(x), y) / 2).backward()
    assert all(parameter.grad is None for parameter in model.parameters())
    for unit in units:
        unit.set_requires_gradient_sync(True, recurse=False)
    (_loss(model(other_x), other_y) / 2).backward()
    _train_reference(reference, target)
    check_sharded_parity(reference, model)


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_fabric_accumulates(run_on_gloo_ranks: Run, implementation: str) -> None:
    run_on_gloo_ranks(2, accumulate_as_fabric_does, implementation)


def run_a_pipeline_stage(implementation: str, schedule_name: str) -> None:
    """Torch's schedules gather before a step, switch reductions off, and ask FSDP2's state for them at the end."""
    from torch.distributed import pipelining

    reference, model, mesh = _pair(implementation)
    stage = pipelining.PipelineStage(model, 0, 1, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule_class = getattr(pipelining, schedule_name)
    stages = [stage] if "Interleaved" in schedule_name else stage
    schedule = schedule_class(stages, n_microbatches=2, loss_fn=_loss)
    target = torch.ones(4, 5)
    for _ in range(2):
        reference.zero_grad()
        model.zero_grad()
        schedule.step(_batches()[dist.get_rank()], target=target)
        _train_reference(reference, target)
        check_sharded_parity(reference, model)


@pytest.mark.parametrize("schedule_name", ["ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"])
@pytest.mark.parametrize("implementation", EVERY)
def test_pipeline_schedules(run_on_gloo_ranks: Run, implementation: str, schedule_name: str) -> None:
    run_on_gloo_ranks(2, run_a_pipeline_stage, implementation, schedule_name)


def split_the_backward(implementation: str, schedule_name: str, reshards: bool) -> None:
    """The schedule asks autograd for gradients of inputs, and later for those of the leaves that parameters() gives."""
    from torch.distributed import pipelining

    mesh = init_device_mesh("cpu", (1, dist.get_world_size()), mesh_dim_names=("pp", "dp"))
    torch.manual_seed(0)
    reference = nn.Sequential(*(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)) for _ in range(4)))
    reference[3][0].bias.requires_grad_(False)
    parts = [copy.deepcopy(reference[:2]), copy.deepcopy(reference[2:])]
    fully_shard = pick_fully_shard(implementation)
    for part in parts:
        for block in part:
            fully_shard(block, mesh=mesh["dp"], reshard_after_forward=reshards)
        fully_shard(part, mesh=mesh["dp"])
    stages = [
        pipelining.PipelineStage(part, index, 2, torch.device("cpu"), group=mesh.get_group("pp"))
        for index, part in enumerate(parts)
    ]
    schedule = getattr(pipelining, schedule_name)(stages, n_microbatches=2, loss_fn=_loss)
    model, target = nn.Sequential(*parts[0], *parts[1]), torch.ones(4, 4)
    for _ in range(2):
        reference.zero_grad()
        for part in parts:
            part.zero_grad()
        schedule.step(_batches()[dist.get_rank()], target=target)
        _train_reference(reference, target)
        check_sharded_parity(reference, model)


@pytest.mark.parametrize("schedule_name", ["ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"])
@pytest.mark.parametrize(
    ("implementation", "reshards"),
    # Of units that reshard, FSDP2 loses gradients.
    [
        pytest.param("fsdp2", False, marks=NEEDS_STAGES_ON_ONE_RANK),
        pytest.param("sharded", False, marks=NEEDS_SPLIT_BACKWARDS),
        pytest.param("sharded", True, marks=NEEDS_SPLIT_BACKWARDS),
    ],
)
def test_schedules_that_split_the_backward(
    run_on_gloo_ranks: Run, implementation: str, reshards: bool, schedule_name: str
) -> None:
    run_on_gloo_ranks(2, split_the_backward, implementation, schedule_name, reshards)


def ask_for_gradients_that_wait() -> None:
    """Only a schedule gets zeros for a gradient that waits: who asks for it is told that there is none."""
    _, model, _ = _pair("sharded")
    model.set_requires_gradient_sync(False)
    output = model(_batches()[dist.get_rank()]).sum()
    with pytest.raises(RuntimeError, match="appears to not have been used"):
        torch.autograd.grad(output, list(model.parameters()))


def test_a_gradient_that_waits_is_none(run_on_gloo_ranks: Run) -> None:
    run_on_gloo_ranks(2, ask_for_gradients_that_wait)


def wrap_in_ddp(implementation: str) -> None:
    _, model, _ = _pair(implementation)
    with pytest.raises(RuntimeError, match="Sharding propagation failed"):
        nn.parallel.DistributedDataParallel(model)


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_ddp_refuses_a_sharded_model(run_on_gloo_ranks: Run, implementation: str) -> None:
    run_on_gloo_ranks(2, wrap_in_ddp, implementation)
