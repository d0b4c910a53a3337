"""When parameters are gathered and freed, under the user's control."""

import copy

import pytest
import torch
import torch.distributed as dist
from support.comm_counts import count_collectives
from support.implementations import UNCOMPILED, compile_if_asked, shard_units
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

EVERY = ["fsdp2", "sharded", "compiled"]


def _build() -> nn.Sequential:
    torch.manual_seed(42)
    return nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))


def _batch(step: int, rank: int) -> Tensor:
    return torch.randn(3, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def _mean_backward(reference: nn.Module, step: int) -> list[Tensor]:
    world_size = dist.get_world_size()
    losses = [reference(_batch(step, rank)).square().sum() for rank in range(world_size)]
    (torch.stack(losses).sum() / world_size).backward()
    return losses


def _check_gradients(reference: nn.Module, model: nn.Module) -> None:
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_close(
            parameter.grad.full_tensor(), expected.grad, msg=lambda text, name=name: f"{name}: {text}"
        )


def _unshard(implementation: str, is_async: bool) -> None:
    reference = _build()
    model = shard_units(implementation, copy.deepcopy(reference), [])
    sharded = dict(model.named_parameters())
    handle = model.unshard(async_op=is_async)
    assert (handle is not None) == is_async
    if is_async:
        handle.wait()
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert isinstance(parameter, nn.Parameter) and not isinstance(parameter, DTensor), name
        assert_close(parameter.detach(), expected.detach())
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    model.unshard()
    model.reshard()
    for name, parameter in model.named_parameters():
        assert parameter is sharded[name], name
    if implementation == "sharded":  # FSDP2 shows the old values
        handle = model.unshard(async_op=True)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1.0)
        handle.wait()
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert_close(parameter.detach(), expected.detach() + 1.0)


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_unshard_shows_full_parameters_and_reshard_the_shards(run_on_gloo_ranks, implementation, is_async):
    run_on_gloo_ranks(2, _unshard, implementation, is_async)


def _forward_after_unshard(implementation: str, reshard: bool) -> None:
    reference = _build()
    model = copy.deepcopy(reference)
    shard_units(implementation, model, list(model), reshard_after_forward=reshard)
    forward = compile_if_asked(implementation, model)
    for step in range(4):
        expected = _mean_backward(reference, step)
        with count_collectives() as in_unshard:
            handles = [unit.unshard(async_op=True) for unit in [model, *model] * (1 + step)]
        assert in_unshard["gathers"] == 3
        for handle in handles if step < 2 else ():  # else the forward waits
            handle.wait()
        with count_collectives() as in_forward:
            loss = forward(_batch(step, dist.get_rank())).square().sum()
        with count_collectives() as in_backward:
            loss.backward()
        if step % 2 or implementation != "compiled":  # a step of each kind compiles
            assert in_forward == {}
            assert in_backward.get("gathers", 0) == (2 + (implementation != "compiled") if reshard else 0)
        assert_close(loss, expected[dist.get_rank()])
        _check_gradients(reference, model)
        for parameter in [*model.parameters()]:
            assert isinstance(parameter, DTensor)
            parameter.data.add_(1.0)  # what is gathered must not be used again
        for parameter in reference.parameters():
            parameter.data.add_(1.0)
        reference.zero_grad()
        model.zero_grad()


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("implementation", EVERY)
def test_unsharded_units_do_not_gather_in_the_forward(run_on_gloo_ranks, implementation, reshard):
    run_on_gloo_ranks(2, _forward_after_unshard, implementation, reshard)


