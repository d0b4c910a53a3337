"""Blocks that are compiled one by one: they share a graph, and their units run as without a compiler."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.comm_counts import count_collectives
from support.fsdp1 import full_gradients, wrap
from support.implementations import pick_fully_shard, world_mesh
from support.parity import check_shard
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard import fully_shard
from graphshard.errors import ParameterStateError
from ranks.test_gathered_again import STEPS, WIDTH, Model, batch, count_live, run_steps, shard

Run = Callable[..., list[Any]]


def _check_gradients(found: nn.Module, reference: nn.Module) -> None:
    for (path, parameter), expected in zip(found.named_parameters(), reference.parameters(), strict=True):
        assert (parameter.grad is None) == (expected.grad is None), path
        if parameter.grad is not None:
            assert_close(parameter.grad.to_local(), expected.grad.to_local())


def compare(
    steps: list[str], written: bool, tied: bool, dtype: torch.dtype | None, ranks: int | bool
) -> None:
    """Against the same units uncompiled."""
    policy = MixedPrecisionPolicy(param_dtype=dtype, output_dtype=torch.float32 if dtype else None)
    torch.manual_seed(0)
    plain = Model(written=written, tied=tied)
    plain.blocks[1].table.max_norm = None  # see renorm_inside
    models = [shard(copy.deepcopy(plain), ranks, policy) for _ in range(2)]
    for block in models[1].blocks:
        block.compile(backend="aot_eager")
    for _ in run_steps(models, steps):
        _check_gradients(models[1], models[0])


CASES = {
    "steps": (list(STEPS), False, False, None, True),
    "tied": (["plain"] * 2, False, True, None, 2),
    "written": (["plain"] * 2, True, False, None, True),
    "bfloat16": (["plain"] * 2, False, False, torch.bfloat16, True),
    "kept": (["plain", "forwards_first"], False, False, None, False),
}


def compare_retaining(*case: Any) -> None:
    with torch._functorch.config.patch(donated_buffer=False):  # else compiled code refuses retain_graph
        compare(*case)


@pytest.mark.parametrize("case", CASES)
def test_as_uncompiled(run_on_gloo_ranks: Run, case: str) -> None:
    run_on_gloo_ranks(2, compare_retaining, *CASES[case])


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 9), nn.Linear(9, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).tanh())


class Block(nn.Module):
    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.inner = Inner()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)
        self.register_parameter("bias", None)
        self.fails = fails

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise KeyError("in the block")
        assert self.bias is None and len(list(self.named_parameters())) == 5
        return x + self.inner(x) * self.scale


class Stack(nn.Module):
    def __init__(self, count: int = 10) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def _shard_stack(model: Stack, implementation: str, form: str, backend: str) -> None:
    """Compiles the blocks of a model and shards it; `form` is the order, and what compiles."""
    kwargs = {"backend": backend, "fullgraph": True}
    fully = pick_fully_shard(implementation)
    for index, block in enumerate(model.blocks):
        if form == "before":
            block.compile(**kwargs)
        if form == "wrapped":
            model.blocks[index] = torch.compile(block, **kwargs)
        if form != "root":
            fully(model.blocks[index], mesh=world_mesh())
        if form == "after":
            block.compile(**kwargs)
        if form in ("root", "parts"):
            block.inner.compile(**kwargs)
    fully(model, mesh=world_mesh())


def train_stack(implementation: str, form: str, backend: str) -> tuple[int, list[tuple[int, int, int]]]:
    """The number of graphs, and the collectives of a step: gathers in the forward and backward, and reductions."""
    torch.manual_seed(0)
    reference = Stack()
    model = copy.deepcopy(reference)
    _shard_stack(model, implementation, form, backend)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (reference, model)]
    counts = []
    generator = torch.Generator().manual_seed(0)
    for _ in range(3):
        batches = torch.randn(dist.get_world_size(), 3, WIDTH, generator=generator)
        for each in batches:
            (reference(each).square().mean() / len(batches)).backward()
        with count_collectives() as forward:
            loss = model(batches[dist.get_rank()]).square().mean()
        with count_collectives() as backward:
            loss.backward()
        counts.append((forward["gathers"], backward.get("gathers", 0), backward["reductions"]))
        for (name, expected), found in zip(reference.named_parameters(), model.parameters(), strict=True):
            check_shard(f"gradient of {name}", expected.grad, found.grad)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    with torch.no_grad():
        assert_close(model(batches[0]), reference(batches[0]))
    names = {name.replace("_orig_mod.", "") for name in model.state_dict()}
    assert names == set(reference.state_dict())
    return torch._dynamo.utils.counters["stats"]["unique_graphs"], counts


@pytest.mark.parametrize("form", ["before", "after", "wrapped", "parts", "root"])
def test_equal_blocks_share_a_graph(run_on_gloo_ranks: Run, form: str) -> None:
    """Ten blocks, more than Dynamo compiles again; as many graphs and collectives as with FSDP2."""
    found = run_on_gloo_ranks(2, train_stack, "sharded", form, "aot_eager")
    theirs = run_on_gloo_ranks(2, train_stack, "fsdp2", form, "aot_eager")
    for (graphs, counts), (their_graphs, their_counts) in zip(found, theirs, strict=True):
        assert graphs <= their_graphs <= 4
        assert counts == their_counts == [(1, 0, 1) if form == "root" else (11, 10, 11)] * 3


@pytest.mark.parametrize("backend", ["graphshard", "inductor"])
def test_blocks_through_a_backend(run_on_gloo_ranks: Run, backend: str) -> None:
    for graphs, _ in run_on_gloo_ranks(2, train_stack, "sharded", "after", backend):
        assert graphs <= 4


def hold_one_block() -> None:
    """What autograd saves of the full parameters of a compiled block is freed after its forward."""
    torch.manual_seed(0)
    model = Stack(5)
    _shard_stack(model, "sharded", "after", "aot_eager")
    alive: list[int] = []
    for block in model.blocks:
        block.register_full_backward_pre_hook(lambda *_: alive.append(count_live(model)))
    for _ in range(2):
        loss = model(batch(0)).square().mean()
        assert count_live(model) == 0
        loss.backward()
        assert count_live(model) == 0
    assert len(alive) == 10 and max(alive) <= 2, alive


def fail_inside() -> None:
    """A forward that fails leaves sharded modules behind."""
    model = Stack(2)
    _shard_stack(model, "sharded", "after", "eager")
    classes, shards = [type(each) for each in model.modules()], list(model.parameters())
    model.blocks[1].fails = True
    with pytest.raises(Exception, match="in the block"):
        model(batch(0))
    assert [type(each) for each in model.modules()] == classes
    assert all(one is other for one, other in zip(model.parameters(), shards, strict=True))
    model.blocks[1].fails = False
    model(batch(0)).sum().backward()
    assert all(each.grad is not None for each in shards)


def compile_whole_of_compiled_blocks() -> None:
    """A model that is compiled as a whole, inspected or copied does as if its blocks were not compiled."""
    torch.manual_seed(0)
    reference = Stack(2)
    model = copy.deepcopy(reference)
    _shard_stack(model, "sharded", "after", "aot_eager")
    report = graphshard.inspect(model, (batch(0),), loss=torch.sum)
    assert {each.name for each in report.model.units} >= {"blocks.0", "blocks.1"}
    torch._dynamo.utils.counters.clear()
    torch.compile(model, backend="graphshard", fullgraph=True)(batch(0)).sum().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    copied = copy.deepcopy(model)
    model.zero_grad()
    for each in (model, copied, reference):
        each(batch(0)).sum().backward()
    _check_gradients(copied, model)


def renorm_inside() -> None:
    """What AOTAutograd writes to an input with gradients enabled would be lost."""
    model = shard(Model(count=2, written=True, twice=False), True, MixedPrecisionPolicy())
    model.blocks[1].compile(backend="aot_eager")
    with pytest.raises(ParameterStateError, match=r"blocks\.1\.table\.weight is written in place"):
        model(batch(0))


ASKING = {"hardware": "cpu-ethernet-1g", "memory_budget": "1GiB", "planning_seconds": 5.0}


def pass_options_to_a_block() -> None:
    """A block that is compiled by itself has no plan; what asks for one is told."""
    model = Stack(2)
    _shard_stack(model, "sharded", "none", "graphshard")
    model.blocks[0].compile(backend="graphshard", options=ASKING)
    model.blocks[1].compile(backend="graphshard", options={"verify": "off"})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        model(batch(0)).sum().backward()
    told = [str(each.message) for each in caught if "without effect" in str(each.message)]
    assert len(told) == 1 and "memory_budget, planning_seconds without effect: this block is" in told[0]


def _with_compiled(block: nn.Module, backend: str) -> tuple[nn.Module, nn.Module]:
    """A model with a block, and its sharded copy whose block is compiled."""
    torch.manual_seed(0)
    reference = nn.Sequential(block, nn.Linear(WIDTH, WIDTH))
    model = copy.deepcopy(reference)
    for each in (model[0], model):
        fully_shard(each, mesh=world_mesh())
    model[0].compile(backend=backend)
    return reference, model


class Replaces(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.scale = nn.Parameter(torch.ones(WIDTH))
        return super().forward(x)


def replace_inside() -> None:
    _, model = _with_compiled(Replaces(), "eager")
    scale = model[0].scale
    with pytest.raises(ParameterStateError, match=r"parameter 0\.scale is replaced in the forward of a compiled block"):
        model(batch(0))
    assert model[0].scale is scale


class Recurrent(nn.Module):
    """Dynamo leaves torch's recurrent layers to Python, in the middle of compiled code."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.lstm = nn.Linear(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(self.before(x).tanh())[0]


