"""`parallelize` and `fully_shard` of plain models: training like the unsharded model, on 2 and 4 ranks."""

import copy
import math
import time
from contextlib import nullcontext
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from support.cost_cards import round_card
from support.implementations import compile_if_asked
from support.interpreted_halves import interpreted_halves
from support.meshes_parity import named_mesh
from support.parallel_models import PARALLEL_MODELS, ParallelModel
from support.ready_plan_models import READY_PLAN_MODELS
from support.searched_models import Misnamed
from support.thorough import is_thorough
from torch import nn
from torch.distributed.fsdp import fully_shard as fsdp2
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close

import graphshard
from graphshard.backend import step_planner
from graphshard.coordination import agree_on_seed, agreed_seed, refusing
from graphshard.cost import LinkClass
from graphshard.errors import AgreementError, ShardingError

MODELS = {**PARALLEL_MODELS, **{f"ready {name}": each for name, each in READY_PLAN_MODELS.items()}}
HAND_WRITTEN = {
    "layers.*.attention.w[qkv]": ColwiseParallel(),
    "layers.*.attention.wo": RowwiseParallel(),
    "layers.*.feed_forward.w[13]": ColwiseParallel(),
    "layers.*.feed_forward.w2": RowwiseParallel(),
}
MESHES = {"dp2 x tp2": (2, 2), "tp4": (1, 4), "replicate2 x tp2": (2, 1, 2)}
AXES = ("replicate", "dp", "tp")
LIMIT_S = 480.0
"""Ten steps on a busy machine."""
INSIDE_LAYERS = {
    name: cut for name, cut in PARALLEL_MODELS["llama"].placements.items() if name.startswith("layers")
}


def make_pair(name: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> tuple[nn.Module, nn.Module]:
    """The unsharded model, and its copy on a mesh whose last axis is that of tensor parallelism."""
    given = MODELS[name]
    mesh = named_mesh(shape, axes)
    torch.manual_seed(42)
    reference = given.build()
    model = graphshard.parallelize(copy.deepcopy(reference), mesh["tp"], given.placements, **given.held)
    for unit in [*given.units(model), model]:
        graphshard.fully_shard(unit, mesh=mesh[axes[:-1]])
    return reference, model


def train(
    name: str, implementation: str, shape: tuple[int, ...], axes: tuple[str, ...], num_steps: int
) -> None:
    """AdamW steps; losses, gradients and parameters are those of the unsharded model on all batches."""
    given = MODELS[name]
    reference, model = make_pair(name, shape, axes)
    forward = compile_if_asked(implementation, model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, foreach=False) for each in (reference, model)]
    num_batches, index = dist.get_world_size() // shape[-1], dist.get_rank() // shape[-1]
    for step in range(num_steps):
        batches = [given.draw(torch.Generator().manual_seed(100 * step + each)) for each in range(num_batches)]
        losses = []
        for each in batches:
            torch.manual_seed(step)  # dropout draws the same on all ranks
            losses.append(reference(*each))
        torch.stack(losses).mean().backward()
        torch.manual_seed(step)
        loss = forward(*batches[index])
        assert_close(loss.detach(), losses[index].detach(), msg=lambda text, step=step: f"loss of step {step}: {text}")
        loss.backward()
        check_like(reference, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    check_like(reference, model)


def check_like(reference: nn.Module, model: nn.Module) -> None:
    """Full values and gradients; parameters on all axes of the mesh."""
    for (name, expected), (_, found) in zip(reference.named_parameters(), model.named_parameters(), strict=True):
        assert isinstance(found, DTensor) and found.device_mesh.mesh_dim_names[-1] == "tp", name
        pairs = [(found, expected), (found.grad, expected.grad)]
        for ours, theirs in pairs:
            assert (ours is None) == (theirs is None), name
            if ours is not None:
                assert_close(
                    ours.full_tensor().detach(), theirs.detach(), rtol=1e-4, atol=1e-5,
                    msg=lambda text, name=name: f"{name}: {text}",
                )  # fmt: skip


def train_several(names: list[str], implementation: str, shape: tuple[int, ...], num_steps: int) -> None:
    """`implementation`: see `implementations`; or "interpreted": compiled, without Inductor."""
    is_interpreted = implementation == "interpreted"
    with interpreted_halves() if is_interpreted else nullcontext():
        for name in names:
            torch._dynamo.reset()
            train(name, "compiled" if is_interpreted else implementation, shape, AXES[-len(shape) :], num_steps)


def parallelize_on_two_meshes() -> None:
    """The axes of tensor parallelism are equal: DTensor keeps results of one, which would do for the other."""
    meshes = named_mesh((2, 2), ("dp", "tp")), named_mesh((2, 1, 2), AXES)
    for mesh in (meshes[0], *meshes):
        axis = mesh["tp"]
        model = graphshard.parallelize(nn.Linear(4, 4), axis, {"weight": Shard(0)})
        group = axis.get_group().group_name
        assert {each.device_mesh.get_group().group_name for each in model.parameters()} == {group}
        graphshard.fully_shard(model, mesh=mesh[mesh.mesh_dim_names[:-1]])
        assert {each.device_mesh.get_group("tp").group_name for each in model.parameters()} == {group}


def test_a_later_mesh_has_process_groups_of_its_own(run_on_gloo_ranks):
    run_on_gloo_ranks(4, parallelize_on_two_meshes)


def test_trains_like_the_unsharded_model(run_on_gloo_ranks):
    run_on_gloo_ranks(4, train_several, ["llama along the sequence"], "compiled", (2, 2), 3)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("ready gpt-sequence", (1, 2)),
        pytest.param("ready gpt-sequence", (2, 2), marks=pytest.mark.slow),
        pytest.param("ready vit", (2, 2), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_ready_plans(run_on_gloo_ranks, name, shape):
    run_on_gloo_ranks(math.prod(shape), train_several, [name], "compiled", shape, 1)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", [name for name in MODELS if "dropout" not in name])
def test_ten_steps_of_every_model(run_on_gloo_ranks, name, mesh):
    """Inductor's kernels run on one mesh; on the others all but them."""
    implementation = "compiled" if mesh == "dp2 x tp2" else "interpreted"
    run_on_gloo_ranks(4, train_several, [name], implementation, MESHES[mesh], 10, timeout_s=LIMIT_S)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", MODELS)
def test_ten_uncompiled_steps_of_every_model(run_on_gloo_ranks, name, mesh):
    run_on_gloo_ranks(4, train_several, [name], "sharded", MESHES[mesh], 10, timeout_s=LIMIT_S)


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        pytest.param("mlp", 4, marks=pytest.mark.slow),
        ("llama with three heads", 2),
        pytest.param("llama with three heads", 4, marks=pytest.mark.slow),
    ],
)
def test_ranks_of_tensor_parallelism_that_divide_nothing(run_on_gloo_ranks, name, num_ranks):
    """Widths and three heads that the ranks do not divide; one key head for all; columns of an embedding."""
    run_on_gloo_ranks(num_ranks, train_several, [name], "compiled", (1, num_ranks), 2)


