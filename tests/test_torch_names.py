"""`patch_torch`: what it replaces, what it leaves alone, and that everything is put back."""

import sys
import types
from collections.abc import Iterator

import pytest
import torch.distributed._composable.fsdp
import torch.distributed.fsdp
from torch import nn
from torch.distributed import pipelining

import graphshard

NAMES = ("fully_shard", "register_fsdp_forward_method", "share_comm_ctx")


def every_name() -> dict[str, object]:
    """All attributes of all loaded modules, by place; not those of this file and of hypothesis, which keeps times."""
    return {
        f"{module_name}.{name}": value
        for module_name, module in list(sys.modules.items())
        if isinstance(module, types.ModuleType)
        and module_name != __name__
        and not module_name.startswith("hypothesis.")
        for name, value in list(vars(module).items())
    }


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """A loaded module that has imported `fully_shard` from torch under a name of its own."""
    module = types.ModuleType("a_trainer")
    module.shard_it = torch.distributed.fsdp.fully_shard
    monkeypatch.setitem(sys.modules, "a_trainer", module)
    return module


@pytest.fixture
def imported_inside(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.ModuleType]:
    """For a module that imports names while they are replaced."""
    module = types.ModuleType("imported_inside")
    monkeypatch.setitem(sys.modules, "imported_inside", module)
    yield module


def test_a_trainer_shards_with_graphshard(fake_group, trainer):
    mesh = fake_group(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    with graphshard.patch_torch() as replaced:
        trainer.shard_it(model[0], mesh=mesh)
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
        torch.distributed.fsdp.register_fsdp_forward_method(model, "extra_repr")
        torch.distributed.fsdp.share_comm_ctx([model[0], model])
    assert "a_trainer.shard_it" in replaced
    assert {f"torch.distributed.fsdp.{name}" for name in NAMES} <= set(replaced)
    assert "torch.distributed._composable.fsdp.fully_shard.fully_shard" in replaced
    assert list(replaced) == sorted(replaced)
    assert isinstance(model, graphshard.FSDPModule) and isinstance(model[0], graphshard.FSDPModule)
    # Outside again, torch's function shards and is refused a model of graphshard's.
    with pytest.raises(graphshard.GraphShardError, match="graphshard has sharded"):
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    plain = nn.Linear(4, 4)
    trainer.shard_it(plain, mesh=mesh)
    assert isinstance(plain, torch.distributed.fsdp.FSDPModule) and not isinstance(
        plain, graphshard.FSDPModule
    )


@pytest.mark.parametrize("fails", [False, True])
def test_everything_is_put_back(trainer, fails):
    before = every_name()
    try:
        with graphshard.patch_torch() as replaced:
            changed = {
                place for place, value in every_name().items() if before.get(place, value) is not value
            }
            assert changed == set(replaced)
            if fails:
                raise KeyError("inside")
    except KeyError:
        assert fails
    after = every_name()
    assert [place for place, value in before.items() if after[place] is not value] == []


def test_a_module_imported_inside_gets_torchs_names_back(imported_inside):
    theirs = torch.distributed.fsdp.fully_shard
    with graphshard.patch_torch():
        imported_inside.from_torch = torch.distributed.fsdp.fully_shard
        imported_inside.from_graphshard = graphshard.fully_shard
    assert imported_inside.from_torch is theirs
    assert imported_inside.from_graphshard is graphshard.fully_shard


def test_a_kept_reference_calls_torchs_function_afterwards(fake_group):
    mesh = fake_group(2)
    with graphshard.patch_torch():
        kept = torch.distributed.fsdp.fully_shard
    model = nn.Linear(4, 4)
    kept(model, mesh=mesh)
    assert isinstance(model, torch.distributed.fsdp.FSDPModule) and not isinstance(
        model, graphshard.FSDPModule
    )


def test_the_end_of_a_nested_block_ends_that_alone(fake_group):
    mesh = fake_group(2)
    theirs = torch.distributed.fsdp.fully_shard
    model = nn.Linear(4, 4)
    with graphshard.patch_torch():
        outer = torch.distributed.fsdp.fully_shard
        with graphshard.patch_torch():
            pass
        assert torch.distributed.fsdp.fully_shard is outer
        torch.distributed.fsdp.fully_shard(model, mesh=mesh)
    assert isinstance(model, graphshard.FSDPModule)
    assert torch.distributed.fsdp.fully_shard is theirs


def test_classes_policies_and_states_stay():
    classes = ("FSDPModule", "UnshardHandle", "MixedPrecisionPolicy", "CPUOffloadPolicy", "OffloadPolicy")
    before = [getattr(torch.distributed.fsdp, name) for name in classes]
    state = torch.distributed.fsdp.fully_shard.state
    with graphshard.patch_torch() as replaced:
        assert [getattr(torch.distributed.fsdp, name) for name in classes] == before
        # Torch's pipeline stages ask for it.
        assert pipelining.stage.fully_shard.state is state
        assert not [place for place in replaced if place.startswith("graphshard")]
    assert graphshard.MixedPrecisionPolicy is torch.distributed.fsdp.MixedPrecisionPolicy
