"""What else autograd does with a sharded model: hooks, unused outputs, partial and repeated backwards, containers."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from support.implementations import EVERY, GRAPHSHARD, UNCOMPILED, compile_if_asked, shard_units
from support.parity import check_shard, check_sharded_parity, start_lockstep
from support.toy_models import WORKLOADS, build_mlp
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close

from graphshard.errors import ParameterStateError

WORKLOAD = WORKLOADS["mlp_7_15_3"]


class TwoOutputs(nn.Module):
    """Two layers in a row, each giving an output, and one that no forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 7)
        self.second = nn.Linear(7, 3)
        self.never = nn.Linear(5, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.tanh(self.first(x))
        return hidden, self.second(hidden)


def shard_two_outputs(
    implementation: str, **options: Any
) -> tuple[nn.Module, nn.Module, Callable[..., tuple[Tensor, Tensor]]]:
    """Unsharded model, sharded model with two units and the root, what to call."""
    torch.manual_seed(42)
    reference = TwoOutputs()
    model = copy.deepcopy(reference)
    shard_units(implementation, model, [model.first, model.never], **options)
    return reference, model, compile_if_asked(implementation, model)


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def mean_over_ranks(loss_of: Callable[[int], Tensor]) -> Tensor:
    """What the unsharded model differentiates: the mean of all ranks' losses."""
    return torch.stack([loss_of(rank) for rank in range(dist.get_world_size())]).mean()


def count_hooks(implementation: str, reshard_after_forward: bool) -> None:
    """A post-accumulate-grad hook runs once per parameter and backward, when the sharded gradient is there."""
    lockstep = start_lockstep(WORKLOAD, implementation, reshard_after_forward=reshard_after_forward)
    seen: list[str] = []

    def register(name: str, parameter: nn.Parameter) -> None:
        def hook(ready: Tensor) -> None:
            assert ready is parameter and isinstance(ready.grad, DTensor)
            assert ready.grad.to_local().shape == ready.to_local().shape
            seen.append(name)

        parameter.register_post_accumulate_grad_hook(hook)

    for name, parameter in lockstep.model.named_parameters():
        register(name, parameter)
    names = sorted(name for name, _ in lockstep.model.named_parameters())
    for step in range(3):
        lockstep.backward(step)
        assert sorted(seen) == names
        seen.clear()
        lockstep.update(step)


def hooks_of_gradients_that_wait(implementation: str) -> None:
    """Hooks run once, with the gradient: not in the backward whose gradients wait. FSDP2 calls no tensor hooks."""
    lockstep = start_lockstep(WORKLOAD, implementation)
    seen: list[str] = []
    for name, parameter in lockstep.model.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda ready, name=name: seen.append((name, ready.grad.shape))
        )
        if implementation != "fsdp2":
            parameter.register_hook(lambda grad, name=name: seen.append((name, grad.shape)))
    shapes = [(name, parameter.shape) for name, parameter in lockstep.model.named_parameters()]
    for step, is_on in enumerate((False, True)):
        lockstep.model.set_requires_gradient_sync(is_on)
        WORKLOAD.loss(lockstep.forward, WORKLOAD.batch_of(dist.get_rank(), step)).backward()
        assert sorted(seen) == (sorted(shapes * (1 if implementation == "fsdp2" else 2)) if is_on else [])


def step_in_hooks(implementation: str, reshard_after_forward: bool) -> None:
    """An AdamW and a StepLR for each parameter, run by its hook, against one for all after the backward: same bits."""
    normal, hooked = (
        start_lockstep(WORKLOAD, implementation, reshard_after_forward=reshard_after_forward)
        for _ in range(2)
    )
    optimizer = torch.optim.AdamW(normal.model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5)
    schedulers = {
        parameter: torch.optim.lr_scheduler.StepLR(torch.optim.AdamW([parameter], lr=1e-2), step_size=5)
        for parameter in hooked.model.parameters()
    }

    def step_one(parameter: Tensor) -> None:
        own = schedulers[parameter]
        own.optimizer.step()
        own.optimizer.zero_grad()
        own.step()

    for parameter in schedulers:
        parameter.register_post_accumulate_grad_hook(step_one)
    for step in range(10):
        batch = WORKLOAD.batch_of(dist.get_rank(), step)
        losses = [WORKLOAD.loss(each.forward, batch) for each in (normal, hooked)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        for one, other in zip(normal.model.parameters(), hooked.model.parameters(), strict=True):
            assert other.grad is None
            assert torch.equal(one.to_local(), other.to_local())


def train_with_unused_output(implementation: str, reshard_after_forward: bool) -> None:
    """From step 2 on the loss leaves out the second output; `never` is unused throughout.

    Compiled, the unused layer's gradient is zeros, as it is in the unsharded compiled model.
    """
    reference, model, forward = shard_two_outputs(implementation, reshard_after_forward=reshard_after_forward)
    plain = torch.compile(reference, fullgraph=True) if implementation == "compiled" else reference
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (reference, model)]
    for step in range(4):
        kept = slice(None) if step < 2 else slice(1)

        def loss_of(rank: int, call: Callable[..., Any] = plain, step: int = step, kept=kept) -> Tensor:
            return sum(output.square().mean() for output in call(batch_of(rank, step))[kept])

        mean_over_ranks(loss_of).backward()
        loss_of(dist.get_rank(), forward).backward()
        assert model.never.weight.grad is None and model.never.bias.grad is None
        unused = model.second.weight.grad
        assert step < 2 or (unused is None) == (implementation != "compiled")
        check_sharded_parity(reference, model)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        check_sharded_parity(reference, model)