def test_copies_beside_tensor_parallelism(run_on_gloo_ranks):
    run_on_gloo_ranks(4, train_several, ["mlp"], "compiled", (2, 1, 2), 2)


@pytest.mark.slow
@pytest.mark.inductor
def test_through_inductor(run_on_gloo_ranks):
    run_on_gloo_ranks(2, train_several, ["llama"], "compiled", (1, 2), 2)


def test_uncompiled(run_on_gloo_ranks):
    """Each rank gathers the parameters and computes the whole."""
    run_on_gloo_ranks(2, train_several, ["gpt", "vit", "mlp", "gpt with dropout"], "sharded", (1, 2), 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "mesh"),
    [("gpt", "tp4"), ("vit", "tp4"), ("llama with one key head", "replicate2 x tp2")],
)
def test_ten_steps_through_inductor_on_other_meshes(run_on_gloo_ranks, name, mesh):
    run_on_gloo_ranks(4, train_several, [name], "compiled", MESHES[mesh], 10, timeout_s=LIMIT_S)


def train_planned() -> tuple[int, int]:
    """Steps with plans by cost. Pieces differ between the ranks of `tp`, batches between those of `dp`.

    In the third step only the ranks with the second batch compile, in the fourth only the others; from then on the
    size of the batch is symbolic. Returns how often this rank has chosen, and the number of its graphs.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    chosen = mock.Mock(wraps=step_planner._choose)
    reference, model = make_pair("mlp", (2, 2), ("dp", "tp"))
    forward = compile_if_asked("compiled", model, hardware="cpu-ethernet-1g")
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, foreach=False) for each in (reference, model)]
    with mock.patch.object(step_planner, "_choose", chosen):
        for step, sizes in enumerate(((3, 5), (3, 5), (3, 4), (6, 7), (7, 9))):
            generator = torch.Generator().manual_seed(step)
            batches = [tuple(torch.randn(size, width, generator=generator) for width in (6, 5)) for size in sizes]
            torch.stack([reference(*batch) for batch in batches]).mean().backward()
            forward(*batches[dist.get_rank() // 2]).backward()
            check_like(reference, model)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    return chosen.call_count, torch._dynamo.utils.counters["stats"]["unique_graphs"]


def test_one_rank_plans_for_both_axes_and_a_batch_of_any_size(run_on_gloo_ranks):
    found = run_on_gloo_ranks(4, train_planned)
    (first, *others), num_graphs = zip(*found, strict=True)
    assert first and not any(others)
    assert num_graphs == (2, 2, 2, 2)


def train_with_dropout(shape: tuple[int, ...], num_steps: int) -> None:
    """Numbers are drawn for whole values: the ranks that share a batch draw what ranks without placements draw."""
    given, losses, axes = PARALLEL_MODELS["gpt with dropout"], {}, AXES[-len(shape) :]
    reference, placed = make_pair("gpt with dropout", shape, axes)
    for unit in [*given.units(reference), reference]:
        graphshard.fully_shard(unit, mesh=named_mesh((dist.get_world_size(),), ("all",)))
    for kind, model in (("placed", placed), ("sharded", reference)):
        torch._dynamo.reset()
        forward = compile_if_asked("compiled", model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
        losses[kind] = []
        for step in range(num_steps):
            torch.manual_seed(step)
            loss = forward(*given.draw(torch.Generator().manual_seed(100 * step + dist.get_rank() // shape[-1])))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[kind].append(loss.item())
    assert_close(losses["placed"], losses["sharded"], rtol=1e-4, atol=1e-5)
    for one, other in zip(reference.parameters(), placed.parameters(), strict=True):
        assert_close(other.full_tensor(), one.full_tensor(), rtol=1e-4, atol=1e-5)


def test_dropout_draws_what_one_rank_draws(run_on_gloo_ranks):
    run_on_gloo_ranks(2, train_with_dropout, (1, 2), 3)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_ten_steps_with_dropout(run_on_gloo_ranks, mesh):
    run_on_gloo_ranks(4, train_with_dropout, MESHES[mesh], 10, timeout_s=LIMIT_S)


def compile_with_other_seeds() -> str:
    _, model = make_pair("gpt with dropout", (1, 2), ("dp", "tp"))
    torch.manual_seed(100 + dist.get_rank())  # no seed that the ranks have agreed on before
    batch = PARALLEL_MODELS["gpt with dropout"].draw(torch.Generator().manual_seed(0))
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as error:
        compile_if_asked("compiled", model)(*batch)
    assert isinstance(error.value.inner_exception, AgreementError)
    return str(error.value.inner_exception)


def test_ranks_that_would_draw_different_numbers_are_refused(run_on_gloo_ranks):
    for text in run_on_gloo_ranks(2, compile_with_other_seeds):
        assert "on the axis tp: rank " in text and "of seed 100" in text and "of seed 101" in text
        assert "call torch.manual_seed with the same number" in text


def compare_seeds() -> list[str]:
    """Messages where the ranks' seeds differ: one that is agreed and a new one, and two that are agreed."""
    name = named_mesh((2,), ("tp",)).get_group().group_name
    rank, found = dist.get_rank(), []
    for seed in (201, 202):
        agree_on_seed(name, seed, ["program"], what="a graph")
    for seeds in ((201, 203), (204, 202), (201, 202)):
        started = time.monotonic()
        with pytest.raises(AgreementError) as error, refusing([name], "compile"):
            agree_on_seed(name, seeds[rank], ["program"], what="a graph")
        assert time.monotonic() - started < 30, "the group's time limit is longer"
        found.append(str(error.value))
    agree_on_seed(name, 201, ["program"], what="a graph")
    if rank == 0:  # compiles alone
        agreed_seed._SECONDS = 0.1
        agree_on_seed(name, 202, ["another program"], what="a graph")
        agreed_seed._SECONDS = 5.0
    return found


