"""An uncompiled unit frees its full parameters after its forward and gathers them again in its backward.

Gradients are those of units that keep their parameters, to the bit, and full parameters do not outlive the forward.
"""

import copy
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from support.comm_counts import count_collectives
from support.implementations import shard_units
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.debug import CommDebugMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard import fully_shard
from graphshard.errors import UnsupportedShardingError
from graphshard.ir import UNIT

WIDTH = 6


class Uses(nn.Module):
    """Reads its parameters in the ways that autograd saves them: whole, transposed, cut, cast, and more than once."""

    def __init__(self, written: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 7)
        self.second = nn.Parameter(torch.randn(7, WIDTH) / 3)
        self.frozen = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3, requires_grad=False)
        self.table = nn.Embedding(5, WIDTH, max_norm=1.0 if written else None)
        self.norm = nn.LayerNorm(WIDTH)
        self.written = written
        self.memories: list[StorageWeakRef] = []

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            self.memories.append(StorageWeakRef(self.first.weight.untyped_storage()))
        if self.written:
            with torch.no_grad():
                self.second.mul_(0.5)
                self.norm.bias.data[0] += 1
        hidden = self.first(x).relu()
        hidden = hidden @ self.second + hidden[:, :WIDTH] @ self.second[1:].t().contiguous()
        hidden = (
            hidden @ self.frozen.t() + hidden * self.second.double().to(x.dtype)[0] * self.second[0].tanh()
        )
        hidden = hidden + self.table(torch.arange(len(x)) % 5)
        return x + self.norm(hidden)


class Model(nn.Module):
    """Blocks around a parameter of the root that is read between them; the last block is called twice."""

    def __init__(self, count: int = 3, written: bool = False, twice: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Uses(written and index == 1) for index in range(count))
        if tied:
            self.blocks[2].second = self.blocks[0].second
            self.blocks[1].norm.bias = self.blocks[1].norm.weight
        self.twice = twice
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def run_blocks(self, x: Tensor, call: Callable[..., Tensor]) -> Tensor:
        for block in self.blocks:
            x = call(block, x) * self.scale
        return x

    def forward(self, x: Tensor, call: Callable[..., Tensor] = lambda block, x: block(x)) -> Tensor:
        return self.run_blocks(x, call) + (call(self.blocks[-1], x).tanh() if self.twice else x)


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator).requires_grad_()


def checkpointed(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=False)


def reentrant(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)


def plain_step(model: nn.Module, step: int) -> None:
    model(batch(step)).square().mean().backward()


def checkpointed_step(model: nn.Module, step: int) -> None:
    model(batch(step), checkpointed).square().mean().backward()


def reentrant_step(model: nn.Module, step: int) -> None:
    model(batch(step), reentrant).square().mean().backward()


def two_forwards_step(model: nn.Module, step: int) -> None:
    (model(batch(step)) - model(batch(step + 50))).square().mean().backward()


def retained_step(model: nn.Module, step: int) -> None:
    loss = model(batch(step)).square().mean()
    loss.backward(retain_graph=True)
    loss.backward()


def forwards_first_step(model: nn.Module, step: int) -> None:
    losses = [model(batch(step + offset)).square().mean() for offset in (0, 20, 40)]
    for number, loss in enumerate(losses):
        model.set_requires_gradient_sync(number == 2)
        loss.backward()


def resharded_step(model: nn.Module, step: int) -> None:
    loss = model(batch(step)).square().mean()
    for module in model.modules():
        if isinstance(module, graphshard.FSDPModule):
            module.reshard()
    loss.backward()


def unsharded_step(model: nn.Module, step: int) -> None:
    model.blocks[0].unshard()
    model.blocks[1].unshard(async_op=True).wait()
    loss = model(batch(step)).square().mean()
    model.blocks[1].unshard()
    loss.backward()


def hooked_step(model: nn.Module, step: int) -> None:
    """Under hooks of the user, which halve nothing and count everything that is no parameter."""
    packed = []
    with saved_tensors_hooks(lambda value: packed.append(value.shape) or value.clone(), lambda value: value):
        loss = model(batch(step)).square().mean()
    assert packed
    loss.backward()


def transformed_step(model: nn.Module, step: int) -> None:
    torch.func.vmap(lambda x: model(x.unsqueeze(0)).square().mean())(batch(step).detach()).sum().backward()


def hidden_output_step(model: nn.Module, step: int) -> None:
    """The loss hangs on a tensor that no forward returns."""
    kept: list[Tensor] = []
    model(batch(step), lambda block, x: kept.append(block(x)) or kept[-1].detach())
    sum(value.square().mean() for value in kept).backward()