def run_recurrent_block() -> None:
    reference, model = _with_compiled(Recurrent(), "aot_eager")
    for _ in range(2):
        x = batch(0)
        dist.broadcast(x.data, 0)
        for each in (reference, model):
            each.zero_grad()
            each(x).square().sum().backward()
        assert "_flat_weights" not in model[0].lstm.__dict__
        for (name, expected), found in zip(reference.named_parameters(), model.parameters(), strict=True):
            check_shard(f"gradient of {name}", expected.grad, found.grad)


def wrap_compiled_blocks() -> None:
    """FSDP1's wrappers around blocks that are compiled."""
    torch.manual_seed(0)
    reference = Stack()
    model = copy.deepcopy(reference)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    wrapped = wrap("sharded", model, auto_wrap_policy=ModuleWrapPolicy({Block}))
    for _ in range(2):
        wrapped.zero_grad()
        wrapped(torch.full((2, WIDTH), 1.0 + dist.get_rank())).square().sum().backward()
    for rank in range(2):
        (reference(torch.full((2, WIDTH), 1.0 + rank)).square().sum() / 2).backward()
    assert_close(full_gradients(wrapped), {name: each.grad for name, each in reference.named_parameters()})
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 3


class InParts(Block):
    """Its compiled part runs again in the backward, behind a graph break."""

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale
        torch._dynamo.graph_break()
        return x + checkpoint(self.inner, x, use_reentrant=False)


