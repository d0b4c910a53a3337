"""State dicts and torch.distributed.checkpoint: what is saved on some ranks is loaded on others."""

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from support.implementations import EVERY, UNCOMPILED, compile_if_asked, shard_units, world_mesh
from support.parity import check_sharded_parity, make_adam, start_lockstep
from support.toy_models import WORKLOADS
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.testing import assert_close

WORKLOAD = "mlp_5_rows"
GLOBAL_BATCH = 8


def build_sharded(implementation: str, workload_name: str = WORKLOAD, seed: int = 42) -> nn.Module:
    torch.manual_seed(seed)
    model = WORKLOADS[workload_name].build()
    return shard_units(implementation, model, WORKLOADS[workload_name].list_units(model))


def check_state_dict(implementation: str, workload_name: str) -> None:
    """Keys are the unsharded model's, values are DTensors that share the parameters' storage."""
    model = build_sharded(implementation, workload_name)
    torch.manual_seed(42)
    reference = WORKLOADS[workload_name].build()
    WORKLOADS[workload_name].loss(
        model, WORKLOADS[workload_name].batch_of(0, 0)
    )  # must leave nothing unsharded
    state, expected = model.state_dict(), reference.state_dict()
    assert list(state) == list(expected)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, value in state.items():
        assert isinstance(value, DTensor), name
        assert value.to_local().data_ptr() == parameters[name].to_local().data_ptr(), name
        assert_close(value.full_tensor(), expected[name], rtol=0, atol=0)


def distribute_state(model: nn.Module) -> dict[str, DTensor]:
    """The state dict of an unsharded model, cut over the ranks."""
    mesh = world_mesh()
    return {name: distribute_tensor(value, mesh, [Shard(0)]) for name, value in model.state_dict().items()}


def load_state(implementation: str, assign: bool) -> None:
    """Loading another model's DTensors changes the next forward, and training goes on from there."""
    lockstep = start_lockstep(WORKLOADS[WORKLOAD], implementation)
    lockstep.train(2)
    torch.manual_seed(7)
    other = WORKLOADS[WORKLOAD].build()
    lockstep.reference.load_state_dict(other.state_dict())
    state = distribute_state(other)
    pointers = {name: value.to_local().data_ptr() for name, value in lockstep.model.named_parameters()}
    lockstep.model.load_state_dict(state, assign=assign)
    if not assign:
        found = {name: value.to_local().data_ptr() for name, value in lockstep.model.named_parameters()}
        assert found == pointers, "loading without assign copies in place"
    check_sharded_parity_of_values(lockstep.reference, lockstep.model)
    lockstep.optimizers = [make_adam(lockstep.reference.parameters()), make_adam(lockstep.model.parameters())]
    for model in (lockstep.reference, lockstep.model):
        model.zero_grad()
    lockstep.train(2)


def check_sharded_parity_of_values(reference: nn.Module, model: nn.Module) -> None:
    for (name, expected), found in zip(reference.named_parameters(), model.parameters(), strict=True):
        assert_close(found.full_tensor(), expected.detach(), rtol=0, atol=0, msg=name)


def load_on_meta(implementation: str) -> None:
    """A model never materialised takes its values from assigned DTensors."""
    torch.manual_seed(42)
    reference = WORKLOADS[WORKLOAD].build()
    with torch.device("meta"):
        model = WORKLOADS[WORKLOAD].build()
    shard_units(implementation, model, WORKLOADS[WORKLOAD].list_units(model))
    state = distribute_state(reference)
    model.load_state_dict(state, assign=True)
    check_sharded_parity(reference, model)
    inputs = torch.ones(3, 4)
    assert_close(compile_if_asked(implementation, model)(inputs), reference(inputs))


def load_unsharded_state(implementation: str) -> None:
    model = build_sharded(implementation)
    before = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
    with pytest.raises(RuntimeError):
        model.load_state_dict(WORKLOADS[WORKLOAD].build().state_dict())
    after = {name: value.full_tensor() for name, value in model.state_dict().items()}
    assert all(torch.equal(after[name], value) for name, value in before.items())