STEPS = {
    step.__name__.removesuffix("_step"): step
    for step in (
        plain_step, checkpointed_step, reentrant_step, two_forwards_step, retained_step, forwards_first_step,
        resharded_step, unsharded_step, hooked_step, hidden_output_step,
    )
}  # fmt: skip


def shard(model: nn.Module, reshard: bool | int | None, policy: MixedPrecisionPolicy) -> nn.Module:
    for block in model.blocks:
        fully_shard(block, reshard_after_forward=reshard, mp_policy=policy)
    return fully_shard(model, mp_policy=policy)


def run_steps(models: Sequence[nn.Module], steps: Sequence[str]) -> Iterator[str]:
    """Trains models with the same batches; yields the name of each step while the gradients are there."""
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for number, name in enumerate(steps):
        for model, optimizer in zip(models, optimizers, strict=True):
            model.set_requires_gradient_sync(True)
            optimizer.zero_grad()
            STEPS[name](model, number)
        yield name
        for optimizer in optimizers:
            optimizer.step()


def compare(
    steps: list[str], written: bool, tied: bool, dtype: torch.dtype | None, ranks: int | bool
) -> None:
    """Against the same units where autograd keeps what it saves."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, output_dtype=torch.float32 if dtype else None)
    torch.manual_seed(0)
    plain = Model(written=written, tied=tied)
    kept, freed = shard(copy.deepcopy(plain), False, policy), shard(plain, ranks, policy)
    for module in kept.modules():
        if isinstance(module, graphshard.FSDPModule):
            module.set_unshard_in_backward(False)
    for name in run_steps((kept, freed), steps):
        for (path, parameter), expected in zip(freed.named_parameters(), kept.parameters(), strict=True):
            assert (parameter.grad is None) == (expected.grad is None), (name, path)
            if parameter.grad is not None:
                assert torch.equal(parameter.grad.to_local(), expected.grad.to_local()), (name, path)
    for one, other in zip(freed.parameters(), kept.parameters(), strict=True):
        assert torch.equal(one.to_local(), other.to_local())


def watch_memory() -> tuple[list[bool], int, int]:
    """Whether full weights outlive the forward, the most that live in the backward, and those that outlive it."""
    torch.manual_seed(0)
    model = shard(Model(count=5), True, MixedPrecisionPolicy())
    alive = []
    for block in model.blocks:
        block.register_forward_pre_hook(
            lambda module, args: note(args[0].register_hook(lambda grad: alive.append(count_live(model))))
        )
    loss = model(batch(0)).square().mean()
    outlived = [not memory.expired() for block in model.blocks for memory in block.memories]
    loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)
    return outlived, max(alive), count_live(model)


def note(value: object) -> None:
    """Takes any value; a hook may return None only."""


def count_live(model: nn.Module) -> int:
    return sum(unit.is_gathered for unit in {module.__dict__[UNIT] for module in model.blocks})


def test_one_unit_is_gathered_at_a_time(run_on_gloo_ranks):
    """And the one that comes next in the backward."""
    for outlived, at_a_time, left in run_on_gloo_ranks(2, watch_memory):
        assert not any(outlived) and len(outlived) == 6
        assert at_a_time == 1 and left == 0


def count_of_checkpointed(implementation: str, call: str) -> tuple[int, int]:
    torch.manual_seed(0)
    model = Model(twice=False)
    shard_units(implementation, model, list(model.blocks), reshard_after_forward=True)
    with count_collectives() as counts:
        model(
            batch(0), {"plain": lambda block, x: block(x), "checkpoint": checkpointed}[call]
        ).mean().backward()
    return counts["gathers"], counts["reductions"]


@pytest.mark.parametrize("call", ["plain", "checkpoint"])
def test_recomputation_and_gradient_share_a_gather(run_on_gloo_ranks, call):
    """FSDP2's numbers."""
    found = [run_on_gloo_ranks(2, count_of_checkpointed, each, call)[0] for each in ("fsdp2", "sharded")]
    assert found[0] == found[1] == (8, 4)


class Around(nn.Module):
    """Returns what another module returns, the same tensor."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.own = inner, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.own(x))


class Shift(nn.Module):
    """Its backward needs no parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset


def count_around(implementation: str) -> list[tuple[int, int, int]]:
    """The gathers of forward and backward and the reductions, for several ways to keep units."""
    counts = []
    for reshard, in_backward in ((True, True), (True, False), (None, True), (False, True)):
        torch.manual_seed(0)
        reference = Around(Around(nn.Sequential(Shift(), nn.Linear(WIDTH, WIDTH))))
        model = copy.deepcopy(reference)
        last = model.inner.inner
        options = {} if reshard is None else {"reshard_after_forward": reshard}
        shard_units(implementation, model, [last[0], last, model.inner], **options)
        last[0].set_unshard_in_backward(in_backward)
        with count_collectives() as in_forward:
            loss = model(batch(0)).square().sum()
        with count_collectives() as in_backward:
            loss.backward()
        counts.append((in_forward["gathers"], in_backward.get("gathers", 0), in_backward["reductions"]))
        reference(batch(0)).square().sum().backward()
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            dist.all_reduce(expected.grad, dist.ReduceOp.AVG)
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)
    return counts


@pytest.mark.parametrize("implementation", ["fsdp2", "sharded"])
def test_units_that_return_the_same_tensor(run_on_gloo_ranks, implementation):
    expected = [(4, 4, 4), (4, 3, 4), (4, 3, 4), (4, 0, 4)]
    assert run_on_gloo_ranks(2, count_around, implementation) == [expected] * 2


class Energy(nn.Module):
    """Its forward differentiates itself."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.func.grad(lambda value: self.first(value).tanh().sum())(x)


def differentiate_inside() -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(Energy(), nn.Linear(WIDTH, WIDTH))
    model = copy.deepcopy(reference)
    fully_shard(model[0])
    fully_shard(model)
    with pytest.raises(
        UnsupportedShardingError, match=r"unit 0 calls torch.func.grad.*set_unshard_in_backward\(False"
    ):
        model(batch(0))
    model[0].set_unshard_in_backward(False)
    for _ in range(2):
        model(batch(0)).square().mean().backward()
        reference(batch(0)).square().mean().backward()
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        dist.all_reduce(expected.grad, dist.ReduceOp.AVG)
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)


def write_to_activation() -> None:
    """Hooks of saved tensors switch off the check of autograd; ours checks."""
    model = fully_shard(Uses())
    hidden = batch(0) * 1
    values: list[Tensor] = []
    model.first.register_forward_pre_hook(lambda module, args: values.append(args[0]))
    loss = model(hidden).mean()
    with torch.no_grad():
        values[0].add_(1)
    with pytest.raises(RuntimeError, match=r"inplace operation: \[.* is at version 1; expected version 0"):
        loss.backward()


def interrupt_a_backward() -> None:
    """What the backward had gathered, and started to gather, is not what the next forward computes with."""
    torch.manual_seed(0)
    model = shard(Model(), True, MixedPrecisionPolicy())
    fail = [True]

    def interrupt(grad: Tensor) -> None:
        if fail[0]:
            raise ValueError("interrupted")

    hook = model.blocks[1].register_forward_hook(
        lambda module, args, output: note(output.register_hook(interrupt))
    )
    with pytest.raises(ValueError, match="interrupted"):
        model(batch(0)).mean().backward()
    hook.remove()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    fresh = shard(Model(), True, MixedPrecisionPolicy())
    fresh.load_state_dict(model.state_dict())
    model.zero_grad()
    for each in (model, fresh):
        each(batch(1)).mean().backward()
    for one, other in zip(model.parameters(), fresh.parameters(), strict=True):
        assert one.grad is None or torch.equal(one.grad.to_local(), other.grad.to_local())
    assert count_live(model) == 0


@pytest.mark.parametrize("function", [differentiate_inside, write_to_activation, interrupt_a_backward])
def test_what_hooks_of_saved_tensors_change(run_on_gloo_ranks, function):
    run_on_gloo_ranks(2, function)


#: Where weights are written, old activations must not meet new weights.
WITH_WRITES = ["plain", "retained", "resharded", "hooked", "hidden_output"]


@pytest.mark.parametrize(
    ("written", "dtype", "ranks", "tied"),
    [
        (False, None, True, False),
        (False, torch.bfloat16, True, False),
        (True, None, True, False),
        (False, None, 2, True),
    ],
)
def test_gradients_are_those_of_units_that_keep(run_on_gloo_ranks, written, dtype, ranks, tied):
    steps = WITH_WRITES if written else list(STEPS)
    if tied:
        steps.remove("unsharded")  # a unit that is freed and one that is not reduce the parts of a sum or the sum
    run_on_gloo_ranks(4 if ranks == 2 else 2, compare, steps, written, tied, dtype, ranks)


def count_with_comm_debug_mode() -> None:
    """Torch's counter lists parameters in a hook of its own, in which it cannot count the gather of a unit."""
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    seen = []
    model[0].register_forward_pre_hook(
        lambda module, _: seen.extend(value.shape for _, value in module.named_parameters())
    )
    fully_shard(model[2], reshard_after_forward=True)
    fully_shard(model, reshard_after_forward=False)  # its first read is that of a hook
    c10d = torch.ops.c10d
    for _ in range(2):
        with CommDebugMode() as in_forward:
            loss = model(torch.ones(2, 4, requires_grad=True)).sum()
        with CommDebugMode() as in_backward:
            loss.backward()
        assert in_forward.get_comm_counts() == {c10d._allgather_base_: 2}
        assert in_backward.get_comm_counts() == {c10d._allgather_base_: 1, c10d._reduce_scatter_base_: 2}
    assert seen == [(6, 4), (6,)] * 2


