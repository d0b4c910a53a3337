"""Where the backward of an uncompiled unit may accumulate the gradient of a shard itself."""

from unittest import mock

import pytest
import torch
from support.torch_versions import NEEDS_REDUCTION
from torch import nn
from torch.distributed.tensor import DTensor

import graphshard
from graphshard._compat_autograd import accumulates_in_leaf, are_in_order


class Notes(torch.autograd.Function):
    """The identity; its backward notes what it may do."""

    @staticmethod
    def forward(ctx, value, notes):
        ctx.notes = notes
        return value.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.notes.append(accumulates_in_leaf(ctx.next_functions[0][0], is_in_order=True))
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
            notes.extend(accumulates_in_leaf(node, is_in_order=True) for node, _ in ctx.next_functions)
            return grad, grad

    Both.apply(first, second).sum().backward(inputs=[first])
    assert notes == [True, False] and second.grad is None


@pytest.mark.parametrize("kind", ["register_hook", "register_post_accumulate_grad_hook"])
def test_not_under_hooks(kind):
    def hooked(weight):
        getattr(weight, kind)(lambda _: None)
        return weight

    assert not noted(lambda result, weight, other: result.backward(), hooked)


def test_not_if_streams_have_to_wait(fake_group):
    assert are_in_order([None, torch.ones(1)]) and are_in_order([])
    model = graphshard.fully_shard(nn.Linear(6, 4), mesh=fake_group(2))
    node, given = model.weight.view_as(model.weight).grad_fn.next_functions[0][0], []
    node.register_prehook(lambda grads: given.append(grads[0]))
    for is_default in (True, False):
        loss = model(torch.ones(2, 6)).sum()
        with mock.patch("graphshard.fsdp.eager_autograd.are_in_order", return_value=is_default):
            loss.backward()
    assert given[0] is None and type(given[1]) is DTensor


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


def two_layers(mesh):
    """A unit whose forward uses the first of its two layers."""
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(6, 4))
    model.forward = lambda x: model[0](x)
    return graphshard.fully_shard(model, mesh=mesh)


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True:UserWarning")
@pytest.mark.parametrize("by_grad", [False, True], ids=["backward", "grad"])
@pytest.mark.parametrize("is_compiled", [False, True], ids=["uncompiled", "compiled"])
def test_gradients_of_gradients_of_shards_are_refused(fake_group, interpreted, is_compiled, by_grad):
    """Not left out in silence: a penalty on them would train nothing."""
    model = graphshard.fully_shard(nn.Linear(6, 4), mesh=fake_group(2))
    run = torch.compile(model, backend="graphshard") if is_compiled else model
    loss = run(torch.ones(2, 6)).square().sum()
    if by_grad:
        grads = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    else:
        loss.backward(create_graph=True)
        grads = [param.grad for param in model.parameters()]
    penalty = sum(grad.to_local().square().sum() for grad in grads)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        (loss + penalty).backward()


@pytest.mark.parametrize("reshards", [True, False])
def test_what_is_frozen_before_the_backward_gets_no_gradient(fake_group, reshards):
    """Also while the module shows what it keeps for the backward."""
    model = graphshard.fully_shard(nn.Linear(6, 4), mesh=fake_group(2), reshard_after_forward=reshards)
    loss = model(torch.ones(2, 6)).sum()
    model.weight.requires_grad_(False)
    assert not model.weight.requires_grad
    loss.backward()
    assert model.weight.grad is None and model.bias.grad is not None
    model(torch.ones(2, 6)).sum()
    model.weight.requires_grad = True
    model(torch.ones(2, 6)).sum().backward()
    assert type(model.weight) is DTensor and model.weight.requires_grad and model.weight.grad is not None


@pytest.mark.parametrize("syncs", [(True, True), (False, True)])
def test_gradients_have_the_dtype_that_the_parameter_asks_for(fake_group, syncs):
    model = graphshard.fully_shard(nn.Linear(6, 4, dtype=torch.bfloat16), mesh=fake_group(2))
    model.weight.grad_dtype, model.bias.grad_dtype = torch.float32, None
    for is_on in syncs:
        model.set_requires_gradient_sync(is_on)
        model(torch.ones(2, 6, dtype=torch.bfloat16)).sum().backward()
    assert [param.grad.dtype for param in model.parameters()] == [torch.float32, torch.bfloat16]


