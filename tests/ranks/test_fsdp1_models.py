"""Models that FSDP1 refuses, or that other libraries ask about, under FullyShardedDataParallel."""

import functools
from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
from support.fsdp1 import full_gradients, full_parameters, wrap
from support.implementations import GRAPHSHARD, compile_if_asked
from support.toy_models import WORKLOADS, Block, Transformer, build_mlp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from graphshard import FSDPModule, FullyShardedDataParallel
from graphshard.errors import FlatParameterError, StaleOptimizerError

LINEARS = ModuleWrapPolicy({nn.Linear})


class Uneven(nn.Module):
    """One unit with frozen, float64 and integer parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.wide = nn.Linear(4, 5), nn.Linear(5, 3).double()
        self.frozen.requires_grad_(False)
        self.offsets = nn.Parameter(torch.arange(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(self.frozen(x).double()) + self.offsets


def train_uneven(implementation: str) -> None:
    for use_orig_params in (False, True):
        torch.manual_seed(0)
        plain = Uneven()
        torch.manual_seed(0)
        wrapper = wrap(implementation, Uneven(), use_orig_params=use_orig_params)
        forward = compile_if_asked(implementation, wrapper)
        for rank in range(2):
            (plain(torch.full((2, 4), 1.0 + rank)).square().sum() / 2).backward()
        forward(torch.full((2, 4), 1.0 + dist.get_rank())).square().sum().backward()
        expected = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
        assert_close(full_gradients(wrapper), expected)
        assert set(expected) == {"wide.weight", "wide.bias"}


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_parameters_that_differ_in_one_unit(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_uneven, implementation)


def checkpoint_activations(implementation: str) -> None:
    """Around the wrappers and inside of them; `module` looks through; names in state dicts are clean."""
    workload, policy = WORKLOADS["transformer"], ModuleWrapPolicy({Block})
    torch.manual_seed(0)
    plain = Transformer(num_layers=1)
    names = list(plain.state_dict())
    losses = []
    for place in ("none", "around", "inside"):
        torch.manual_seed(0)
        wrapper = wrap(implementation, Transformer(num_layers=1), auto_wrap_policy=policy)
        if place != "none":
            kind = FullyShardedDataParallel if place == "around" else Block
            apply_activation_checkpointing(
                wrapper,
                checkpoint_wrapper_fn=functools.partial(checkpoint_wrapper),
                check_fn=lambda module, kind=kind, root=wrapper: (
                    isinstance(module, kind) and module is not root
                ),
            )
        assert isinstance(FullyShardedDataParallel.fsdp_modules(wrapper)[1].module, Block)
        loss = workload.loss(compile_if_asked(implementation, wrapper), workload.batch_of(dist.get_rank(), 0))
        loss.backward()
        losses.append((loss.detach(), full_gradients(wrapper)))
        assert list(wrapper.state_dict()) == names
        assert not any(isinstance(value, DTensor) for value in wrapper.state_dict().values())
        wrapper.load_state_dict(plain.state_dict())
        assert_close(full_parameters(wrapper)["norm.weight"], plain.norm.weight.detach())
    assert_close(losses[1], losses[0])
    assert_close(losses[2], losses[0])


def test_activation_checkpointing(run_on_gloo_ranks):
    run_on_gloo_ranks(2, checkpoint_activations, "sharded")


def answer_trainers() -> None:
    """What libraries ask of a model: nothing claims to be FSDP1, and what works with DTensors works."""
    wrapper = wrap("sharded", build_mlp((4, 5), (5, 2)), auto_wrap_policy=LINEARS)
    assert not isinstance(wrapper, torch_fsdp.FullyShardedDataParallel)
    assert torch_fsdp.FullyShardedDataParallel.fsdp_modules(wrapper) == []
    assert not any(getattr(each, "_is_fsdp_managed_module", False) for each in wrapper.modules())
    # FSDP2's class is that of the modules inside; so checks of a model's modules find it.
    assert not isinstance(wrapper, torch_fsdp.FSDPModule) and isinstance(
        wrapper.module, torch_fsdp.FSDPModule
    )
    assert any(isinstance(each, FSDPModule) for each in wrapper.modules())
    assert all(isinstance(param, DTensor) for param in wrapper.parameters())
    wrapper(torch.ones(2, 4)).square().sum().backward()
    expected = full_gradients(wrapper)
    total = nn.utils.clip_grad_norm_(wrapper.parameters(), 1e9)
    norm = torch.stack([grad.norm() for grad in expected.values()]).norm()
    assert_close(total.full_tensor(), norm)
    assert_close(wrapper.clip_grad_norm_(1e9), norm)
    for name in ("_flat_param", "_handle", "_all_handles"):
        assert not hasattr(wrapper, name)
        with pytest.raises(FlatParameterError, match=f"has no {name}: there are no flat parameters"):
            getattr(wrapper, name)
    handle = wrapper[0]._unshard(async_op=True)
    handle.wait()
    assert not isinstance(wrapper[0].module.weight, DTensor) and isinstance(wrapper[2].module.weight, DTensor)
    wrapper[0].reshard()
    assert isinstance(wrapper[0].module.weight, DTensor)


def test_what_trainers_ask(run_on_gloo_ranks):
    run_on_gloo_ranks(2, answer_trainers)


def step_in_backward(implementation: str) -> None:
    """Optimizers in hooks that run once a parameter's gradient is reduced."""
    results = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        wrapper = wrap(
            implementation, build_mlp((4, 5), (5, 2)), auto_wrap_policy=LINEARS, use_orig_params=True
        )
        optimizers = {param: torch.optim.SGD([param], lr=0.1) for param in wrapper.parameters()}

        def step(param: nn.Parameter, optimizers=optimizers) -> None:
            optimizers[param].step()
            optimizers[param].zero_grad()

        for param in wrapper.parameters() if in_backward else ():
            param.register_post_accumulate_grad_hook(step)
        for _ in range(2):
            compile_if_asked(implementation, wrapper)(torch.ones(2, 4)).square().sum().backward()
            for param in () if in_backward else wrapper.parameters():
                step(param)
        results.append(full_parameters(wrapper))
    assert_close(results[1], results[0], rtol=0, atol=0)