def test_a_rank_that_goes_back_to_an_agreed_seed_is_seen_at_once(run_on_gloo_ranks):
    for messages in run_on_gloo_ranks(2, compare_seeds):
        for text, seeds in zip(messages, (("201", "203"), ("204", "202"), ("201", "202")), strict=True):
            assert all(seed in text for seed in seeds) and "call torch.manual_seed with the same number" in text


def exchange_checkpoints(folder: str) -> None:
    """A checkpoint of `parallelize_module` and FSDP2 loads here, and the other way round; equal shards and losses."""
    mesh = named_mesh((2, 2), ("dp", "tp"))
    given = PARALLEL_MODELS["llama"]

    def make(seed: int, by_hand: bool) -> nn.Module:
        torch.manual_seed(seed)
        model = given.build()
        if by_hand:
            parallelize_module(model, mesh["tp"], HAND_WRITTEN)
        else:
            graphshard.parallelize(model, mesh["tp"], INSIDE_LAYERS)
        shard = fsdp2 if by_hand else graphshard.fully_shard
        for unit in [*given.units(model), model]:
            shard(unit, mesh=mesh["dp"])
        return model

    theirs, ours = make(1, True), make(1, False)
    for (name, one), (_, other) in zip(theirs.named_parameters(), ours.named_parameters(), strict=True):
        assert_close(other.to_local(), one.to_local(), msg=name)
        if one.device_mesh.ndim == 2:  # torch leaves what its plan does not name on `dp` alone
            assert other.placements == one.placements and other.device_mesh == one.device_mesh, name
    for source, target in ((theirs, make(2, False)), (ours, make(2, True))):
        path = f"{folder}/{id(source) == id(ours)}"
        checkpoint.save({"model": source.state_dict()}, checkpoint_id=path)
        state = {"model": target.state_dict()}
        checkpoint.load(state, checkpoint_id=path)
        target.load_state_dict(state["model"])
        for (name, one), (_, other) in zip(source.named_parameters(), target.named_parameters(), strict=True):
            assert_close(other.full_tensor(), one.full_tensor(), msg=name)
        if source is theirs:
            compare_losses(given, theirs, target)


