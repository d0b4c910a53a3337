"""Parameters that are DTensors already: sharding over `dp` of what tensor parallelism split over `tp`."""

import copy
import dataclasses
import re
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from support.implementations import GRAPHSHARD, UNCOMPILED, compile_if_asked, pick_fully_shard
from support.meshes_parity import Arrangement, FullyShard, check_like_unsharded, named_mesh, train_on_mesh
from support.toy_models import Batch, Forward, Workload
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from graphshard._compat import from_local_takes_grad_placements
from graphshard.cost import load_card
from graphshard.fsdp.state import placements

from .test_refusals import expect_error


class FeedForward(nn.Module):
    """Norm, expand, contract, with a residual; the inner width is not a multiple of anything."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.expand = nn.Linear(dim, inner)
        self.contract = nn.Linear(inner, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.contract(F.gelu(self.expand(self.norm(x))))


class Stack(nn.Module):
    """Token embedding, feed-forward blocks, norm, output layer; returns log-probabilities."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(8, dim)
        self.layers = nn.ModuleList([FeedForward(dim, inner) for _ in range(2)])
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, 6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return F.log_softmax(self.output(self.norm(x)), dim=-1)


def class_loss(forward: Forward, batch: Batch) -> Tensor:
    tokens, classes = batch
    return F.nll_loss(forward(tokens).flatten(0, 1), classes.flatten())


def stack_workload(dim: int, inner: int) -> Workload:
    return Workload(
        build=lambda: Stack(dim, inner),
        list_units=lambda model: list(model.layers),
        draw_batch=lambda generator, size: (
            torch.randint(8, (size, 4), generator=generator),
            torch.randint(6, (size, 4), generator=generator),
        ),
        loss=class_loss,
    )


EVEN, UNEVEN = (8, 16), (6, 7)


def split_layers(model: nn.Module, tp: DeviceMesh) -> None:
    """Column- and row-wise linear layers; plain activations between; the rest of the model is not split."""
    plan = {"expand": ColwiseParallel(use_local_output=False), "contract": RowwiseParallel()}
    for layer in model.layers:
        parallelize_module(layer, tp, plan)


def split_sequence(model: nn.Module, tp: DeviceMesh) -> None:
    """Every module; activations between them are DTensors, split along the sequence."""
    along_sequence = {"output_layouts": Shard(1), "use_local_output": False}
    block = {
        "norm": SequenceParallel(),
        "expand": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
        "contract": RowwiseParallel(**along_sequence),
    }
    plan = {
        "tokens": RowwiseParallel(input_layouts=Replicate(), **along_sequence),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, tp, plan)
    for layer in model.layers:
        parallelize_module(layer, tp, block)


PLANS = {"layers": split_layers, "sequence": split_sequence}


def two_dim_mesh() -> DeviceMesh:
    return named_mesh((2, 2), ("dp", "tp"))