def test_optimizer_in_backward(run_on_gloo_ranks):
    run_on_gloo_ranks(2, step_in_backward, "sharded")


def apply_in_backward(implementation: str) -> None:
    """Optimizers of `_apply_optimizer_in_backward` without hooks are stepped by the wrapper, as FSDP1 steps them."""
    from torch.distributed.optim import _apply_optimizer_in_backward  # warns as it is imported

    results = []
    for kind in ("fsdp1", implementation):
        torch.manual_seed(0)
        wrapper = wrap(kind, build_mlp((4, 5), (5, 2)), auto_wrap_policy=LINEARS)
        _apply_optimizer_in_backward(torch.optim.Adam, wrapper.parameters(), {"lr": 0.1}, register_hook=False)
        forward = compile_if_asked(kind, wrapper)
        for step in range(3):
            with wrapper.no_sync() if step == 1 else nullcontext():
                forward(torch.full((2, 4), 1.0 + step)).square().sum().backward()
            assert all(param.grad is None for param in wrapper.parameters()) or kind == "fsdp1"
        results.append(full_parameters(wrapper))
    assert_close(results[1], results[0])
    model = build_mlp((4, 5), (5, 2))
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1}, register_hook=False)
    with pytest.raises(StaleOptimizerError, match="this SGD was made before sharding and holds weight"):
        wrap(implementation, model, auto_wrap_policy=LINEARS)


@pytest.mark.parametrize("implementation", ["sharded", "compiled"])
def test_applied_optimizer_in_backward(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, apply_in_backward, implementation)


def compile_in_parts() -> None:
    """Inner wrappers that are compiled, a model compiled before it is wrapped, and one around two wrappers."""

    def build() -> nn.Sequential:
        torch.manual_seed(0)
        return build_mlp((4, 5), (5, 2))

    plain = build()
    for rank in range(2):
        (plain(torch.full((3, 4), 1.0 + rank)).square().sum() / 2).backward()
    expected = {name: param.grad for name, param in plain.named_parameters()}
    inner = wrap("sharded", build(), auto_wrap_policy=LINEARS)
    for each in FullyShardedDataParallel.fsdp_modules(inner)[1:]:
        each.compile(backend="graphshard")
    before = wrap("sharded", torch.compile(build(), backend="graphshard"))
    two = build()
    two[0], two[2] = wrap("sharded", two[0]), wrap("sharded", two[2])
    whole = wrap("sharded", build(), auto_wrap_policy=LINEARS)
    forwards = [
        inner,
        before,
        torch.compile(two, backend="graphshard"),
        torch.compile(whole, backend="graphshard"),
    ]
    for model, forward in zip((inner, before, two, whole), forwards, strict=True):
        forward(torch.full((3, 4), 1.0 + dist.get_rank())).square().sum().backward()
        assert_close(full_gradients(model), expected)
    compiled = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with FullyShardedDataParallel.summon_full_params(whole):
        pass
    whole.state_dict()
    forwards[-1](torch.full((3, 4), 1.0)).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == compiled


def test_parts_that_are_compiled(run_on_gloo_ranks):
    run_on_gloo_ranks(2, compile_in_parts)