def compare_losses(given: ParallelModel, theirs: nn.Module, ours: nn.Module) -> None:
    """Three steps of the same weights, under torch uncompiled and here compiled, give equal losses.

    In `make test` uncompiled here too: that compiling changes no loss is tested by itself.
    """
    forward = compile_if_asked("compiled" if is_thorough() else "sharded", ours)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, foreach=False) for each in (theirs, ours)]
    for step in range(3):
        batch = given.draw(torch.Generator().manual_seed(10 * step + dist.get_rank() // 2))
        losses = [run(*batch) for run in (theirs, forward)]
        assert_close(losses[1].detach(), losses[0].detach(), msg=lambda text, step=step: f"loss of step {step}: {text}")
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def test_checkpoints_interchange_with_torch(run_on_gloo_ranks, tmp_path):
    run_on_gloo_ranks(4, exchange_checkpoints, str(tmp_path))


def train_hugging_face(num_steps: int) -> None:
    """A Llama of Hugging Face with the plan that its class brings."""
    import transformers

    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=12, use_cache=False,
    )  # fmt: skip
    reference = transformers.LlamaForCausalLM(config)
    mesh = named_mesh((1, 2), ("dp", "tp"))
    model = graphshard.parallelize(copy.deepcopy(reference), mesh["tp"], reference.tp_plan)
    graphshard.fully_shard(model, mesh=mesh["dp"])
    forward = compile_if_asked("compiled", model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2, foreach=False) for each in (reference, model)]
    for step in range(num_steps):
        tokens = torch.randint(12, (2, 8), generator=torch.Generator().manual_seed(step))
        losses = [each(input_ids=tokens, labels=tokens).loss for each in (reference, forward)]
        assert_close(losses[1].detach(), losses[0].detach())
        for loss in losses:
            loss.backward()
        check_like(reference, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize("num_steps", [2, pytest.param(10, marks=pytest.mark.slow)])
def test_hugging_face_with_its_own_plan(run_on_gloo_ranks, num_steps):
    pytest.importorskip("transformers")
    run_on_gloo_ranks(2, train_hugging_face, num_steps, timeout_s=LIMIT_S)


def choose_placements() -> list[str]:
    """The choice of the ranks, one step of training with it, and the error where they choose differently."""
    mesh = named_mesh((1, 2), ("dp", "tp"))
    torch.manual_seed(42)
    reference, batch = Misnamed(names=("in", "out")), (torch.randn(4, 3, 8),)
    model = copy.deepcopy(reference)
    fast = LinkClass(latency_seconds=1e-9, bandwidth=1e12, efficiency=1.0)
    card = round_card(intra_node=fast, peak_flops={"float32": 1e9}, memory_bandwidth=1e9)
    known = {"args": batch, "hardware": card, "units": ["blocks.*"]}
    graphshard.parallelize(model, mesh["tp"], "auto", inspect=known)
    for unit in [*model.blocks, model]:
        graphshard.fully_shard(unit, mesh=mesh["dp"])
    losses = reference(*batch), compile_if_asked("compiled", model)(*batch)
    assert_close(losses[1].detach(), losses[0].detach())
    for loss in losses:
        loss.backward()
    check_like(reference, model)
    placements = [str(model.blocks[0].attn.proj.weight.placements)]
    with pytest.raises((AgreementError, ShardingError)) as error:
        other = MODELS["mlp"].build()
        known = {"args": MODELS["mlp"].draw(torch.Generator()), "hardware": card}
        known |= {"units": ["lay"]} if dist.get_rank() else {}
        graphshard.parallelize(other, mesh["tp"], "auto", inspect=known)
    return [*placements, str(error.value)]


def test_placements_chosen_by_cost(run_on_gloo_ranks):
    (placements, other), (same, own) = run_on_gloo_ranks(2, choose_placements)
    assert placements == same and "Shard(dim=0)" in placements
    assert "units: no module matches 'lay'" in own and f"rank 1 could not choose placements: {own}" in other