def run_backward_twice(implementation: str, reshard_after_forward: bool) -> None:
    """Two losses of one forward: a backward that retains the graph, then one that does not."""
    reference, model, forward = shard_two_outputs(implementation, reshard_after_forward=reshard_after_forward)
    for step in range(2):
        outputs = [reference(batch_of(rank, step)) for rank in range(dist.get_world_size())]
        first = torch.stack([result.square().mean() for _, result in outputs]).mean()
        second = torch.stack([(hidden.sin() * 2).mean() for hidden, _ in outputs]).mean()
        hidden, result = forward(batch_of(dist.get_rank(), step))
        result.square().mean().backward(retain_graph=True)
        first.backward(retain_graph=True)
        check_sharded_parity(reference, model)
        (hidden.sin() * 2).mean().backward()
        second.backward()
        check_sharded_parity(reference, model)
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            result.sum().backward()
        for each in (reference, model):
            each.zero_grad()


def differentiate_in_part(implementation: str) -> None:
    """`torch.autograd.grad` with regard to inputs or to some parameters; `backward(inputs=...)`."""
    reference, model, forward = shard_two_outputs(implementation)
    world_size, rank = dist.get_world_size(), dist.get_rank()

    def both() -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        inputs = [batch_of(each, 0).requires_grad_() for each in range(world_size)]
        mine = batch_of(rank, 0).requires_grad_()
        return inputs, sum(reference(x)[1].sum() for x in inputs) / world_size, mine, forward(mine)[1].sum()

    inputs, expected, mine, found = both()
    (gradient,) = torch.autograd.grad(found, mine)
    assert_close(gradient, torch.autograd.grad(expected, inputs[rank])[0] * world_size)
    shards = [
        model.first.weight,
        model.second.bias,
    ]  # behind a forward, a unit that is kept shows full parameters
    inputs, expected, mine, found = both()
    for one, other in zip(
        torch.autograd.grad(expected, [reference.first.weight, reference.second.bias]),
        torch.autograd.grad(found, shards),
        strict=True,
    ):
        check_shard("gradient", one, other)
    assert all(parameter.grad is None for parameter in model.parameters())
    inputs, expected, mine, found = both()
    expected.backward(inputs=[reference.first.bias])
    found.backward(inputs=[model.first.bias])
    check_sharded_parity(reference, model)
    assert model.first.bias.grad is not None and mine.grad is None


class Pair(NamedTuple):
    left: Tensor
    right: Tensor


@dataclass
class Record:
    left: Tensor
    right: Tensor


CONTAINERS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "list": (lambda left, right: [left, right], tuple),
    "tuple": (lambda left, right: (left, right), tuple),
    "namedtuple": (Pair, lambda pair: (pair.left, pair.right)),
    "dict": (lambda left, right: {"left": left, "right": right}, lambda it: (it["left"], it["right"])),
    "dataclass": (Record, lambda record: (record.left, record.right)),
}


class Stage(nn.Module):
    """Takes two tensors in one container, gives two in another."""

    def __init__(self, taken: str, given: str) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 5)
        self.taken, self.given = taken, given

    def forward(self, holder: Any) -> Any:
        left, right = CONTAINERS[self.taken][1](holder)
        return CONTAINERS[self.given][0](torch.tanh(self.linear(left)), right + left)


class Stages(nn.Module):
    """Hands each kind of container from one unit to the next."""

    def __init__(self) -> None:
        super().__init__()
        kinds = list(CONTAINERS)
        pairs = zip(kinds, [*kinds[1:], "list"], strict=True)
        self.stages = nn.ModuleList([Stage(taken, given) for taken, given in pairs])
        self.leave = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        holder: Any = [x, x * 2]
        for stage in self.stages:
            holder = stage(holder)
        return self.leave(holder[0] + holder[1])