def arrange(
    workload: Workload, mesh: DeviceMesh, dp: DeviceMesh, plan: str, **options: object
) -> Arrangement:
    def shard(fully_shard: FullyShard, model: nn.Module) -> None:
        PLANS[plan](model, mesh["tp"])
        for unit in [*workload.list_units(model), model]:
            fully_shard(unit, mesh=dp, **options)

    num_batches = mesh.size() // mesh["tp"].size()
    return Arrangement(shard=shard, num_batches=num_batches, batch_index=dist.get_rank() // mesh["tp"].size())


def train_two_dim(
    implementation: str,
    plan: str,
    sizes: tuple[int, int],
    reshard_after_forward: bool | None = None,
    clip_to: float | None = None,
) -> None:
    workload, mesh = stack_workload(*sizes), two_dim_mesh()
    arrangement = arrange(workload, mesh, mesh["dp"], plan, reshard_after_forward=reshard_after_forward)
    model = train_on_mesh(workload, implementation, arrangement, clip_to=clip_to)
    weight = model.layers[0].contract.weight
    assert weight.placements == (Shard(0), Shard(1))
    assert weight.device_mesh.mesh_dim_names == ("dp", "tp")
    expand = model.layers[0].expand.weight
    assert expand.placements[0].is_shard() is False and expand.placements[0].split_factor == 2
    assert expand.placements[1] == Shard(0)


def train_as_on_torch_2_11() -> None:
    """There ``DTensor.from_local`` takes no placements of gradients."""
    of_torch = DTensor.from_local

    def from_local(*args: object, **options: object) -> DTensor:
        assert "shape" not in options or "grad_placements" not in options  # torch's own calls give no shape
        return of_torch(*args, **options)

    with (
        mock.patch.object(DTensor, "from_local", from_local),
        mock.patch.object(placements, "from_local_takes_grad_placements", False),
    ):
        train_two_dim("sharded", "layers", EVEN)


def train_three_dim(implementation: str, shape: tuple[int, int, int], plan: str) -> None:
    """Copies over `replicate`, shards over `shard`, splits over `tp`."""
    mesh = named_mesh(shape, ("replicate", "shard", "tp"))
    workload = stack_workload(*EVEN)
    model = train_on_mesh(workload, implementation, arrange(workload, mesh, mesh["replicate", "shard"], plan))
    weight = model.layers[0].contract.weight
    assert weight.placements == (Replicate(), Shard(0), Shard(1))
    assert weight.device_mesh.mesh_dim_names == ("replicate", "shard", "tp")


class CheckpointedStack(Stack):
    """Keeps the inputs of its blocks alone, and runs them again in the backward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return F.log_softmax(self.output(self.norm(x)), dim=-1)


def train_checkpointed(implementation: str) -> None:
    workload, mesh = stack_workload(*EVEN), two_dim_mesh()
    workload = dataclasses.replace(workload, build=lambda: CheckpointedStack(*EVEN))
    arrangement = arrange(workload, mesh, mesh["dp"], "layers", reshard_after_forward=True)
    train_on_mesh(workload, implementation, arrangement, num_steps=2)


def accumulate(implementation: str) -> None:
    """Two micro-batches without a reduction, a third with one: the gradient of all three."""
    torch.manual_seed(42)
    workload, mesh = stack_workload(*EVEN), two_dim_mesh()
    reference = workload.build()
    model = copy.deepcopy(reference)
    arrangement = arrange(workload, mesh, mesh["dp"], "sequence")
    arrangement.shard(pick_fully_shard(implementation), model)
    forward = compile_if_asked(implementation, model)
    for step in range(3):
        batches = [workload.batch_of(index, step) for index in range(2)]
        torch.stack([workload.loss(reference, batch) for batch in batches]).mean().backward()
        model.set_requires_gradient_sync(step == 2)
        workload.loss(forward, batches[arrangement.batch_index]).backward()
    check_like_unsharded(reference, model)


def gather_by_hand(implementation: str) -> None:
    """`unshard()` shows DTensors on `tp`; `reshard()` shows those on both axes again."""
    torch.manual_seed(42)
    workload, mesh = stack_workload(*UNEVEN), two_dim_mesh()
    reference = workload.build()
    model = copy.deepcopy(reference)
    arrange(workload, mesh, mesh["dp"], "layers").shard(pick_fully_shard(implementation), model)
    layer = model.layers[0]
    layer.unshard()
    for name, placement in (("expand", Shard(0)), ("contract", Shard(1))):
        weight, expected = getattr(layer, name).weight, getattr(reference.layers[0], name).weight
        assert weight.device_mesh == mesh["tp"] and weight.placements == (placement,)
        assert_close(weight.full_tensor(), expected)
    layer.reshard()
    check_like_unsharded(reference, model)


def save_and_load(implementation: str) -> None:
    """Shards alias the parameters; the whole state is the unsharded model's; loading writes in place."""
    torch.manual_seed(42)
    workload, mesh = stack_workload(*EVEN), two_dim_mesh()
    reference = workload.build()
    model = copy.deepcopy(reference)
    arrange(workload, mesh, mesh["dp"], "sequence").shard(pick_fully_shard(implementation), model)
    state = model.state_dict()
    assert list(state) == list(reference.state_dict())
    for name, parameter in model.named_parameters():
        assert isinstance(state[name], DTensor) and state[name].placements == parameter.placements
        assert state[name].to_local().data_ptr() == parameter.to_local().data_ptr()
        assert_close(state[name].full_tensor(), reference.state_dict()[name])
    whole = get_model_state_dict(model)
    doubled = {name: value.detach().clone() * 2 for name, value in whole.items()}
    model.load_state_dict(doubled)
    for name, value in reference.state_dict().items():
        assert_close(model.state_dict()[name].full_tensor(), value * 2)


def init_on_meta(implementation: str) -> None:
    """Shards allocated by `to_empty`, then filled; the dims are 8, 3 and 1 on four ranks."""
    mesh = two_dim_mesh()
    for size in (8, 3, 2):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(size, size), nn.Linear(size, size))
        parallelize_module(
            model, mesh["tp"], {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel()}
        )
        pick_fully_shard(implementation)(model, mesh=mesh["dp"])
        assert all(parameter.is_meta for parameter in model.parameters())
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            assert parameter.device.type == "cpu"
            nn.init.constant_(parameter, 0.5)
        reference = nn.Sequential(nn.Linear(size, size), nn.Linear(size, size))
        for parameter in reference.parameters():
            nn.init.constant_(parameter, 0.5)
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert_close(parameter.full_tensor(), expected)
        if implementation != "fsdp2":  # which warns that a view is returned
            x = torch.ones(2, size)
            assert_close(model(x), reference(x))


