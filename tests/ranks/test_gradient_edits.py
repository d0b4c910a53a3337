"""What users write to gradients between backward and step acts on the shards as on whole parameters, or is refused."""

from collections.abc import Callable, Sequence

import pytest
import torch
from support.fsdp1 import full_parameters, wrap
from support.implementations import compile_if_asked, shard_units
from support.toy_models import build_mlp
from torch import nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing import assert_close

from graphshard.errors import ParameterStateError

Edit = Callable[[Sequence[nn.Parameter]], object]


def assign(params: Sequence[nn.Parameter]) -> None:
    for param in params:
        param.grad = param.grad * 0.5


def copy_in_place(params: Sequence[nn.Parameter]) -> None:
    for param in params:
        param.grad.copy_(param.grad * 0.5)


def multiply_data(params: Sequence[nn.Parameter]) -> None:
    for param in params:
        param.grad.data.mul_(0.5)


def multiply_all(params: Sequence[nn.Parameter]) -> None:
    torch._foreach_mul_([param.grad for param in params], 0.5)


def clip_values(params: Sequence[nn.Parameter]) -> None:
    nn.utils.clip_grad_value_(params, 0.01)


def clip_values_one_by_one(params: Sequence[nn.Parameter]) -> None:
    nn.utils.clip_grad_value_(params, 0.02, foreach=False)


def zero(params: Sequence[nn.Parameter]) -> None:
    for param in params:
        param.grad.zero_()


EDITS: list[Edit] = [
    assign, copy_in_place, multiply_data, multiply_all, clip_values, clip_values_one_by_one, zero
]  # fmt: skip


def build(implementation: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = build_mlp((4, 5), (5, 3))
    return model if implementation == "plain" else shard_units(implementation, model, [model[0], model[2]])


def train_with_edits(implementation: str, edits: Sequence[Edit]) -> dict[str, torch.Tensor]:
    """One step for each edit; the next backward accumulates on the edited gradients."""
    model = build(implementation)
    forward = compile_if_asked(implementation, model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    inputs = torch.arange(12.0).reshape(3, 4) / 10
    for edit in edits:
        for _ in range(2):
            forward(inputs).square().mean().backward()
            edit(list(model.parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return full_parameters(model)


def edit_gradients(implementation: str) -> None:
    assert_close(train_with_edits(implementation, EDITS), train_with_edits("plain", EDITS))


def assign_data(params: Sequence[nn.Parameter]) -> None:
    """Twice: the second storage may lie where the first one did, which is free by then."""
    for _ in range(2):
        params[1].grad.data = params[1].grad * 0.5


def refuse_assigned_data(implementation: str) -> None:
    """A DTensor takes no notice of it, so an error says so; torch's FSDP2 steps with the old values."""
    pattern = r"the .data of the gradient of 0.bias was assigned to.*this SGD would step with the old values"
    with pytest.raises(ParameterStateError, match=pattern):
        train_with_edits(implementation, [assign_data])
    model = build(implementation)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    model(torch.ones(3, 4)).sum().backward()
    assign_data(list(model.parameters()))
    optimizer.zero_grad()  # what was assigned to is gone
    model(torch.ones(3, 4)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("implementation", ["fsdp2", "sharded", "compiled"])
def test_edits_of_gradients(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, edit_gradients, implementation)


@pytest.mark.parametrize("implementation", ["sharded", "compiled"])
def test_data_of_gradients(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, refuse_assigned_data, implementation)


def drop_waiting(implementation: str) -> None:
    """`zero_grad()` of the model between micro-batches drops what waits, as FSDP1 does; FSDP2 keeps it, silently."""
    results = []
    for kind in ("plain", "fsdp1", "wrapper", implementation):
        is_wrapped = kind in ("fsdp1", "wrapper")
        model = build("plain" if is_wrapped else kind)
        if is_wrapped:
            policy = ModuleWrapPolicy({nn.Linear})
            model = wrap(kind, model, auto_wrap_policy=policy)
        forward = compile_if_asked(kind, model)
        inputs = torch.arange(12.0).reshape(3, 4) / 10
        for number, is_dropped in enumerate((False, True, False, False)):
            is_last = number == 3
            if is_wrapped and not is_last:
                with model.no_sync():
                    forward(inputs + number).square().mean().backward()
            else:
                if kind == implementation:
                    model.set_requires_gradient_sync(is_last)
                forward(inputs + number).square().mean().backward()
            if is_dropped:
                model.zero_grad()
        torch.optim.SGD(model.parameters(), lr=0.3).step()
        results.append(full_parameters(model))
    for result in results[1:]:
        assert_close(result, results[0])


@pytest.mark.parametrize("implementation", ["sharded", "compiled"])
def test_zero_grad_drops_what_waits(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, drop_waiting, implementation)
