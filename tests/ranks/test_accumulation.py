"""Gradient accumulation: what is reduced when, and how often, with the counts of torch's FSDP2.

A root unit and three MLP units, three micro-batches, gradients against the unsharded model.
"""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from support.comm_counts import count_collectives
from support.implementations import compile_if_asked, pick_fully_shard
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing import assert_close

NUM_MLPS = 3
NUM_MICRO_BATCHES = 3


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.down(torch.relu(self.up(x))))


@dataclass(frozen=True)
class Pattern:
    """Whose gradients wait for the last micro-batch, and for what: the reduction or the all-reduce."""

    who: str
    what: str = "gradient_sync"
    reshard_after_backward: bool = True


def _waiting(model: nn.Module, who: str) -> list[tuple[nn.Module, bool]]:
    """The modules whose flag is set, with `recurse`."""
    return {
        "all": [(model, True)],
        "root_only": [(model, False)],
        "some_mlps": [(model[1], True), (model[2], True)],
    }[who]


def _expected(pattern: Pattern, reshard: bool | int, is_hybrid: bool) -> dict[str, int]:
    """FSDP2's formulas (fsdp: M units and the root, N micro-batches)."""
    units, steps = NUM_MLPS + 1, NUM_MICRO_BATCHES
    waiting = {"all": units, "root_only": 1, "some_mlps": 2}[pattern.who]
    synced = units + (units - waiting) * (steps - 1)
    reductions = synced if pattern.what == "gradient_sync" else units * steps
    gathers = units * steps * (1 if reshard is False else 2)
    if reshard is False and not pattern.reshard_after_backward:
        gathers = synced
    counts = {"gathers": gathers, "reductions": reductions}
    return counts | ({"all-reduces": synced} if is_hybrid else {})


def _accumulate(implementation: str, is_hybrid: bool, reshard: bool | int, patterns: list[Pattern]) -> None:
    torch.manual_seed(42)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    reference = nn.Sequential(nn.Linear(16, 16), *(MLP(16) for _ in range(NUM_MLPS)))
    model = copy.deepcopy(reference)
    if is_hybrid:
        mesh = init_device_mesh("cpu", (2, world_size // 2), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("shard",))
    fully_shard = pick_fully_shard(implementation)
    for module in [*model[1:], model]:
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard)
    forward = compile_if_asked(implementation, model)
    for pattern in patterns:
        for _ in range(2 if implementation == "compiled" else 1):  # the first round compiles
            with count_collectives() as counts:
                for micro_batch in range(NUM_MICRO_BATCHES):
                    is_last = micro_batch == NUM_MICRO_BATCHES - 1
                    for module, recurse in _waiting(model, pattern.who):
                        getattr(module, f"set_requires_{pattern.what}")(is_last, recurse=recurse)
                        if not pattern.reshard_after_backward:
                            module.set_reshard_after_backward(is_last, recurse=recurse)
                    generator = torch.Generator().manual_seed(micro_batch)
                    batches = torch.randn(world_size, 2, 16, generator=generator)
                    losses = [reference(batch).sum() for batch in batches]
                    (torch.stack(losses).sum() / world_size).backward()
                    loss = forward(batches[rank]).sum()
                    loss.backward()
                    assert_close(loss.detach(), losses[rank].detach())
            for (name, parameter), expected in zip(
                model.named_parameters(), reference.parameters(), strict=True
            ):
                assert_close(
                    parameter.grad.full_tensor(), expected.grad, msg=lambda text, name=name: f"{name}: {text}"
                )
            if is_hybrid:
                _check_replicas_are_bit_equal(model, mesh)
            model.zero_grad()
            reference.zero_grad()
        expected_counts = _expected(pattern, reshard, is_hybrid)
        if implementation == "compiled" and reshard is not False:
            # The root's layer is the first one: nothing in the backward needs its weight.
            expected_counts["gathers"] -= NUM_MICRO_BATCHES
        assert dict(counts) == expected_counts, f"{pattern}: {dict(counts)}, expected {expected_counts}"


def _check_replicas_are_bit_equal(model: nn.Module, mesh: DeviceMesh) -> None:
    group = mesh.get_group("replicate")
    for name, parameter in model.named_parameters():
        local = parameter.grad.to_local().contiguous()
        copies = [torch.empty_like(local) for _ in range(group.size())]
        dist.all_gather(copies, local, group=group)
        assert all(torch.equal(local, each) for each in copies), name


WHO = ("all", "root_only", "some_mlps")
RESHARDED = [Pattern(who) for who in WHO]
KEPT = [
    *RESHARDED,
    Pattern("all", reshard_after_backward=False),
    Pattern("root_only", reshard_after_backward=False),
]
HYBRID = [Pattern(who, what) for what in ("gradient_sync", "all_reduce") for who in WHO]
#: Hybrid or not, reshard_after_forward, patterns, and for which implementations the case is slow.
CASES = {
    "1-D resharded": (False, True, RESHARDED, ()),
    "1-D kept": (False, False, KEPT, ()),
    "1-D spread over 2": (False, 2, RESHARDED, ("fsdp2", "sharded", "compiled")),
    "hybrid resharded": (True, True, HYBRID, ("compiled",)),
    "hybrid kept": (True, False, HYBRID, ("fsdp2", "sharded", "compiled")),
}


@pytest.mark.parametrize(
    ("implementation", "is_hybrid", "reshard", "patterns"),
    [
        pytest.param(
            implementation,
            *arguments,
            id=f"{name}-{implementation}",
            marks=[pytest.mark.slow] if implementation in slow_ones else [],
        )
        for implementation in ("fsdp2", "sharded", "compiled")
        for name, (*arguments, slow_ones) in CASES.items()
    ],
)
def test_counts_and_gradients(run_on_gloo_ranks, implementation, is_hybrid, reshard, patterns):
    num_ranks = 4 if is_hybrid or reshard == 2 else 2
    run_on_gloo_ranks(num_ranks, _accumulate, implementation, is_hybrid, reshard, patterns)


def accumulate_on_another_group() -> None:
    """Ranks know different ops on an equal mesh of other groups, so DTensor's caches of results differ."""
    for attempt in range(2):
        mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
        model = pick_fully_shard("sharded")(nn.Linear(3, 4), mesh=mesh)
        if attempt == 0:
            if dist.get_rank() == 0:
                weight = model.weight.detach()
                weight.add_(weight + torch.zeros_like(weight))
            continue
        for _ in range(2):
            model(torch.ones(2, 3)).sum().backward()
            group = model.weight.grad.device_mesh.get_group().group_name
            assert group == model.weight.device_mesh.get_group().group_name == mesh.get_group().group_name


def test_gradients_stay_on_the_mesh_of_their_parameter(run_on_gloo_ranks):
    run_on_gloo_ranks(2, accumulate_on_another_group)