def assign_unsharded_state() -> None:
    """FSDP2 accepts this and trains unsharded parameters; here loading or the next forward refuses it."""
    model = build_sharded("sharded")
    with pytest.raises(RuntimeError, match=r"0\.weight"):
        model.load_state_dict(WORKLOADS[WORKLOAD].build().state_dict(), assign=True)
        model(torch.ones(2, 4))


def keep_state_dict_alias(implementation: str) -> None:
    """A state dict taken once follows five optimizer steps."""
    lockstep = start_lockstep(WORKLOADS[WORKLOAD], implementation)
    state = lockstep.model.state_dict()
    lockstep.train(5)
    for name, parameter in lockstep.model.named_parameters():
        assert_close(state[name].to_local(), parameter.detach().to_local(), rtol=0, atol=0)
        assert_close(state[name].full_tensor(), dict(lockstep.reference.named_parameters())[name].detach())


def gather_full_state(implementation: str) -> None:
    """The whole state on rank 0 only, and back from rank 0 to every rank."""
    model = build_sharded(implementation)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=options)
    torch.manual_seed(42)
    reference = WORKLOADS[WORKLOAD].build()
    if dist.get_rank() == 0:
        assert list(full) == list(reference.state_dict())
        for name, value in full.items():
            assert not isinstance(value, DTensor)
            assert_close(value, reference.state_dict()[name], rtol=0, atol=0)
    else:
        assert full == {}
    other = build_sharded(implementation, seed=7)
    set_model_state_dict(
        other, full, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    )
    check_sharded_parity(reference, other)


