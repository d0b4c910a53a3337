"""The constructor of FullyShardedDataParallel, on a process group that does nothing: policies, names, refusals."""

from __future__ import annotations

import copy
import functools
import inspect
import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fsdp1 import clean, wrap
from support.toy_models import Block, Transformer, build_mlp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp import FullyShardedDataParallel as TorchWrapper
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
)
from torch.distributed.tensor import DTensor

from graphshard import FullyShardedDataParallel
from graphshard.errors import OptionError, OptionTypeError, ParameterStateError, ShardingError
from graphshard.ir import UNIT

HYBRID = ShardingStrategy.HYBRID_SHARD
LINEARS = ModuleWrapPolicy({nn.Linear})


def wrapper_paths(model: nn.Module) -> list[str]:
    kinds = (FullyShardedDataParallel, TorchWrapper)
    return [
        clean(f"{path}.").removesuffix(".") for path, each in model.named_modules() if isinstance(each, kinds)
    ]


POLICIES: dict[str, Any] = {
    "classes": ModuleWrapPolicy({Block}),
    "custom": CustomPolicy(lambda module: isinstance(module, (Block, nn.Embedding))),
    "custom with arguments": CustomPolicy(
        lambda module: (
            {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP} if isinstance(module, Block) else False
        )
    ),
    "function": functools.partial(
        lambda_auto_wrap_policy, lambda_fn=lambda module: isinstance(module, nn.LayerNorm)
    ),
    "size": functools.partial(size_based_auto_wrap_policy, min_num_params=1000),
    "small size": functools.partial(size_based_auto_wrap_policy, min_num_params=200),
}


