"""Parameters that a forward reads in another way than by their attributes are gathered, too."""

import copy
from collections.abc import Callable

import pytest
import torch
from support.implementations import GRAPHSHARD, compile_if_asked, shard_units
from support.parity import check_sharded_parity
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from graphshard.errors import UnsupportedShardingError


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.shift = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.shift


class Reading(nn.Module):
    """Adds what ``read`` makes of its parameters to what its layers compute; two of them are tied."""

    def __init__(self, read: str) -> None:
        super().__init__()
        self.read = READS[read]
        self.scale = nn.Parameter(torch.randn(4))
        self.first, self.second = Inner(), Inner()
        self.second.weight = self.first.weight
        self.blocks = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 4))
        self.pair = nn.ParameterList([torch.randn(4), torch.randn(4)])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.second(self.first(x))) * self.scale + self.read(self)

    def penalty(self) -> Tensor:
        return sum(parameter.square().sum() for parameter in self.parameters())


READS: dict[str, Callable[[Reading], Tensor]] = {
    "parameters": lambda model: model.penalty(),
    "named": lambda model: sum(value.sum() for name, value in model.named_parameters() if "weight" in name),
    "own": lambda model: sum(value.sum() for value in model.parameters(recurse=False)),
    "container": lambda model: sum(value.square().sum() for value in model.blocks.parameters()),
    "dict": lambda model: model._parameters["scale"].sum() + model.first._parameters["shift"].sum(),
    "items": lambda model: sum(value.sum() for _, value in model.first._parameters.items()),
    "get": lambda model: model.get_parameter("scale") + model.get_parameter("blocks.0.weight").sum(),
    "list": lambda model: sum(value.sum() for value in model.pair.parameters()),
    "vector": lambda model: nn.utils.parameters_to_vector(model.first.parameters()).square().sum(),
    "norm": lambda model: torch.stack([value.norm() for value in model.parameters()]).norm(),
}


def batch_of(step: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(step))


def train_reading(implementation: str, read: str, has_units: bool) -> None:
    torch.manual_seed(0)
    reference = Reading(read)
    model = copy.deepcopy(reference)
    shard_units(implementation, model, [model.first, model.second, *model.blocks] if has_units else [])
    forward = compile_if_asked(implementation, model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (reference, model)]
    for step in range(2):
        expected, found = reference(batch_of(step)), forward(batch_of(step))
        assert_close(found, expected)
        expected.mean().backward()
        found.mean().backward()
        check_sharded_parity(reference, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.compiles("parameters", "dict", "norm")
@pytest.mark.parametrize(("read", "has_units"), [("parameters", False), *((read, True) for read in READS)])
@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_route_gathers(run_on_gloo_ranks, implementation, read, has_units):
    run_on_gloo_ranks(2, train_reading, implementation, read, has_units)


class AsksItsDtype(nn.Module):
    """Casts its input to the dtype of its parameters, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        dtype = next(self.parameters()).dtype
        assert {value.dtype for value in self.layers.parameters()} == {dtype}
        return self.layers(x.long().to(dtype))


def ask_for_dtype(implementation: str) -> None:
    model = AsksItsDtype()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    shard_units(implementation, model, [model.layers[0]], mp_policy=policy)
    assert next(model.parameters()).dtype == torch.float32
    output = compile_if_asked(implementation, model)(batch_of(0))
    assert output.dtype == torch.bfloat16
    output.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_dtype_of_parameters_in_a_forward(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, ask_for_dtype, implementation)


class Calling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.func.functional_call(self.linear, {"bias": torch.ones(4)}, (x,))
        return self.linear(x)


def call_with_other_parameters(implementation: str) -> None:
    """``functional_call`` puts back what it has read: the shard stays."""
    torch.manual_seed(0)
    reference = Calling()
    model = shard_units(implementation, copy.deepcopy(reference), [])
    forward = compile_if_asked(implementation, model)
    if implementation == "compiled":
        with pytest.raises(Exception, match="parameter bias is replaced in a compiled forward") as caught:
            forward(batch_of(0))
        assert UnsupportedShardingError.__name__ in str(caught.value)
        return
    expected, found = reference(batch_of(0)), forward(batch_of(0))
    assert_close(found, expected)
    expected.sum().backward()
    found.sum().backward()
    check_sharded_parity(reference, model)


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_functional_call_in_a_forward(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, call_with_other_parameters, implementation)


class Branching(nn.Module):
    """A weight is an operand of a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Inner(), Inner()

    def forward(self, x: Tensor) -> Tensor:
        operands = (self.first(x), self.second.weight)
        return torch.cond(x.sum() > 0, lambda x, w: x @ w, lambda x, w: x @ w * 2, operands)


def _cond() -> None:
    torch.manual_seed(0)
    reference = Branching()
    model = copy.deepcopy(reference)
    shard_units("compiled", model, [])
    compiled = torch.compile(model, backend="graphshard")
    x = torch.ones(3, 4)
    for run in (reference, compiled):
        run(x).square().mean().backward()
    # Dynamo loses what is assigned to an attribute behind a cond: these are shards again all the same.
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    check_sharded_parity(reference, model)


def test_weights_as_operands_of_cond(run_on_gloo_ranks) -> None:
    run_on_gloo_ranks(2, _cond)
