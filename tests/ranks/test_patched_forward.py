"""A forward that was set on a module itself, as trainers patch it, before the module is sharded."""

import copy
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.implementations import EVERY, GRAPHSHARD, compile_if_asked, pick_fully_shard, world_mesh
from support.parity import check_sharded_parity
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing import assert_close

Run = Callable[..., list[Any]]


class Scaled(nn.Module):
    """A layer, and a parameter that only a patched forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.rand(4))

    def forward(self, x: Tensor, shift: float = 0.0) -> Tensor:
        return self.layer(x) + shift


def patch_with_a_closure(module: nn.Module) -> None:
    """As accelerate: the bound method is kept, wrapped and set again."""
    original = module.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return original(*args, **kwargs) * 2

    module.forward = forward


def patch_with_a_method(module: nn.Module) -> None:
    """As kernels that replace the forward of a model: a function that reads parameters itself, bound to the module."""

    def forward(self: Any, x: Tensor, shift: float = 0.0) -> Tensor:
        return nn.functional.linear(x, self.layer.weight * self.scale, self.layer.bias).relu() + shift

    module.forward = types.MethodType(forward, module)


def patch_with_a_partial(module: nn.Module) -> None:
    module.forward = functools.partial(type(module).forward, module, shift=2.0)


PATCHES = {each.__name__: each for each in (patch_with_a_closure, patch_with_a_method, patch_with_a_partial)}


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Scaled(), nn.ReLU(), Scaled())


def train_patched(implementation: str, patch: str, inner: bool) -> None:
    """The forward of the root or of inner units is patched; two steps."""
    reference, model = _model(), _model()
    patched = PATCHES[patch]
    if patch == "patch_with_a_closure" and not inner:
        targets = [[reference], [model]]
    else:
        targets = [[each for each in root if isinstance(each, Scaled)] for root in (reference, model)]
    for module in [*targets[0], *targets[1]]:
        patched(module)
    fully_shard = pick_fully_shard(implementation)
    for unit in [each for each in model if isinstance(each, Scaled)] if inner else []:
        fully_shard(unit, mesh=world_mesh())
    fully_shard(model, mesh=world_mesh())
    forward = compile_if_asked(implementation, model)
    batches = [torch.full((2, 4), 1.0 + rank) for rank in range(dist.get_world_size())]
    for _ in range(2):
        reference.zero_grad()
        model.zero_grad()
        for each in batches:
            (reference(each).sum() / len(batches)).backward()
        expected = reference(batches[dist.get_rank()])
        found = forward(batches[dist.get_rank()])
        assert_close(found, expected)
        found.sum().backward()
        check_sharded_parity(reference, model)
    assert "shift" in inspect.signature(model[0].forward).parameters or patch == "patch_with_a_partial"


@pytest.mark.compiles("patch_with_a_method-root", "patch_with_a_partial-units")
@pytest.mark.parametrize("inner", [True, False], ids=["units", "root"])
@pytest.mark.parametrize("patch", sorted(PATCHES))
@pytest.mark.parametrize("implementation", EVERY)
def test_a_patched_forward(run_on_gloo_ranks: Run, implementation: str, patch: str, inner: bool) -> None:
    run_on_gloo_ranks(2, train_patched, implementation, patch, inner)


def cast_in_a_patched_forward(implementation: str) -> None:
    """The policy of an inner unit whose forward is patched: inputs, parameters and outputs."""
    seen = []

    def forward(self: Any, x: Tensor) -> Tensor:
        seen.append((x.dtype, self.layer.weight.dtype))
        return self.layer(x)

    model = _model()
    for each in (model[0], model[2]):
        each.forward = types.MethodType(forward, each)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    fully_shard = pick_fully_shard(implementation)
    for each in (model[0], model[2]):
        fully_shard(each, mesh=world_mesh(), mp_policy=policy)
    fully_shard(model, mesh=world_mesh())
    output = compile_if_asked(implementation, model)(torch.ones(2, 4))
    assert output.dtype == torch.float32 and set(seen) == {(torch.bfloat16, torch.bfloat16)}


@pytest.mark.parametrize("implementation", EVERY)
def test_a_patched_forward_casts(run_on_gloo_ranks: Run, implementation: str) -> None:
    run_on_gloo_ranks(2, cast_in_a_patched_forward, implementation)


def take_the_patch_off(implementation: str) -> None:
    """The patch is deleted, set after sharding and registered, or copied with the model."""
    from graphshard import fully_shard, register_fsdp_forward_method

    x = torch.ones(2, 4)
    model = Scaled()
    plain = model(x)
    patch_with_a_method(model)
    replaced = model(x)
    fully_shard(model, mesh=world_mesh())
    copied = copy.deepcopy(model)
    with torch.no_grad():
        model.scale.zero_()  # the copy has parameters of its own
    assert_close(compile_if_asked(implementation, copied)(x), replaced)
    for each in (model, copied):
        del each.forward
        assert_close(compile_if_asked(implementation, each)(x), plain)
    patch_with_a_method(copied)
    register_fsdp_forward_method(copied, "forward")
    assert_close(compile_if_asked(implementation, copied)(x), replaced)


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_a_patch_that_goes_and_comes(run_on_gloo_ranks: Run, implementation: str) -> None:
    run_on_gloo_ranks(2, take_the_patch_off, implementation)