def count_collectives(tmp_path: str) -> tuple[list[str], list[str]]:
    """The collectives of the planned forward and backward, one a line, of a compiled 2x2 model that trains."""
    from pathlib import Path

    folder = Path(tmp_path) / str(dist.get_rank())
    torch.manual_seed(42)
    workload, mesh = stack_workload(*EVEN), two_dim_mesh()
    arrangement = arrange(workload, mesh, mesh["dp"], "sequence", reshard_after_forward=True)
    options = {"dump": str(folder), "verify": "full"}
    train_on_mesh(workload, "compiled", arrangement, num_steps=2, options=options)
    found = []
    for half in ("forward", "backward"):
        for stage in ("0-partitioned", "*-schedule_collectives"):
            (path,) = folder.glob(f"graph0.{half}.{stage}.txt")
            lines = path.read_text().splitlines()
            found.append([line.strip() for line in lines if "axis=" in line and " = " in line])
    return found


def check_collectives(found: list[list[str]]) -> None:
    """One gather and one reduction per unit on `dp`; those of `tp` all there, one by one, in their order."""

    def kinds(lines: list[str], *, of_tp: bool) -> list[str]:
        on_axis = [line for line in lines if "unshard(" not in line and "reduce_grad(" not in line]
        return [line.split(" = ")[1].split("(")[0] for line in on_axis if ("axis=dp)" not in line) is of_tp]

    forward_before, forward, backward_before, backward = found
    num_units = 3
    assert kinds(forward, of_tp=False) == ["all_gather_into_tensor"] * num_units
    assert sorted(kinds(backward, of_tp=False)) == (
        ["all_gather_into_tensor"] * num_units + ["reduce_scatter_tensor"] * num_units
    )
    forward_tp, backward_tp = kinds(forward, of_tp=True), kinds(backward, of_tp=True)
    assert forward_tp == kinds(forward_before, of_tp=True)
    assert backward_tp == kinds(backward_before, of_tp=True)
    # One reduction a row-wise layer (two blocks, the embedding), one gather a column-wise one and one of the output.
    assert forward_tp.count("reduce_scatter_tensor") == 3 and forward_tp.count("all_gather_into_tensor") == 4
    # The gradients of the norms' six replicated parameters are summed over `tp` one by one.
    assert backward_tp.count("all_reduce") == 6


