"""Compiled models that Dynamo cannot trace as a whole: the frames of ours that it meets run as they are.

After a graph break, Dynamo runs the broken frame and starts again at each function that it calls. Where it starts at a
function of graphshard (a parameter read by code that it skips, a gather, a hook), it must not trace it.
"""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from support.implementations import compile_if_asked, shard_units, world_mesh
from support.parity import check_sharded_parity
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import graphshard

DIM = 6


def batch_of(rank: int, step: int = 0) -> Tensor:
    return torch.randn(3, 4, DIM, generator=torch.Generator().manual_seed(10 * step + rank))


def frames_of_ours() -> set[str]:
    """The functions of graphshard at which Dynamo started, but for the forwards of units."""
    started = torch._dynamo.utils.get_compilation_metrics()
    found = {
        f"{each.co_filename}:{each.co_name}" for each in started if "graphshard/" in (each.co_filename or "")
    }
    return {
        name for name in found if not name.endswith(("sharded_class.py:forward", "sharded_class.py:method"))
    }


def check_training(
    reference: nn.Module,
    model: nn.Module,
    forward: Callable[..., Tensor],
    *,
    steps: int = 2,
    call: Callable[..., Tensor] | None = None,
) -> None:
    """Losses and gradients of a sharded model are those of the unsharded one; no frame of ours was traced.

    `call` calls the unsharded model if that needs more than its forward.
    """
    torch._dynamo.utils.clear_compilation_metrics()
    size = dist.get_world_size()
    for step in range(steps):
        for each in (reference, model):
            each.zero_grad()
        losses = [(call or reference)(batch_of(rank, step)).square().mean() for rank in range(size)]
        (torch.stack(losses).sum() / size).backward()
        loss = forward(batch_of(dist.get_rank(), step)).square().mean()
        loss.backward()
        assert_close(loss, losses[dist.get_rank()])
        check_sharded_parity(reference, model)
    assert not frames_of_ours()


class Recurrent(nn.Module):
    """Dynamo does not trace torch's recurrent layers."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.layers = kind(DIM, 5, batch_first=True, bidirectional=True)
        self.last = nn.Linear(10, DIM)

    def forward(self, x: Tensor) -> Tensor:
        hidden, _ = self.layers(torch.tanh(self.first(x)))
        return self.last(hidden)


def train_recurrent(kind: type[nn.RNNBase], is_unit: bool) -> None:
    torch.manual_seed(42)
    reference = Recurrent(kind)
    model = copy.deepcopy(reference)
    shard_units("compiled", model, [model.layers] if is_unit else [])
    check_training(reference, model, torch.compile(model, backend="graphshard"))


@pytest.mark.parametrize(
    ("kind", "is_unit"), [(nn.RNN, False), (nn.GRU, True), (nn.LSTM, True), (nn.LSTM, False)]
)
def test_recurrent_layers(run_on_gloo_ranks, kind, is_unit):
    run_on_gloo_ranks(2, train_recurrent, kind, is_unit)


class Breaking(nn.Module):
    """A block with a place that Dynamo does not trace, between reads of its parameters."""

    def __init__(self, place: str) -> None:
        super().__init__()
        self.place = place
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(getattr(self, self.place)(self.first(x)))) * self.scale

    def in_a_loop(self, x: Tensor) -> Tensor:
        for _ in range(2):
            torch._dynamo.graph_break()
            x = x * self.scale
        return x

    def in_a_try_block(self, x: Tensor) -> Tensor:
        try:
            torch._dynamo.graph_break()
            return self.second(x) * self.scale
        finally:
            self.was_here = True

    def in_a_generator(self, x: Tensor) -> Tensor:
        def parts():
            for weight in (self.scale, self.second.weight.sum()):
                torch._dynamo.graph_break()
                yield x * weight

        return sum(parts())

    def without_gradients(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            torch._dynamo.graph_break()
            other = self.second(x)
        return x + other

    @torch.compiler.disable
    def in_a_disabled_method(self, x: Tensor) -> Tensor:
        return self.second(x) * self.scale

    @torch.compiler.disable(recursive=False)
    def in_a_disabled_frame(self, x: Tensor) -> Tensor:
        return self.second(x) * self.scale

    def on_a_number(self, x: Tensor) -> Tensor:
        return self.second(x) if self.scale.sum().item() > 1e6 else x * self.scale

    def in_a_checkpoint(self, x: Tensor) -> Tensor:
        return checkpoint(self.in_a_loop, x, use_reentrant=False)

    def nowhere(self, x: Tensor) -> Tensor:
        return x


PLACES = [name for name in vars(Breaking) if name.startswith(("in_", "on_", "without_"))]


def train_breaking(place: str, with_units: bool) -> None:
    torch.manual_seed(42)
    reference = nn.Sequential(Breaking(place), nn.Linear(DIM, DIM))
    model = copy.deepcopy(reference)
    shard_units("compiled", model, [model[0]] if with_units else [])
    check_training(reference, model, torch.compile(model, backend="graphshard"), steps=1)


@pytest.mark.compiles("in_a_generator", "in_a_checkpoint", "on_a_number-False")
@pytest.mark.parametrize(
    ("place", "with_units"),
    [*((place, True) for place in PLACES), ("in_a_loop", False), ("on_a_number", False)],
)
def test_places_that_dynamo_does_not_trace(run_on_gloo_ranks, place, with_units):
    run_on_gloo_ranks(2, train_breaking, place, with_units)


class _Averaging(nn.Module):
    """Its disabled parts lie in the middle of the model, one of them a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unit, self.part, self.last = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.part(torch.tanh(self.unit(torch.tanh(self.first(x)))))))


