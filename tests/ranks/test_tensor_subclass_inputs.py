"""Inputs that are tensor subclasses: several inputs of a graph, with one gradient, several, or none."""

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.implementations import EVERY, compile_if_asked, shard_units
from support.parity import check_sharded_parity
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing import assert_close
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map

aten = torch.ops.aten


class Scaled(torch.Tensor):
    """Whole numbers and a scale for each row; every op computes with their products."""

    @staticmethod
    def __new__(cls, numbers: Tensor, scale: Tensor) -> "Scaled":
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype, device=numbers.device)

    def __init__(self, numbers: Tensor, scale: Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _context: Any, _size: Any, _stride: Any) -> "Scaled":
        return Scaled(inner["numbers"], inner["scale"])

    def __repr__(self) -> str:
        """Torch 2.11 prints it while it compiles; the usual text reads values, which there are none of then."""
        return f"Scaled({tuple(self.shape)})"

    def product(self) -> Tensor:
        return self.numbers.to(self.scale.dtype) * self.scale

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (aten.detach.default, aten.alias.default):
            same = Scaled(args[0].numbers.detach(), args[0].scale.detach())
            return return_and_correct_aliasing(func, args, kwargs or {}, same)
        plain = tree_map(lambda one: one.product() if isinstance(one, Scaled) else one, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


class Mlp(nn.Module):
    """The second input, if there is one, joins behind the first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.second = nn.Linear(5, 3)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        hidden = torch.relu(self.first(x))
        return self.second(hidden if other is None else hidden + other)


def ragged(width: int, lengths: tuple[int, ...], seed: int, **options: Any) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randn(length, width, generator=generator) for length in lengths]
    return torch.nested.nested_tensor(rows, layout=torch.jagged, **options)


def inputs_of(kind: str, rank: int, step: int) -> tuple[Tensor, ...]:
    seed, lengths = 10 * step + rank, (2, 1 + rank, 3 + step)
    if kind == "scaled":
        generator = torch.Generator().manual_seed(seed)
        numbers = torch.randint(-8, 8, (4, 6), generator=generator, dtype=torch.int8)
        return (Scaled(numbers, torch.rand(4, 1, generator=generator)),)
    x = ragged(6, lengths, seed, requires_grad=kind == "jagged with a gradient")
    if kind == "two jagged":
        generator = torch.Generator().manual_seed(seed)
        values = torch.randn(x.values().shape[0], 5, generator=generator)
        return x, torch.nested.nested_tensor_from_jagged(values, x.offsets())
    return (x,)


def mean_square(output: Tensor) -> Tensor:
    return (output.values() if output.is_nested else output).square().mean()


def train(implementation: str, kind: str, shard_options: dict, options: dict) -> None:
    """Three steps; the second accumulates two micro-batches, the last has another number of rows."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    torch.manual_seed(42)
    reference = Mlp()
    model = copy.deepcopy(reference)
    shard_units(implementation, model, [model.first], **shard_options)
    forward = compile_if_asked(implementation, model, **options)
    optimizers = [torch.optim.SGD(one.parameters(), 0.1) for one in (reference, model)]
    for step in range(3):
        for micro in (0, 1) if step == 1 else (1,):
            model.set_requires_gradient_sync(bool(micro))
            everyones = [inputs_of(kind, one, step + micro) for one in range(world_size)]
            for one in everyones:
                (mean_square(reference(*one)) / world_size).backward()
            mine = inputs_of(kind, rank, step + micro)
            mean_square(forward(*mine)).backward()
            if kind == "jagged with a gradient":
                gradients = [each[0].grad.values() for each in (mine, everyones[rank])]
                assert_close(gradients[0] / world_size, gradients[1])
        check_sharded_parity(reference, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


KINDS = ("jagged", "jagged with a gradient", "two jagged", "scaled")


@pytest.mark.compiles("two jagged", "scaled")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("implementation", EVERY)
def test_gradients_are_those_of_their_parameters(run_on_gloo_ranks, implementation, kind):
    run_on_gloo_ranks(2, train, implementation, kind, {}, {})


@pytest.mark.parametrize("kind", ["jagged", "scaled"])
def test_with_a_cost_model_and_a_budget(run_on_gloo_ranks, kind):
    """A ragged dim is an input of the graph, and no size that a budget depends on."""
    options = {"hardware": "cpu-loopback", "memory_budget": "1GiB"}
    run_on_gloo_ranks(2, train, "compiled", kind, {}, options)


@pytest.mark.inductor
def test_through_inductor(run_on_gloo_ranks):
    run_on_gloo_ranks(2, train, "compiled", "jagged", {"reshard_after_forward": False}, {})


def evaluate(implementation: str) -> None:
    torch.manual_seed(42)
    reference = Mlp()
    model = shard_units(implementation, copy.deepcopy(reference), [])
    forward = compile_if_asked(implementation, model)
    (x,) = inputs_of("jagged", dist.get_rank(), 0)
    with torch.no_grad():
        assert_close(forward(x).values(), reference(x).values())


@pytest.mark.parametrize("implementation", EVERY)
def test_without_gradients(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, evaluate, implementation)


def train_in_bfloat16(implementation: str) -> None:
    """Floating-point inputs are cast, jagged ones too."""
    torch.manual_seed(42)
    reference = Mlp()
    model = copy.deepcopy(reference)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_units(implementation, model, [model.first], mp_policy=policy)
    forward = compile_if_asked(implementation, model)
    (x,) = inputs_of("jagged", dist.get_rank(), 0)
    output = forward(x)
    assert output.dtype == torch.bfloat16
    mean_square(output.float()).backward()
    for rank in range(dist.get_world_size()):
        (x,) = inputs_of("jagged", rank, 0)
        (mean_square(reference(x)) / dist.get_world_size()).backward()
    expected = dict(reference.named_parameters())
    for name, param in model.named_parameters():
        assert_close(param.grad.full_tensor(), expected[name].grad, rtol=0.1, atol=0.03)


@pytest.mark.parametrize("implementation", EVERY)
def test_jagged_inputs_are_cast(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_in_bfloat16, implementation)