def test_hooks_are_not_called_without_a_gradient(fake_group):
    """Of a parameter that the forward does not use, and while gradients wait; handles remove hooks later, too."""
    model = two_layers(fake_group(2))
    seen, handles = [], []
    for name, param in model.named_parameters():
        handles.append(param.register_hook(lambda grad, name=name: seen.append((name, grad.shape))))
        handles.append(
            param.register_post_accumulate_grad_hook(
                lambda param, name=name: seen.append((name, param.grad.shape))
            )
        )
    for is_on in (False, True, True):
        model.set_requires_gradient_sync(is_on)
        seen.clear()
        model(torch.ones(2, 6)).sum().backward()
        used = [("0.weight", (4, 6)), ("0.bias", (4,))] if is_on else []
        assert sorted(seen) == sorted(used * 2)
    assert model[1].weight.grad is None
    for handle in handles:
        handle.remove()
    seen.clear()
    model(torch.ones(2, 6)).sum().backward()
    assert not seen


def test_hooks_see_a_gradient_from_elsewhere(fake_group):
    """The gather gives none; a penalty on the shard does."""
    model = two_layers(fake_group(2))
    shard, seen = model[1].weight, []
    shard.register_post_accumulate_grad_hook(lambda param: seen.append(param.grad.to_local().sum().item()))
    for _ in range(2):
        (model(torch.ones(2, 6)).sum() + shard.to_local().sum()).backward()
    assert seen == [shard.to_local().numel(), 2 * shard.to_local().numel()]


def test_computed_shards_need_no_hooks(fake_group):
    """They are no leaves; one of them gets no gradient. Afterwards the model has its own shards again."""
    model = two_layers(fake_group(2))
    own = list(model.parameters())
    shards = {name: param * 2 for name, param in model.named_parameters()}
    torch.func.functional_call(model, shards, torch.ones(2, 6)).sum().backward()
    assert [param.grad is not None for param in own] == [True, True, False, False]
    assert all(one is other for one, other in zip(model.parameters(), own, strict=True))
    model(torch.ones(2, 6)).sum().backward()


def test_hooks_after_one_that_drops_the_gradient_are_called(fake_group):
    model, seen = graphshard.fully_shard(nn.Linear(6, 4, bias=False), mesh=fake_group(2)), []

    def drop(param):
        seen.append("drop")
        param.grad = None

    model.weight.register_post_accumulate_grad_hook(drop)
    model.weight.register_post_accumulate_grad_hook(lambda param: seen.append("after"))
    for is_on in (False, True):
        model.set_requires_gradient_sync(is_on)
        model(torch.ones(2, 6)).sum().backward()
    assert seen == ["drop", "after"]


@NEEDS_REDUCTION
def test_settings_between_forward_and_backward_count(fake_group):
    """The fake group leaves what it sends as it is, so the sum is that of this rank."""
    gradients = []
    for factor in (2.0, 8.0):
        torch.manual_seed(0)
        model = graphshard.fully_shard(nn.Linear(6, 4), mesh=fake_group(2))
        model.set_force_sum_reduction_for_comms(True)
        loss = model(torch.ones(2, 6)).sum()
        model.set_gradient_divide_factor(factor)
        loss.backward()
        gradients.append(model.bias.grad.to_local())
    torch.testing.assert_close(gradients[0], 4 * gradients[1])


def test_hooks_of_the_node_that_accumulates(fake_group):
    """Of autograd's own node: one that runs after it is called with the gradient in `.grad`, one before with None."""
    model = graphshard.fully_shard(nn.Linear(6, 4, bias=False), mesh=fake_group(2))
    node, seen = torch.autograd.graph.get_gradient_edge(model.weight).node, []
    node.register_prehook(lambda grads: seen.append(grads))
    node.register_hook(lambda _, grads: seen.append(model.weight.grad is not None))
    model(torch.ones(2, 6)).sum().backward()
    assert seen == [(None,), True]


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_pre_hooks_of_inner_modules_read_full_parameters(fake_group):
    """On one rank, where what is gathered has its values."""
    plain, inner = (nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)) for _ in range(2))
    inner.load_state_dict(plain.state_dict())
    for each in (plain, inner):
        nn.utils.weight_norm(each[0])
    model = graphshard.fully_shard(inner, mesh=fake_group(1))
    expected, found = plain(torch.ones(2, 6)), model(torch.ones(2, 6))
    torch.testing.assert_close(found, expected)
    expected.sum().backward()
    found.sum().backward()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.to_local(), theirs.grad)