def train_with_disabled_modules() -> None:
    torch.manual_seed(42)
    reference = _Averaging()
    model = copy.deepcopy(reference)
    shard_units("compiled", model, [model.unit])
    model.unit = torch.compiler.disable(model.unit)
    model.part = torch.compiler.disable(model.part)
    forward = torch.compile(model, backend="graphshard")
    losses = [reference(batch_of(rank)).square().mean() for rank in range(2)]
    (sum(losses) / 2).backward()
    loss = forward(batch_of(dist.get_rank())).square().mean()
    loss.backward()
    assert_close(loss, losses[dist.get_rank()])
    found = {name.replace("._orig_mod", ""): each for name, each in model.named_parameters()}
    for name, parameter in reference.named_parameters():
        assert_close(found[name].grad.full_tensor(), parameter.grad)


def test_disabled_modules(run_on_gloo_ranks):
    run_on_gloo_ranks(2, train_with_disabled_modules)


def train_with_mixed_precision() -> None:
    """Casts of inputs and outputs run without Dynamo too: equal to the uncompiled model."""
    torch.manual_seed(42)
    policy = graphshard.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    reference = nn.Sequential(Breaking("in_a_loop"), Breaking("in_a_disabled_method"))
    results = []
    for implementation in ("sharded", "compiled"):
        model = copy.deepcopy(reference)
        shard_units(implementation, model, list(model), mp_policy=policy)
        forward = compile_if_asked(implementation, model, fullgraph=False)
        loss = forward(batch_of(dist.get_rank())).float().square().mean()
        loss.backward()
        results.append([loss.detach(), *(each.grad.full_tensor() for each in model.parameters())])
    assert not frames_of_ours()
    assert_close(*results, rtol=2e-2, atol=2e-2)


def test_mixed_precision_around_a_break(run_on_gloo_ranks):
    run_on_gloo_ranks(2, train_with_mixed_precision)


def train_in_one_function() -> None:
    """Backward, clipping and optimizer inside of the compiled function."""
    torch.manual_seed(42)
    reference = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))
    model = copy.deepcopy(reference)
    shard_units("compiled", model, [model[0]])
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (reference, model)]

    def train(forward: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor) -> Tensor:
        loss = forward(batch).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(forward.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    step = torch.compile(train, backend="graphshard")
    torch._dynamo.utils.clear_compilation_metrics()
    for number in range(3):
        batch = batch_of(0, number)  # equal on all ranks
        assert_close(step(model, optimizers[1], batch), train(reference, optimizers[0], batch))
    check_sharded_parity(reference, model)
    assert not frames_of_ours()


def test_whole_step_in_one_compiled_function(run_on_gloo_ranks):
    run_on_gloo_ranks(2, train_in_one_function)


def control_in_a_compiled_function() -> None:
    """Methods of units that communicate run as they are, others are traced."""
    torch.manual_seed(42)
    reference = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    model = copy.deepcopy(reference)
    shard_units("compiled", model, [model[0]])

    def run(batch: Tensor) -> Tensor:
        handle = model[0].unshard(async_op=True)
        model[1].weight  # noqa: B018
        handle.wait()
        result = model(batch)
        model[0].reshard()
        return result

    check_training(reference, model, torch.compile(run, backend="graphshard"))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="change what modules hold"):
        torch.compile(run, backend="graphshard", fullgraph=True)(batch_of(0))