class Attending(nn.Module):
    """A size-based policy does not go into attention, and wraps no ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2)
        self.layers = nn.ModuleList([nn.Linear(16, 16), nn.Linear(16, 16)])
        self.again = self.layers[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.again(self.layers[1](self.attention(x, x, x)[0]))


@pytest.mark.parametrize("model", [Transformer, Attending])
@pytest.mark.parametrize("name", POLICIES)
def test_policies_choose_what_they_choose_for_fsdp1(name, model, fake_group):
    fake_group(2)
    plain = model()
    ours = wrap("sharded", copy.deepcopy(plain), auto_wrap_policy=POLICIES[name])
    assert wrapper_paths(ours) == wrapper_paths(wrap("fsdp1", plain, auto_wrap_policy=POLICIES[name]))
    assert [each.check_is_root() for each in FullyShardedDataParallel.fsdp_modules(ours)].count(True) == 1
    assert FullyShardedDataParallel.fsdp_modules(nn.Sequential(ours), root_only=True) == [ours]
    if "arguments" in name and model is Transformer:
        assert ours.layers[0].sharding_strategy is ShardingStrategy.SHARD_GRAD_OP


def test_a_module_in_two_places_is_wrapped_once(fake_group):
    fake_group(2)
    ours = wrap("sharded", Attending(), auto_wrap_policy=LINEARS)
    assert ours.again is ours.layers[0] and isinstance(ours.again, FullyShardedDataParallel)


def test_a_container_of_wrappers_does_nothing(fake_group):
    fake_group(2)
    with pytest.warns(UserWarning, match="ModuleList has no forward; its children are sharded"):
        ours = wrap("sharded", Transformer(), auto_wrap_policy=always_wrap_policy)
    assert all(isinstance(param, DTensor) for param in ours.parameters())


def test_children_of_a_container_form_one_unit(fake_group):
    fake_group(2)
    container = nn.ModuleList([nn.Linear(2, 2), nn.ModuleDict({"inner": nn.Linear(2, 3)}), nn.ReLU()])
    container.append(wrap("sharded", nn.Linear(3, 4)))
    with pytest.warns(UserWarning, match="ModuleList has no forward; its children form one unit"):
        ours = wrap("sharded", container)
    first, inner, last = container[0], container[1]["inner"], container[3].module
    assert first.__dict__[UNIT] is inner.__dict__[UNIT] is not last.__dict__[UNIT]
    assert UNIT not in container[2].__dict__
    with FullyShardedDataParallel.summon_full_params(ours):
        assert [tuple(param.shape) for param in ours.parameters()] == [
            (2, 2),
            (2,),
            (3, 2),
            (3,),
            (4, 3),
            (4,),
        ]
    with pytest.raises(
        ShardingError, match=r"ParameterList has no forward.*holds itself \(0, 1\); wrap a module"
    ):
        wrap("sharded", nn.ModuleList([nn.ParameterList([torch.ones(2), torch.ones(2)])]))


def test_a_module_is_wrapped_again(fake_group):
    """As for inference after training: the second wrapper shows the same shards."""
    fake_group(2)
    module = nn.Sequential(wrap("sharded", nn.Linear(2, 2)), nn.Linear(2, 2))
    first = wrap("sharded", module)
    second = wrap("sharded", module)
    assert all(one is other for one, other in zip(first.parameters(), second.parameters(), strict=True))
    assert second.check_is_root() and not module[0].check_is_root()
    assert list(second.state_dict()) == list(first.state_dict())
    assert copy.deepcopy(second).module.__dict__[UNIT] is not module.__dict__[UNIT]
    with pytest.raises(
        ShardingError, match="Sequential is wrapped already, with another sharding_strategy: what is"
    ):
        wrap("sharded", module, sharding_strategy=ShardingStrategy.SHARD_GRAD_OP)


def test_the_signature_is_that_of_fsdp1():
    ours, of_torch = (
        inspect.signature(cls.__init__).parameters for cls in (FullyShardedDataParallel, TorchWrapper)
    )
    assert list(ours) == list(of_torch)
    assert [each.default for each in ours.values()] == [each.default for each in of_torch.values()]


def test_what_fsdp1_shows_as_attributes(fake_group):
    fake_group(2)
    precision, offload = MixedPrecision(param_dtype=torch.bfloat16), CPUOffload(offload_params=True)
    ours = wrap("sharded", build_mlp((4, 4)), mixed_precision=precision, cpu_offload=offload)
    assert (ours.mixed_precision, ours.cpu_offload) == (precision, offload)
    assert (ours.rank, ours.world_size, ours.compute_device) == (0, 2, torch.device("cpu"))
    assert ours.sharding_strategy is ShardingStrategy.FULL_SHARD
    assert ours.process_group.size() == 2
    assert ours.backward_prefetch is BackwardPrefetch.BACKWARD_PRE
    assert (ours.forward_prefetch, ours.limit_all_gathers) == (False, True)
    plain = wrap("sharded", build_mlp((4, 4)))
    assert (plain.mixed_precision, plain.cpu_offload) == (MixedPrecision(), CPUOffload())
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = plain.nothing


def test_deprecations(fake_group):
    fake_group(2)
    with pytest.warns(FutureWarning, match="NO_SHARD is deprecated"):
        FullyShardedDataParallel(build_mlp((4, 4)), sharding_strategy=ShardingStrategy.NO_SHARD)


def test_one_rank_shards_nothing(fake_group):
    fake_group(1)
    with pytest.warns(UserWarning, match="on one rank is NO_SHARD"):
        ours = FullyShardedDataParallel(build_mlp((4, 4)))
    assert ours.sharding_strategy is ShardingStrategy.NO_SHARD
    ours(torch.ones(1, 4)).sum().backward()


def bad_calls() -> dict[str, tuple[type[Exception], str, Any]]:
    """What FSDP1 refuses, its type of error, and what ours says."""

    def hybrid_below() -> None:
        policy = CustomPolicy(
            lambda module: {"sharding_strategy": HYBRID} if isinstance(module, nn.Linear) else False
        )
        wrap("sharded", build_mlp((4, 4)), auto_wrap_policy=policy)

    def policy_on_wrapped() -> None:
        wrap("sharded", nn.Sequential(wrap("sharded", nn.Linear(4, 4))), auto_wrap_policy=LINEARS)

    def ignored_wrapper() -> None:
        inner = wrap("sharded", nn.Linear(4, 4))
        wrap("sharded", nn.Sequential(inner, nn.Linear(4, 4)), ignored_modules=[inner])

    def on(**options: Any) -> Any:
        return lambda: wrap("sharded", build_mlp((4, 4), (4, 4)), **options)

    def meta(module: nn.Module, **options: Any) -> Any:
        return lambda: wrap("sharded", module.to("meta"), **options)

    def mesh(*shape: int) -> Any:
        return init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c")[: len(shape)])

    world = dist.group.WORLD
    return {
        "group and mesh": (ValueError, "both name the ranks", on(process_group=world, device_mesh=mesh(4))),
        "both ignored": (ValueError, "pass ignored_states alone", on(ignored_modules=[], ignored_states=[])),
        "mixed ignored": (
            ValueError,
            "all parameters or all modules, but holds: Linear, Parameter",
            on(ignored_states=[nn.Linear(1, 1), nn.Parameter(torch.ones(1))]),
        ),
        "parameter as module": (
            ValueError,
            "must be modules",
            on(ignored_modules=[nn.Parameter(torch.ones(1))]),
        ),
        "ignored number": (TypeError, "ignored_modules is a int", on(ignored_modules=3)),
        "ignored wrapper": (ValueError, "holds a FullyShardedDataParallel", ignored_wrapper),
        "hybrid by hand": (ValueError, "needs process_group or device_mesh", on(sharding_strategy=HYBRID)),
        "hybrid mesh": (
            ValueError,
            "needs a 2-D device_mesh",
            on(sharding_strategy=HYBRID, device_mesh=mesh(4)),
        ),
        "hybrid group": (
            ValueError,
            "a tuple of two process",
            on(sharding_strategy=HYBRID, process_group=world),
        ),
        "hybrid nodes": (
            ValueError,
            "cannot tell the nodes of 4 ranks",
            on(sharding_strategy=HYBRID, auto_wrap_policy=LINEARS),
        ),
        "hybrid below": (ValueError, "without a second axis", hybrid_below),
        "2-D mesh": (ValueError, "needs a 1-D device_mesh", on(device_mesh=mesh(2, 2))),
        "pair": (ValueError, "needs one ProcessGroup", on(process_group=(world, world))),
        "policy on wrapped": (ValueError, "0 is one already", policy_on_wrapped),
        "policy": (TypeError, "auto_wrap_policy is a int", on(auto_wrap_policy=3)),
        "policy arguments": (
            TypeError,
            "unknown argument(s) shard",
            on(auto_wrap_policy=CustomPolicy(lambda module: {"shard": 1})),
        ),
        "strategy": (
            TypeError,
            "give a torch.distributed.fsdp.ShardingStrategy",
            on(sharding_strategy="FULL_SHARD"),
        ),
        "prefetch": (
            TypeError,
            "give a torch.distributed.fsdp.BackwardPrefetch",
            on(backward_prefetch="pre"),
        ),
        "device": (ValueError, "is cuda, but this process has no", on(device_id=torch.device("cuda", 0))),
        "device number": (ValueError, "is an accelerator's, but this process has no", on(device_id=0)),
        "no dims": (ValueError, "scalar", lambda: wrap("sharded", WithScalar())),
        "no reset": (RuntimeError, "has no reset_parameters", meta(WithScalar())),
        "init": (ValueError, "param_init_fn=3 cannot be called", meta(nn.Linear(2, 2), param_init_fn=3)),
        "no init": (
            RuntimeError,
            "has left weight, bias on the meta",
            meta(nn.Linear(2, 2), param_init_fn=print),
        ),
    }


class WithScalar(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scalar


@pytest.mark.skipif(torch.accelerator.is_available(), reason="names devices that are not there")
def test_misuse_is_refused(fake_group):
    fake_group(4)
    for name, (kind, text, call) in bad_calls().items():
        with pytest.raises((ShardingError, OptionError, OptionTypeError, ParameterStateError)) as caught:
            call()
        assert isinstance(caught.value, kind), name
        assert re.search(re.escape(text), str(caught.value)), (name, str(caught.value))


def test_no_process_group():
    with pytest.raises(ShardingError, match="start the script with torchrun"):
        wrap("sharded", nn.Linear(2, 2))


def test_a_device_without_an_index(fake_group):
    fake_group(2)
    from graphshard.fsdp1.materialize import move_to_device
    from graphshard.fsdp1.options import Options

    with pytest.warns(UserWarning, match="has no index; the current device"):
        move_to_device(
            nn.Linear(1, 1), Options(device_id=torch.device("cuda")), torch.device("cpu"), set(), set()
        )
    with pytest.raises(ShardingError, match="but the process group computes on cpu"):
        move_to_device(
            nn.Linear(1, 1), Options(device_id=torch.device("cuda", 1)), torch.device("cpu"), set(), set()
        )
    with pytest.raises(ParameterStateError, match=r"\(weight, meta\)"):
        move_to_device(nn.Linear(1, 1, device="meta"), Options(), torch.device("cpu"), set(), set())


def test_a_wrapper_of_an_ignored_module(fake_group):
    fake_group(2)
    for name in ("ignored_modules", "ignored_states"):
        model = nn.Linear(2, 2)
        with pytest.warns(
            UserWarning, match=f"{name} holds the module that is wrapped, so nothing is sharded"
        ):
            wrapper = FullyShardedDataParallel(model, **{name: [model]})
        assert not any(isinstance(param, DTensor) for param in wrapper.parameters())


def test_a_device_by_its_name(fake_group):
    fake_group(2)
    assert FullyShardedDataParallel(nn.Linear(2, 2), device_id="cpu").compute_device == torch.device("cpu")
    with pytest.raises(ShardingError, match="this process has no accelerator"):
        FullyShardedDataParallel(nn.Linear(2, 2), device_id="cuda:0")


def test_prefetches_are_accepted(fake_group):
    fake_group(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for prefetch in (None, *BackwardPrefetch):
            FullyShardedDataParallel(nn.Linear(2, 2), backward_prefetch=prefetch, forward_prefetch=True)


def test_prefetches_that_constrain_a_plan(fake_group):
    """Those that differ from FSDP1's defaults."""
    fake_group(2)

    def orders_of(**options):
        settings = FullyShardedDataParallel(nn.Linear(2, 2), **options).module.__dict__[UNIT].settings
        return settings.forward_order, settings.backward_order

    assert orders_of() == orders_of(backward_prefetch=BackwardPrefetch.BACKWARD_PRE) == ("", "")
    assert orders_of(limit_all_gathers=False, backward_prefetch=None) == ("", "none")
    assert orders_of(backward_prefetch=BackwardPrefetch.BACKWARD_POST, forward_prefetch=True) == (
        "pre",
        "post",
    )
