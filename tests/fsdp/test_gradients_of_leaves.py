"""Where the backward of an uncompiled unit may accumulate the gradient of a shard itself."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import graphshard
from graphshard._compat_autograd import accumulates_in_leaf


class Notes(torch.autograd.Function):
    """The identity; its backward notes what it may do."""

    @staticmethod
    def forward(ctx, value, notes):
        ctx.notes = notes
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.notes.append(accumulates_in_leaf(ctx.next_functions[0][0], grad))
        return grad, None


def noted(backward, prepare=lambda weight: weight):
    """What the backward of a product of a weight and another leaf notes."""
    weight, other, notes = nn.Parameter(torch.ones(2)), torch.ones(2, requires_grad=True), []
    result = (Notes.apply(prepare(weight), notes) * other).sum()
    backward(result, weight, other)
    (note,) = notes
    return note


def test_only_where_nothing_else_asks_for_the_gradient():
    assert noted(lambda result, weight, other: result.backward())
    assert noted(lambda result, weight, other: result.backward(inputs=[weight]))
    assert not noted(lambda result, weight, other: torch.autograd.grad(result, weight))


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
def test_not_if_the_addition_is_recorded():
    assert not noted(lambda result, weight, other: result.backward(create_graph=True))


def test_not_if_other_leaves_are_asked_for():
    notes, first, second = [], *(nn.Parameter(torch.ones(2)) for _ in range(2))

    class Both(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *values):
            return values[0] + values[1]

        @staticmethod
        def backward(ctx, grad):
            notes.extend(accumulates_in_leaf(node, grad) for node, _ in ctx.next_functions)
            return grad, grad

    Both.apply(first, second).sum().backward(inputs=[first])
    assert notes == [True, False] and second.grad is None


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_not_under_hooks(kind):
    def hooked(weight):
        getattr(weight, kind)(lambda _: None)
        return weight

    assert not noted(lambda result, weight, other: result.backward(), hooked)


def test_not_of_what_is_no_leaf():
    assert not noted(lambda result, weight, other: result.backward(), lambda weight: weight * 1)


@pytest.mark.parametrize("num_backwards", [1, 3])
def test_the_shard_has_the_gradient_without_a_detour(fake_group, num_backwards):
    """The node of the shard, which comes after, gets none; the gradients of several backwards add up in place."""
    model = graphshard.fully_shard(nn.Linear(6, 4), mesh=fake_group(2))
    detached, seen = [], []
    dispatch = DTensor.__torch_dispatch__

    def watch(cls, func, types, args=(), kwargs=None):
        detached.append(func)
        return dispatch(func, types, args, kwargs)

    for _ in range(num_backwards):
        loss = model(torch.ones(2, 6)).sum()
        with mock.patch.object(DTensor, "__torch_dispatch__", classmethod(watch)):
            loss.backward()
        seen.append(model.weight.grad)
    assert not detached
    assert all(grad is seen[0] for grad in seen)
    assert type(seen[0]) is DTensor and seen[0].placements == model.weight.placements