def train_global_batch(forward: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """One step on a batch of fixed global size, split evenly over the ranks; the loss of all of it."""
    workload = WORKLOADS[WORKLOAD]
    (inputs,) = workload.batch_of(0, step, GLOBAL_BATCH)
    mine = inputs.chunk(dist.get_world_size())[dist.get_rank()]
    optimizer.zero_grad()
    loss = workload.loss(forward, (mine,))
    loss.backward()
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def save_then_train_on(implementation: str, folder: str) -> tuple[dict[str, Tensor], list[float]]:
    """Two steps, save, two more; the saved values and the losses of the steps after saving."""
    model = build_sharded(implementation)
    optimizer = make_adam(model.parameters())
    forward = compile_if_asked(implementation, model)
    for step in range(2):
        train_global_batch(forward, optimizer, step)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    values = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
    return values, [train_global_batch(forward, optimizer, step) for step in (2, 3)]


def save_while_training(implementation: str, folder: str) -> tuple[dict[str, Tensor], list[float]]:
    """As `save_then_train_on`, but the two steps after saving run while a thread still writes.

    The thread talks to the other ranks on a group of its own: on the training's group its messages would mix
    with the training's.
    """
    group = dist.new_group(backend="gloo")
    model = build_sharded(implementation)
    optimizer = make_adam(model.parameters())
    for step in range(2):
        train_global_batch(model, optimizer, step)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    values = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
    written = dcp.async_save(
        {"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder, process_group=group
    )
    losses = [train_global_batch(model, optimizer, step) for step in (2, 3)]
    written.result()
    dist.destroy_process_group(group)
    return values, losses


def build_unsharded(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return WORKLOADS[WORKLOAD].build()


def save_unsharded_then_train_on(folder: str) -> tuple[dict[str, Tensor], list[float]]:
    """What `save_then_train_on` does, on one rank and unsharded."""
    model = build_unsharded(42)
    optimizer = make_adam(model.parameters())
    for step in range(2):
        train_global_batch(model, optimizer, step)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    values = copy.deepcopy(model.state_dict())
    return values, [train_global_batch(model, optimizer, step) for step in (2, 3)]


def load_unsharded_then_train_on(folder: str) -> tuple[dict[str, Tensor], list[float]]:
    """What `load_then_train_on` does, on one rank and unsharded."""
    model = build_unsharded(7)
    optimizer = make_adam(model.parameters())
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    values = copy.deepcopy(model.state_dict())
    return values, [train_global_batch(model, optimizer, step) for step in (2, 3)]


def load_then_train_on(implementation: str, folder: str) -> tuple[dict[str, Tensor], list[float]]:
    """Load into a model of other weights; the loaded values and the losses of the steps after loading."""
    model = build_sharded(implementation, seed=7)
    optimizer = make_adam(model.parameters())
    model_state, optimizer_state = get_state_dict(model, optimizer)
    dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    values = {name: value.full_tensor().clone() for name, value in model.state_dict().items()}
    forward = compile_if_asked(implementation, model)
    return values, [train_global_batch(forward, optimizer, step) for step in (2, 3)]


@pytest.mark.parametrize("workload", ["mlp_5_rows", "transformer"])
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_state_dict_shares_storage(run_on_gloo_ranks, implementation, workload):
    run_on_gloo_ranks(2, check_state_dict, implementation, workload)


@pytest.mark.parametrize("assign", [False, True], ids=["copy", "assign"])
@pytest.mark.parametrize("implementation", EVERY)
def test_loaded_state_is_used_and_trained(run_on_gloo_ranks, implementation, assign):
    run_on_gloo_ranks(2, load_state, implementation, assign)


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_loading_into_a_meta_model(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, load_on_meta, implementation)


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_loading_unsharded_state_is_refused(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, load_unsharded_state, implementation)


def test_assigning_unsharded_state_is_refused(run_on_gloo_ranks):
    run_on_gloo_ranks(2, assign_unsharded_state)


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_state_dict_follows_training(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, keep_state_dict_alias, implementation)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_full_state_on_rank_zero_and_back(run_on_gloo_ranks, implementation, world_size):
    run_on_gloo_ranks(world_size, gather_full_state, implementation)


@pytest.mark.parametrize("num_loading_ranks", [1, 2, 4])
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_checkpoint_of_two_ranks_continues_on_others(
    run_on_gloo_ranks, tmp_path: Path, implementation, num_loading_ranks
):
    saved = run_on_gloo_ranks(2, save_then_train_on, implementation, str(tmp_path))
    loaded = run_on_gloo_ranks(num_loading_ranks, load_then_train_on, implementation, str(tmp_path))
    check_continued(saved, loaded)


def check_continued(saved: list, loaded: list) -> None:
    """Every rank loaded what was saved, bit for bit, and went on with the losses of the run that saved."""
    for values, losses in loaded:
        assert_close(values, saved[0][0], rtol=0, atol=0)
        assert losses == pytest.approx(saved[0][1], rel=1e-5)


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_checkpoint_of_four_ranks_continues_on_two(run_on_gloo_ranks, tmp_path: Path, implementation):
    saved = run_on_gloo_ranks(4, save_then_train_on, implementation, str(tmp_path))
    check_continued(saved, run_on_gloo_ranks(2, load_then_train_on, implementation, str(tmp_path)))


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_checkpoint_continues_unsharded(run_on_gloo_ranks, tmp_path: Path, implementation):
    saved = run_on_gloo_ranks(2, save_then_train_on, implementation, str(tmp_path))
    check_continued(saved, run_on_gloo_ranks(1, load_unsharded_then_train_on, str(tmp_path)))


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_unsharded_checkpoint_continues_sharded(run_on_gloo_ranks, tmp_path: Path, implementation):
    saved = run_on_gloo_ranks(1, save_unsharded_then_train_on, str(tmp_path))
    check_continued(saved, run_on_gloo_ranks(2, load_then_train_on, implementation, str(tmp_path)))


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_checkpoint_is_written_while_training_goes_on(run_on_gloo_ranks, tmp_path: Path, implementation):
    saved = run_on_gloo_ranks(2, save_while_training, implementation, str(tmp_path))
    check_continued(saved, run_on_gloo_ranks(2, load_then_train_on, implementation, str(tmp_path)))


@pytest.mark.parametrize(
    ("saving", "loading"), [("fsdp2", "sharded"), ("sharded", "fsdp2"), ("compiled", "compiled")]
)
def test_checkpoint_moves_between_implementations(run_on_gloo_ranks, tmp_path: Path, saving, loading):
    saved = run_on_gloo_ranks(2, save_then_train_on, saving, str(tmp_path))
    loaded = run_on_gloo_ranks(2, load_then_train_on, loading, str(tmp_path))
    assert_close(loaded[0][0], saved[0][0], rtol=0, atol=0)
    assert loaded[0][1] == pytest.approx(saved[0][1], rel=1e-5)