def clip_mixed_meshes(implementation: str) -> None:
    """A plain parameter on `dp` beside others on `dp` and `tp`: torch's function works for each mesh apart."""
    torch.manual_seed(42)
    workload, mesh = stack_workload(*EVEN), two_dim_mesh()
    reference = workload.build()
    model = copy.deepcopy(reference)
    arrangement = arrange(workload, mesh, mesh["dp"], "layers")
    arrangement.shard(pick_fully_shard(implementation), model)
    batches = [workload.batch_of(index, 0) for index in range(2)]
    torch.stack([workload.loss(reference, batch) for batch in batches]).mean().backward()
    workload.loss(model, batches[arrangement.batch_index]).backward()
    by_mesh: dict[object, list[nn.Parameter]] = {}
    for parameter in model.parameters():
        by_mesh.setdefault(parameter.device_mesh, []).append(parameter)
    assert len(by_mesh) == 2
    for norm_type in (1.0, 2.0, float("inf")):
        norms = [
            nn.utils.get_total_norm([parameter.grad for parameter in group], norm_type).full_tensor()
            for group in by_mesh.values()
        ]
        expected = nn.utils.get_total_norm([each.grad for each in reference.parameters()], norm_type)
        assert_close(torch.linalg.vector_norm(torch.stack(norms), norm_type), expected)