def test_unshard_in_a_compiled_function(run_on_gloo_ranks):
    run_on_gloo_ranks(2, control_in_a_compiled_function)


def train_unused_around_a_break() -> None:
    """Parameters that no rank uses get zeros, as their unit asks."""
    torch.manual_seed(42)
    reference = nn.Sequential(Breaking("in_a_loop"))
    reference[0].spare = nn.Parameter(torch.ones(4))
    model = copy.deepcopy(reference)
    shard_units("compiled", model, [model[0]])
    model.set_reduce_scatter_unused_params(True)

    def with_zeros(batch: Tensor) -> Tensor:
        return reference(batch) + 0.0 * reference[0].spare.sum()

    check_training(reference, model, torch.compile(model, backend="graphshard"), call=with_zeros)


def test_unused_parameters_around_a_break(run_on_gloo_ranks):
    run_on_gloo_ranks(2, train_unused_around_a_break)


class Named(nn.Module):
    """Trained through a method that is no forward."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = Breaking("in_a_loop"), nn.Linear(DIM, DIM)

    def encode(self, x: Tensor) -> Tensor:
        x = self.inner(x)
        torch._dynamo.graph_break()
        return self.outer(x)

    forward = encode


def train_through_a_method() -> None:
    torch.manual_seed(42)
    reference = Named()
    model = copy.deepcopy(reference)
    shard_units("compiled", model, [model.inner])
    graphshard.register_fsdp_forward_method(model, "encode")
    check_training(reference, model, torch.compile(model.encode, backend="graphshard"))


def test_forward_method_with_breaks(run_on_gloo_ranks):
    run_on_gloo_ranks(2, train_through_a_method)


def compile_many() -> int:
    """More models of classes of their own than Dynamo compiles of one function."""
    torch._dynamo.utils.clear_compilation_metrics()
    for number in range(4):
        kind = type(
            f"Kind{number}", (nn.Linear,), {"forward": lambda self, x: torch.tanh(F.linear(x, self.weight))}
        )
        model = graphshard.fully_shard(kind(DIM, DIM, bias=False), mesh=world_mesh())
        torch.compile(model, backend="graphshard")(batch_of(0))
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def compile_many_within_a_limit() -> None:
    with torch._dynamo.config.patch(recompile_limit=2):
        assert compile_many() == 4


def test_classes_do_not_share_the_limit_of_recompilations(run_on_gloo_ranks):
    run_on_gloo_ranks(2, compile_many_within_a_limit)


def train_blocks_beyond_the_limit() -> None:
    """Sharded blocks that are wrapped one by one are traced for each: those beyond the limit run uncompiled."""
    torch.manual_seed(42)
    reference = nn.Sequential(*(Breaking("nowhere") for _ in range(4)))
    model = copy.deepcopy(reference)
    shard_units("compiled", model, list(model))
    with torch._dynamo.config.patch(recompile_limit=2):
        for blocks in (model, reference):
            for index, block in enumerate(blocks):
                blocks[index] = torch.compile(block, backend="graphshard" if blocks is model else "eager")
        check_training(reference, model, model)


def test_blocks_beyond_the_limit_of_recompilations(run_on_gloo_ranks):
    run_on_gloo_ranks(2, train_blocks_beyond_the_limit)


class BreaksOnOneRank(nn.Module):
    """Rank 1 has a graph break; its layers are of sizes that no other test has, so that its graphs are new."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, 23), nn.Linear(23, 29)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if dist.get_rank() == 1:
            torch._dynamo.graph_break()
        return self.second(x)


def break_on_one_rank() -> str:
    model = shard_units("compiled", BreaksOnOneRank(), [])
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed) as caught:
        torch.compile(model, backend="graphshard")(batch_of(0))
    assert isinstance(caught.value.inner_exception, graphshard.GraphShardError)
    return str(caught.value)


def test_a_break_on_one_rank_is_refused_on_both(run_on_gloo_ranks):
    for message in run_on_gloo_ranks(2, break_on_one_rank):
        assert "the ranks would issue different collectives" in message