def train_with_containers(implementation: str) -> None:
    torch.manual_seed(42)
    reference = Stages()
    model = copy.deepcopy(reference)
    shard_units(implementation, model, list(model.stages))
    forward = compile_if_asked(implementation, model)
    for step in range(2):
        mean_over_ranks(
            lambda rank, step=step: reference(batch_of(rank, step)[:, :5]).square().mean()
        ).backward()
        forward(batch_of(dist.get_rank(), step)[:, :5]).square().mean().backward()
        check_sharded_parity(reference, model)


def change_by_foreach(model: nn.Module, shards: list[nn.Parameter]) -> None:
    torch.optim.AdamW(shards, foreach=True).step()


def change_by_fused(model: nn.Module, shards: list[nn.Parameter]) -> None:
    torch.optim.AdamW(shards, fused=True).step()


def change_in_place(model: nn.Module, shards: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in shards:
            parameter.mul_(2)


def change_by_loading(model: nn.Module, shards: list[nn.Parameter]) -> None:
    model.load_state_dict({name: value * 2 for name, value in model.state_dict().items()})


def change_locals(model: nn.Module, shards: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for parameter in shards:
            parameter.to_local().mul_(2)


CHANGES = {
    "foreach": change_by_foreach,
    "fused": change_by_fused,
    "in_place": change_in_place,
    "loading": change_by_loading,
    "locals": change_locals,
}


def change_between_forward_and_backward(
    implementation: str, reshard_after_forward: bool, changes: list[str]
) -> None:
    """Either the old weights' gradients, or an error that names the parameters: never a mixture."""
    torch.manual_seed(42)
    model = build_mlp((6, 5), (5, 3))
    shard_units(implementation, model, [model[0]], reshard_after_forward=reshard_after_forward)
    forward = compile_if_asked(implementation, model)
    inputs = batch_of(dist.get_rank(), 0)
    shards = list(model.parameters())
    for change in changes:
        model.zero_grad()
        forward(inputs).square().mean().backward()
        expected = copy.deepcopy([parameter.grad.to_local() for parameter in model.parameters()])
        late = forward(inputs).square().mean()
        CHANGES[change](model, shards)
        model.zero_grad()
        # Loading frees what the forward has kept.
        is_gathered_again = reshard_after_forward or (implementation == "sharded" and change == "loading")
        if is_gathered_again:
            with pytest.raises(ParameterStateError, match=r"parameter.* .*2\.weight.* changed"):
                late.backward()
            continue
        late.backward()
        for parameter, gradient in zip(model.parameters(), expected, strict=True):
            assert torch.equal(parameter.grad.to_local(), gradient), change


@pytest.mark.parametrize("implementation", EVERY)
def test_hook_runs_once_per_parameter(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, count_hooks, implementation, True)


@pytest.mark.parametrize("implementation", EVERY)
def test_hooks_wait_for_the_gradient(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, hooks_of_gradients_that_wait, implementation)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_optimizer_in_hook(run_on_gloo_ranks, implementation, reshard_after_forward):
    run_on_gloo_ranks(2, step_in_hooks, implementation, reshard_after_forward)


def test_optimizer_in_hook_of_compiled_model(run_on_gloo_ranks):
    run_on_gloo_ranks(2, step_in_hooks, "compiled", True)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_unused_output_and_module(run_on_gloo_ranks, implementation, reshard_after_forward):
    run_on_gloo_ranks(2, train_with_unused_output, implementation, reshard_after_forward)


def test_unused_output_and_module_compiled(run_on_gloo_ranks):
    run_on_gloo_ranks(2, train_with_unused_output, "compiled", True)


@pytest.mark.parametrize(
    ("implementation", "reshard_after_forward"), [("sharded", True), ("sharded", False), ("compiled", True)]
)
def test_two_backwards_of_one_forward(run_on_gloo_ranks, implementation, reshard_after_forward):
    """Not FSDP2, which here ends without the first layer's gradient."""
    run_on_gloo_ranks(2, run_backward_twice, implementation, reshard_after_forward)


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_partial_backward(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, differentiate_in_part, implementation)


@pytest.mark.parametrize("implementation", EVERY)
def test_containers_between_units(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, train_with_containers, implementation)


@pytest.mark.parametrize(
    ("implementation", "reshard_after_forward"),
    [("sharded", True), ("sharded", False), ("compiled", True), ("compiled", False)],
)
def test_weights_changed_before_backward(run_on_gloo_ranks, implementation, reshard_after_forward):
    """4 ranks: of 5 rows, one holds none and one has padding."""
    run_on_gloo_ranks(
        4, change_between_forward_and_backward, implementation, reshard_after_forward, list(CHANGES)
    )