def run_parts_again() -> None:
    """A compiled part is computed again as it was computed; inside of a compiled block it is compiled code of both."""
    for is_block_compiled in (False, True):
        torch._dynamo.reset()
        torch.manual_seed(0)
        reference = nn.Sequential(*(InParts() for _ in range(3)), nn.Linear(WIDTH, WIDTH))
        model = copy.deepcopy(reference)
        for block in model[:3]:
            block.inner.compile(backend="aot_eager")
            fully_shard(block, mesh=world_mesh())
            if is_block_compiled:
                block.compile(backend="aot_eager")
        fully_shard(model, mesh=world_mesh())
        for _ in range(2):
            model.zero_grad()
            model(torch.full((2, WIDTH), 1.0 + dist.get_rank())).square().sum().backward()
        for rank in range(2):
            (reference(torch.full((2, WIDTH), 1.0 + rank)).square().sum() / 2).backward()
        for (name, expected), found in zip(reference.named_parameters(), model.parameters(), strict=True):
            check_shard(f"gradient of {name}", expected.grad, found.grad)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.own = Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.own(self.inner(x))


def compile_nested() -> None:
    """A compiled block with a unit inside has its collectives in its graph, as before."""
    torch.manual_seed(0)
    reference = nn.Sequential(Nested(), nn.Linear(WIDTH, WIDTH))
    model = copy.deepcopy(reference)
    for each in (model[0].inner, model[0], model):
        fully_shard(each, mesh=world_mesh())
    model[0].compile(backend="graphshard", fullgraph=True)
    for rank in range(2):
        (reference(torch.full((2, WIDTH), 1.0 + rank)).sum() / 2).backward()
    model(torch.full((2, WIDTH), 1.0 + dist.get_rank())).sum().backward()
    for (name, expected), found in zip(reference.named_parameters(), model.parameters(), strict=True):
        check_shard(f"gradient of {name}", expected.grad, found.grad)