def differentiate_twice() -> None:
    """A penalty on the gradient of the inputs."""
    found = []
    for is_sharded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))
        model = wrap("sharded", model, auto_wrap_policy=LINEARS) if is_sharded else model
        x = torch.ones(3, 4, requires_grad=True)
        (grad,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        grad.square().sum().backward()
        found.append(full_gradients(model))
    assert_close(found[1], found[0])


def test_gradients_of_gradients(run_on_gloo_ranks):
    run_on_gloo_ranks(2, differentiate_twice)


def migrate_from_ddp() -> None:
    """NO_SHARD is DistributedDataParallel: the same gradients, whole parameters on each rank."""
    batch = torch.full((2, 4), 1.0 + dist.get_rank())
    torch.manual_seed(0)
    ddp = nn.parallel.DistributedDataParallel(build_mlp((4, 5), (5, 2)))
    torch.manual_seed(0)
    whole = wrap("sharded", build_mlp((4, 5), (5, 2)), sharding_strategy=ShardingStrategy.NO_SHARD)
    for model in (ddp, whole):
        with model.no_sync():
            model(batch).sum().backward()
        model(batch).square().sum().backward()
    assert_close(full_gradients(whole), {name: param.grad for name, param in ddp.module.named_parameters()})
    assert [param.to_local().shape for param in whole.parameters()] == [
        param.shape for param in ddp.parameters()
    ]
    assert list(whole.state_dict()) == list(ddp.module.state_dict())


def test_from_ddp(run_on_gloo_ranks):
    run_on_gloo_ranks(2, migrate_from_ddp)


def migrate_from_zero() -> None:
    """Stages 2 and 3 of ZeRO: parameters, gradients and the optimizer's state are cut over the ranks."""
    for strategy in (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.FULL_SHARD):
        wrapper = wrap(
            "sharded", build_mlp((4, 6), (6, 2)), auto_wrap_policy=LINEARS, sharding_strategy=strategy
        )
        optimizer = torch.optim.Adam(wrapper.parameters())
        wrapper(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        for param in wrapper.parameters():
            held = [
                param,
                param.grad,
                optimizer.state[param]["exp_avg"],
                optimizer.state[param]["exp_avg_sq"],
            ]
            assert all(2 * value.to_local().numel() == value.numel() for value in held)


def test_from_zero(run_on_gloo_ranks):
    run_on_gloo_ranks(2, migrate_from_zero)


class Listed(nn.Module):
    """Layers in a list that has a wrapper of its own; the forward runs some of them, in another order."""

    def __init__(self, wrap_list) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.layers = wrap_list(nn.ModuleList([nn.Linear(6, 2), nn.Linear(6, 6), nn.Linear(6, 6)]))

    def forward(self, x: torch.Tensor, num_layers: int) -> torch.Tensor:
        x = self.first(x)
        for each in range(num_layers, 0, -1):
            x = self.layers[each](torch.tanh(x))
        return self.layers[0](x)


def train_listed(implementation: str) -> None:
    torch.manual_seed(0)
    plain = Listed(lambda layers: layers)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match="its children form one unit"):
        wrapper = wrap(implementation, Listed(functools.partial(wrap, implementation)))
    forward = compile_if_asked(implementation, wrapper)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (plain, wrapper)]
    for num_layers in (2, 1, 2):
        for rank in range(2):
            (plain(torch.full((2, 4), 1.0 + rank), num_layers).square().sum() / 2).backward()
        forward(torch.full((2, 4), 1.0 + dist.get_rank()), num_layers).square().sum().backward()
        expected = {name: param.grad for name, param in plain.named_parameters() if param.grad is not None}
        assert_close({name: grad for name, grad in full_gradients(wrapper).items() if name in expected}, expected)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    assert_close(full_parameters(wrapper), {name: param.detach() for name, param in plain.named_parameters()})


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_a_container_with_a_wrapper(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_listed, implementation)


def wrap_again() -> None:
    """After training, and while a forward still waits for its backward."""
    torch.manual_seed(0)
    plain, module = build_mlp((4, 5), (5, 2)), build_mlp((4, 5), (5, 2))
    module.load_state_dict(plain.state_dict())
    module[0] = wrap("sharded", module[0])
    first = wrap("sharded", module)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    x = torch.randn(3, 4)
    first(x).square().sum().backward()
    optimizer.step()
    expected = first(x)
    second = wrap("sharded", module).to("cpu")
    assert_close(second(x), expected)
    optimizer.zero_grad()
    expected.sum().backward()
    gradients = full_gradients(second)
    plain.load_state_dict({name: value for name, value in full_parameters(second).items()})
    plain(x).sum().backward()
    assert_close(gradients, {name: param.grad for name, param in plain.named_parameters()})


def test_a_module_is_wrapped_again(run_on_gloo_ranks):
    run_on_gloo_ranks(2, wrap_again)