def other_mesh(fully_shard: FullyShard) -> None:
    """The parameter's mesh is the one it is to be sharded over."""
    mesh = two_dim_mesh()
    model = nn.Sequential(nn.Linear(4, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["tp"])


def number_of_ranks(fully_shard: FullyShard) -> None:
    mesh = named_mesh((4, 1), ("dp", "tp"))
    model = nn.Sequential(nn.Linear(4, 4))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"], reshard_after_forward=2)


def three_other_axes(fully_shard: FullyShard) -> None:
    mesh = named_mesh((4, 1, 1, 1), ("dp", "a", "b", "c"))
    model = nn.Linear(4, 4)
    for name, parameter in list(model.named_parameters()):
        split = distribute_tensor(parameter.detach(), mesh["a", "b", "c"], [Replicate()] * 3)
        model.register_parameter(name, nn.Parameter(split))
    fully_shard(model, mesh=mesh["dp"])


REFUSALS = {
    "other_mesh": (other_mesh, RuntimeError, ValueError, r"0\.weight \(4, 4\).*different axes"),
    "three_other_axes": (
        three_other_axes,
        NotImplementedError,
        NotImplementedError,
        r"weight.*at most two axes",
    ),
}


def refuse(implementation: str, name: str) -> None:
    mistake, fsdp2_kind, our_kind, graphshard_says = REFUSALS[name]
    kind = fsdp2_kind if implementation == "fsdp2" else our_kind
    with expect_error(implementation, kind, graphshard_says=graphshard_says):
        mistake(pick_fully_shard(implementation))


def refuse_number_of_ranks() -> None:
    with expect_error(
        "sharded", NotImplementedError, graphshard_says=r"reshard_after_forward=2.*0\.weight.*True or False"
    ):
        number_of_ranks(pick_fully_shard("sharded"))


@pytest.mark.sampled
@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize(
    "sizes",
    [
        EVEN,
        pytest.param(
            UNEVEN,
            marks=pytest.mark.skipif(
                not from_local_takes_grad_placements,
                reason="DTensor's autograd replicates uneven gradients on torch 2.11",
            ),
        ),
    ],
)
@pytest.mark.parametrize("plan", PLANS)
def test_two_dim_training(run_on_gloo_ranks, plan, sizes, reshard_after_forward):
    run_on_gloo_ranks(4, train_two_dim, "sharded", plan, sizes, reshard_after_forward)


def test_training_as_on_torch_2_11(run_on_gloo_ranks):
    run_on_gloo_ranks(4, train_as_on_torch_2_11)


@pytest.mark.parametrize(
    ("plan", "sizes"),
    [
        pytest.param("layers", UNEVEN, marks=pytest.mark.slow),
        # trained beside its collectives, below
        pytest.param("sequence", EVEN, marks=pytest.mark.slow),
    ],
)
def test_compiled_two_dim_training(run_on_gloo_ranks, plan, sizes):
    run_on_gloo_ranks(4, train_two_dim, "compiled", plan, sizes)


@pytest.mark.parametrize("implementation", ["sharded", pytest.param("compiled", marks=pytest.mark.slow)])
def test_clipping_with_tensor_parallelism(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(4, train_two_dim, implementation, "sequence", EVEN, None, 0.05)


@pytest.mark.parametrize(
    ("implementation", "shape", "plan"),
    [
        ("sharded", (2, 1, 2), "sequence"),
        ("sharded", (2, 2, 1), "layers"),
        ("sharded", (1, 2, 2), "layers"),
        pytest.param("compiled", (2, 1, 2), "sequence", marks=pytest.mark.slow),
        pytest.param("compiled", (2, 2, 1), "layers", marks=pytest.mark.slow),
    ],
)
def test_three_dim_training(run_on_gloo_ranks, implementation, shape, plan):
    run_on_gloo_ranks(4, train_three_dim, implementation, shape, plan)


@pytest.mark.slow
@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_three_dim_training_on_eight_ranks(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(8, train_three_dim, implementation, (2, 2, 2), "sequence")


@pytest.mark.parametrize("implementation", ["sharded", pytest.param("compiled", marks=pytest.mark.slow)])
def test_checkpointing_with_tensor_parallelism(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(4, train_checkpointed, implementation)


@pytest.mark.parametrize(
    "implementation", ["fsdp2", "sharded", pytest.param("compiled", marks=pytest.mark.slow)]
)
def test_accumulation_with_tensor_parallelism(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(4, accumulate, implementation)


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_unshard_shows_the_outer_dtensor(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(4, gather_by_hand, implementation)


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_state_dict_with_tensor_parallelism(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(4, save_and_load, implementation)


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_meta_init_with_tensor_parallelism(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(4, init_on_meta, implementation)


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_norms_on_mixed_meshes(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(4, clip_mixed_meshes, implementation)


def test_tensor_parallel_collectives_are_left_alone(run_on_gloo_ranks, tmp_path):
    """And the compiled model trains like the unsharded one."""
    by_rank = run_on_gloo_ranks(4, count_collectives, str(tmp_path))
    assert all(found == by_rank[0] for found in by_rank)
    check_collectives(by_rank[0])


@pytest.mark.parametrize("name", REFUSALS)
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_refusals(run_on_gloo_ranks, implementation, name):
    run_on_gloo_ranks(4, refuse, implementation, name)


def test_number_of_ranks_is_refused(run_on_gloo_ranks):
    run_on_gloo_ranks(4, refuse_number_of_ranks)


def train_with_compute_moved(folder: str, move_compute: bool, num_copies: int) -> None:
    """Products take long on this card, so those of weights' gradients can hide what `tp` sends; memory is there."""
    card = load_card("cpu-ethernet-1g")
    slow = dataclasses.replace(card, peak_flops={name: value / 3e4 for name, value in card.peak_flops.items()})
    workload, mesh = stack_workload(*EVEN), named_mesh((num_copies, 2), ("dp", "tp"))
    options = {
        "hardware": slow,
        "bucket": "auto",
        "move_compute": move_compute,
        "memory_budget": "1GB",
        "dump": f"{folder}/{dist.get_rank()}",
        "verify": "full",
    }
    arrangement = arrange(workload, mesh, mesh["dp"], "sequence")
    train_on_mesh(workload, "compiled", arrangement, num_steps=2, options=options)


@pytest.mark.parametrize(
    ("move_compute", "num_copies"),
    [
        (True, 1),
        pytest.param(True, 2, marks=pytest.mark.slow),
        pytest.param(False, 2, marks=pytest.mark.slow),
    ],
)
def test_compute_moves_beside_collectives(run_on_gloo_ranks, tmp_path, move_compute, num_copies):
    """On every rank alike, and with the values of the unsharded model."""
    num_ranks = 2 * num_copies
    run_on_gloo_ranks(num_ranks, train_with_compute_moved, str(tmp_path), move_compute, num_copies)
    plans = [(tmp_path / str(rank) / "graph0.backward.plan.txt").read_text() for rank in range(num_ranks)]
    found = [re.findall(r"\d+ pieces of compute moved", plan) for plan in plans]
    assert found == [found[0]] * num_ranks and bool(found[0]) is move_compute