class Decorated(Inner):
    """Its class has it compiled; it has no parameters of its own."""

    @torch.compile(backend="eager")
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class DecoratedBlock(Block):
    @torch.compile(backend="eager")
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 + self.inner(x) * self.scale


class OfParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wrapped, self.own, self.decorated = Block(), Inner(), Decorated()
        self.scale = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.decorated(self.own(self.wrapped(x))) * self.scale


def share_other_compiled_forwards() -> None:
    """Wrappers of torch.compile inside of units, forwards that are compiled, and those of classes; copies too."""
    torch.manual_seed(0)
    reference = Stack(0)
    reference.blocks.extend(block for _ in range(9) for block in (OfParts(), DecoratedBlock()))
    model = copy.deepcopy(reference)
    for block in model.blocks:
        if isinstance(block, OfParts):
            block.wrapped = torch.compile(block.wrapped, backend="eager", fullgraph=True)
            block.own.forward = torch.compile(block.own.forward, backend="eager")
        fully_shard(block, mesh=world_mesh())
    fully_shard(model, mesh=world_mesh())
    x = torch.ones(2, WIDTH)
    with torch.compiler.set_stance("force_eager"):
        reference(x).square().mean().backward()
    with count_collectives() as counts:
        model(x).square().mean().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 5  # four, and one for an input without gradient
    assert counts == {"gathers": 37, "reductions": 19}
    for (name, expected), found in zip(reference.named_parameters(), model.parameters(), strict=True):
        check_shard(f"gradient of {name}", expected.grad, found.grad)
    for block in model.blocks[::2]:
        block.own = nn.Identity()  # torch's copy of such a forward is that of the first model
    copied = copy.deepcopy(model)
    torch._dynamo.utils.counters.clear()
    for each in (model, copied):
        each.zero_grad()
        each(x).square().mean().backward()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    _check_gradients(copied, model)


class Late(Block):
    """Makes a parameter, asks for others by name, and a part writes to one through .data."""

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            self.bias = nn.Parameter(torch.ones(WIDTH))
        for name in ("scale", "inner.up.weight"):
            assert isinstance(self.get_parameter(name), nn.Parameter)
        return (x + self.inner(x)) * self.scale + self.bias


def make_parameters_inside() -> None:
    """What is no shard stays with its module, as without a compiler."""
    reference, model = _with_compiled(Late(), "eager")
    made = None
    for _ in range(2):
        for each in (reference, model):
            each.zero_grad()
            each(torch.ones(2, WIDTH)).square().mean().backward()
        assert made is None or model[0].bias is made
        made = model[0].bias
        assert_close(made.grad, reference[0].bias.grad)
    assert "0.bias" in model.state_dict()


class WritesBehind(Block):
    """Writes through .data, which moves no version, behind a compiled part."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        self.inner.up.weight.data.mul_(0.5)
        return x * self.scale


def write_behind_a_part() -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(WritesBehind(), nn.Linear(WIDTH, WIDTH))
    models = [copy.deepcopy(plain) for _ in range(3)]
    models[1][0].inner.compile(backend="aot_eager")
    models[2][0].forward = torch.compiler.disable(models[2][0].forward)
    for model in models:
        for each in (model[0], model):
            fully_shard(each, mesh=world_mesh())
        model(batch(0)).square().mean().backward()
    half = plain[0].inner.up.weight * 0.5
    for model in models:
        check_shard("weight", half, model[0].inner.up.weight)
        _check_gradients(model, models[0])


FUNCTIONS = (
    hold_one_block, fail_inside, compile_whole_of_compiled_blocks, renorm_inside, pass_options_to_a_block,
    replace_inside, run_recurrent_block, wrap_compiled_blocks, compile_nested,
    run_parts_again, share_other_compiled_forwards, make_parameters_inside, write_behind_a_part,
)  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
def test_a_compiled_block(run_on_gloo_ranks: Run, function: Callable[[], None]) -> None:
    run_on_gloo_ranks(2, function)