def test_comm_debug_mode_counts_as_for_fsdp2(run_on_gloo_ranks):
    run_on_gloo_ranks(2, count_with_comm_debug_mode)


class Ends(nn.Module):
    """Its first and last layer are one unit, tied or not; further layers run between them."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Embedding(9, 6), nn.Linear(6, 6), nn.Linear(6, 9, bias=False)
        if tied:
            self.last.weight = self.first.weight

    def forward(self, tokens: Tensor, kind: str = "all") -> Tensor:
        hidden = self.middle(self.first(tokens)).tanh()
        if kind == "twice":
            hidden = hidden + self.middle(self.first(tokens + 1))
        if kind == "raises":
            raise ValueError("in the middle")
        return hidden if kind == "part" else self.last(hidden)


def run_units_of_two_modules(
    implementation: str, reshard: bool | None, tied: bool
) -> list[tuple[int, int, int]]:
    """The gathers of forward and backward and the reductions, for several forwards."""
    torch.manual_seed(42)
    reference, options = Ends(tied), {} if reshard is None else {"reshard_after_forward": reshard}
    model = copy.deepcopy(reference)
    shard_units(implementation, model, [[model.first, model.last], model.middle], **options)
    world_size, counts = dist.get_world_size(), []
    for kind in ("all", "twice", "part", "all"):
        tokens = [torch.randint(8, (5,), generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
        if kind == "part" and implementation == "sharded":
            with pytest.raises(ValueError, match="in the middle"):
                model(tokens[dist.get_rank()], "raises")
        with count_collectives() as in_forward:
            loss = model(tokens[dist.get_rank()], kind).square().sum()
        with count_collectives() as in_backward:
            loss.backward()
        counts.append((in_forward["gathers"], in_backward.get("gathers", 0), in_backward["reductions"]))
        for each in tokens:
            (reference(each, kind).square().sum() / world_size).backward()
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            if expected.grad is not None:
                torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)
        model.zero_grad()
        reference.zero_grad()
    return counts


@pytest.mark.parametrize("implementation", ["fsdp2", "sharded"])
@pytest.mark.parametrize("reshard", [True, False, None])
def test_a_unit_of_two_modules_is_gathered_once_a_forward(run_on_gloo_ranks, implementation, reshard):
    again = 0 if reshard is False else 2
    for tied in (True, False):
        counts = run_on_gloo_ranks(2, run_units_of_two_modules, implementation, reshard, tied)
        assert [counts[0][index] for index in (0, 3)] == [(2, again, 2)] * 2
        assert counts[0] == counts[1]


class Half(nn.Module):
    """Computes its second half as a function says: in a checkpoint, for instance."""

    def __init__(self, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.rest = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        if self.call is reentrant_whole:
            return self.call(lambda x: self.rest(self.first(x).tanh()), x)
        return self.call(self.rest, self.first(x).tanh())


class Halves(nn.Module):
    """Such blocks and a head, all called ``call``'s way if that is for the blocks."""

    def __init__(self, inside: Callable[..., Tensor], outside: Callable[..., Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Half(inside) for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.call = outside

    def loss(self, step: int, num_blocks: int = 3) -> Tensor:
        return self(batch(step), num_blocks).square().mean()

    def forward(self, x: Tensor, num_blocks: int) -> Tensor:
        for block in self.blocks[:num_blocks]:
            x = self.call(block, x)
        return self.head(x)


def one_forward(model: Halves) -> None:
    model.loss(0).backward()


def three_forwards(model: Halves) -> None:
    sum(model.loss(step) for step in range(3)).backward()


def three_backwards(model: Halves) -> None:
    for loss in [model.loss(step) for step in range(3)]:
        loss.backward()


def fewer_parameters(model: Halves) -> None:
    """The forward whose backward comes last does not use all units."""
    few = model.loss(0, num_blocks=1)
    (few + model.loss(1)).backward()


def backwards_that_overlap(model: Halves) -> None:
    """The second backward visits one of two forwards."""
    losses = [model.loss(step) for step in range(2)]
    sum(losses).backward(retain_graph=True)
    losses[0].backward()


def micro_batches(model: Halves) -> None:
    """As pipelines accumulate: nothing is reduced, and nothing freed after the backward, until the last one."""
    for step in range(3):
        if hasattr(model, "reshard"):
            model.set_requires_gradient_sync(step == 2)
            model.set_reshard_after_backward(step == 2)
        model.loss(step).backward()


def not_the_last_backward(model: Halves) -> None:
    """What the backward has added up of a checkpoint does not wait for the last backward."""
    if hasattr(model, "reshard"):
        model.set_is_last_backward(False)
    one_forward(model)


def plain(block: nn.Module, x: Tensor) -> Tensor:
    return block(x)


def reentrant_whole(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Of all that a block computes: autograd reads none of its parameters outside of the checkpoint."""
    return checkpoint(function, x, use_reentrant=True)


#: Who trains, and how parts of blocks and blocks are called.
COUNTED = [
    *((train, plain, plain) for train in (three_forwards, three_backwards, fewer_parameters)),
    *((train, plain, plain) for train in (backwards_that_overlap, micro_batches)),
    (one_forward, reentrant, plain),
    (one_forward, reentrant_whole, plain),
    (not_the_last_backward, reentrant_whole, plain),
    (three_forwards, reentrant, plain),
    (micro_batches, reentrant, plain),
    (one_forward, plain, reentrant),
    (three_forwards, checkpointed, plain),
]


def count_collectives_of_both() -> list[tuple[str, dict[str, int], dict[str, int]]]:
    """Gathers and reductions, of FSDP2 and here; the gradients are those of the unsharded model."""
    found = []
    for train, inside, outside in COUNTED:
        name = f"{train.__name__}, {inside.__name__}, {outside.__name__}"
        torch.manual_seed(0)
        reference = Halves(inside, outside)
        models = [copy.deepcopy(reference) for _ in range(2)]
        counts = []
        for implementation, model in zip(("fsdp2", "sharded"), models, strict=True):
            shard_units(implementation, model, list(model.blocks), reshard_after_forward=True)
            with count_collectives() as counted:
                train(model)
            counts.append(dict(counted))
        train(reference)
        for (path, parameter), expected in zip(
            models[1].named_parameters(), reference.parameters(), strict=True
        ):
            dist.all_reduce(expected.grad, dist.ReduceOp.AVG)
            torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad, msg=f"{name}: {path}")
        found.append((name, *counts))
    return found


def test_collectives_are_as_many_as_fsdp2s(run_on_gloo_ranks):
    """Several forwards before a backward, reentrant checkpoints, accumulation: one reduction a unit and backward."""
    for name, theirs, ours in run_on_gloo_ranks(2, count_collectives_of_both)[0]:
        # FSDP2 reduces each checkpoint of the earlier backwards alone.
        fewer = {"reductions": 4} if name == "three_forwards, reentrant, plain" else {}
        assert ours == theirs | fewer, name


def differentiate_two_forwards() -> None:
    """``torch.autograd.grad`` returns the sum. After a backward that raises, ``zero_grad`` drops what was added up."""
    torch.manual_seed(0)
    reference = Halves(plain, plain)
    model = copy.deepcopy(reference)
    shard_units("sharded", model, list(model.blocks), reshard_after_forward=True)

    def stop(grad: Tensor) -> None:
        raise ArithmeticError

    first = model.loss(0)
    first.register_hook(stop)
    with pytest.raises(ArithmeticError):
        (model.loss(1) + first).backward()
    model.zero_grad()
    for each in (reference, model):
        loss = each.loss(0) + each.loss(1)
        for parameter, grad in zip(
            each.parameters(), torch.autograd.grad(loss, list(each.parameters())), strict=True
        ):
            parameter.grad = grad
    for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
        dist.all_reduce(expected.grad, dist.ReduceOp.AVG)
        torch.testing.assert_close(parameter.grad.full_tensor(), expected.grad)


def test_gradients_of_two_forwards_by_grad(run_on_gloo_ranks):
    run_on_gloo_ranks(2, differentiate_two_forwards)