def _backwards_later(implementation: str, reshard: bool, reshard_after_backward: bool) -> None:
    """All forwards, then all backwards, flags flipped in between: a pipeline's last stage."""
    reference = _build()
    model = copy.deepcopy(reference)
    shard_units(implementation, model, list(model), reshard_after_forward=reshard)
    forward = compile_if_asked(implementation, model)
    rank = dist.get_rank()
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (reference, model)]
    for step in range(2):
        expected = [_mean_backward(reference, 3 * step + index) for index in range(3)]
        losses = [forward(_batch(3 * step + index, rank)).square().sum() for index in range(3)]
        for index, loss in enumerate(losses):
            is_last = index == 2
            model.set_is_last_backward(is_last)
            model.set_requires_gradient_sync(is_last)
            model.set_reshard_after_backward(is_last or reshard_after_backward)
            loss.backward()
            assert_close(loss, expected[index][rank])
        _check_gradients(reference, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(("reshard", "reshard_after_backward"), [(False, True), (False, False), (True, True)])
@pytest.mark.parametrize("implementation", EVERY)
def test_flags_count_between_forward_and_backward(
    run_on_gloo_ranks, implementation, reshard, reshard_after_backward
):
    run_on_gloo_ranks(2, _backwards_later, implementation, reshard, reshard_after_backward)


def _finalized_by_hand(implementation: str, reduces_unused: bool) -> None:
    """The gradients of three micro-batches are reduced where the user says so, of unused parameters too."""
    reference = _build()
    model = copy.deepcopy(reference)
    shard_units(implementation, model, list(model), reshard_after_forward=True)
    model.set_reduce_scatter_unused_params(reduces_unused)
    model.set_manual_backward_finalization(True)
    forward = compile_if_asked(implementation, model)
    rank = dist.get_rank()
    for step in range(2):
        model.set_requires_gradient_sync(False)
        for index in range(3):
            _mean_backward(reference, 3 * step + index)
            forward(_batch(3 * step + index, rank)).square().sum().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        model.set_requires_gradient_sync(True)
        with count_collectives() as counts:
            if step:
                model.finalize_backward()
            else:
                model.finalize_backward(async_op=True).wait()
        assert counts["reductions"] == 3
        _check_gradients(reference, model)
        model.zero_grad()
        reference.zero_grad()
    if implementation == "sharded":
        inputs = _batch(9, rank).requires_grad_()
        inputs.register_hook(lambda grad: _refused_in_backward(model))
        model(inputs).sum().backward()
        assert model._graphshard_unit.tree.is_finalized_by_hand
    with pytest.raises(RuntimeError, match="root" if implementation == "fsdp2" else "call it on the outermost"):
        model[0].finalize_backward()
    model.set_manual_backward_finalization(False)
    with pytest.raises(RuntimeError, match="set_manual_backward_finalization"):
        model.finalize_backward()


def _refused_in_backward(model: nn.Module) -> None:
    with pytest.raises(RuntimeError, match="once the backwards have ended"):
        model.finalize_backward()
    with pytest.raises(RuntimeError, match="inside a backward"):
        model.set_manual_backward_finalization(False)


@pytest.mark.parametrize("reduces_unused", [False, True])
@pytest.mark.parametrize("implementation", EVERY)
def test_backwards_are_finalized_by_hand(run_on_gloo_ranks, implementation, reduces_unused):
    if implementation == "fsdp2" and not hasattr(torch.distributed.fsdp.FSDPModule, "finalize_backward"):
        pytest.skip("FSDP2 has it from torch 2.15 on")
    run_on_gloo_ranks(2, _finalized_by_hand, implementation, reduces_unused)


class Branches(nn.Module):
    """Two layers, the second one used on request."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(6, 6)
        self.sometimes = nn.Linear(6, 6)

    def forward(self, x: Tensor, use_both: bool) -> Tensor:
        x = self.always(x)
        return self.sometimes(x) if use_both else x


def _left_over(implementation: str) -> None:
    """The last micro-batch leaves a layer out whose gradient waits: it is reduced all the same."""
    torch.manual_seed(42)
    reference = Branches()
    model = copy.deepcopy(reference)
    shard_units(implementation, model, [model.always, model.sometimes])
    forward = compile_if_asked(implementation, model)
    for _ in range(2):
        for index, use_both in enumerate((True, True, False)):
            model.set_requires_gradient_sync(index == 2)
            losses = [reference(_batch(index, rank), use_both).sum() for rank in range(2)]
            (torch.stack(losses).sum() / 2).backward()
            forward(_batch(index, dist.get_rank()), use_both).sum().backward()
        _check_gradients(reference, model)
        reference.zero_grad()
        model.zero_grad()


@pytest.mark.parametrize("implementation", EVERY)
def test_gradients_left_over_are_reduced_by_the_last_backward(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, _left_over, implementation)


def _set_at_run_time(implementation: str) -> None:
    model = _build()
    shard_units(implementation, model, list(model))
    forward = compile_if_asked(implementation, model)
    found = {}
    for value in (None, False, True):
        if value is not None:
            model.set_reshard_after_forward(value)
        for _ in range(2):
            loss = forward(_batch(0, dist.get_rank()).requires_grad_()).square().sum()
            with count_collectives() as counts:
                loss.backward()
        found[value] = counts["gathers"]
        assert counts["reductions"] == 3
    assert found == {None: 3, False: 0, True: 3}


@pytest.mark.parametrize("implementation", EVERY)
def test_reshard_after_forward_set_at_run_time(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, _set_at_run_time, implementation)


def _several_forwards(implementation: str) -> None:
    """Two forwards and one backward of their sum, as with a contrastive loss; then steps of one forward."""
    reference = _build()
    model = copy.deepcopy(reference)
    shard_units(implementation, model, list(model), reshard_after_forward=False)
    forward = compile_if_asked(implementation, model)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (reference, model)]
    gathers = []
    for step, forwards in enumerate((2, 2, 1, 1, 2)):
        numbers = [10 * step + index for index in range(forwards)]
        for number in numbers:
            _mean_backward(reference, number)
        with count_collectives() as counts:
            sum(forward(_batch(number, dist.get_rank())).square().sum() for number in numbers).backward()
        gathers.append(counts["gathers"])
        _check_gradients(reference, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            for _ in range(2 if implementation == "compiled" else 0):  # the first one compiles
                with count_collectives() as counts:
                    forward(_batch(0, 0))
            assert counts["gathers"] == 3 or implementation != "compiled", "an evaluation keeps nothing"
    # Uncompiled, the first backward frees what the second one gathers. A compiled model has to see a step of several
    # forwards (here it is the one that compiles) before it keeps parameters for the second of them.
    expected = {"fsdp2": [5, 5, 3, 3, 5], "sharded": [6, 6, 3, 3, 6], "compiled": [gathers[0], 3, 3, 3, 6]}
    assert gathers == expected[implementation]


@pytest.mark.parametrize("implementation", EVERY)
def test_units_that_do_not_reshard_are_gathered_for_the_first_of_several_forwards(
    run_on_gloo_ranks, implementation
):
    run_on_gloo_ranks(2, _several_forwards, implementation)
