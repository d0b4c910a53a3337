"""Models with activation checkpointing train like unsharded ones, whatever form the checkpointing takes."""

import copy
import functools
from typing import Any

import pytest
import torch
from support.checkpointed_models import FORMS, build_checkpointed, units_of, wrap_blocks
from support.implementations import GRAPHSHARD, UNCOMPILED, compile_if_asked, shard_units
from support.parity import Lockstep, make_adam, start_lockstep
from support.toy_models import Workload
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import CheckpointError, checkpoint

from graphshard.errors import ParameterStateError

CHECKPOINTING = FORMS[1:]

#: What Dynamo cannot trace of torch's ``checkpoint(module)``: on torch 2.11 already how it reads its own settings.
COMPOSABLE_STOPS = r"_checkpoint_without_reentrant_generator|setdefault"


def checkpointed_workload(form: str) -> Workload:
    return Workload(
        build=functools.partial(build_checkpointed, form),
        list_units=functools.partial(units_of, form),
        draw_batch=lambda generator, size: (torch.randn(size, 6, generator=generator),),
        loss=lambda forward, batch: (forward(*batch) - 1.0).square().mean(),
    )


def train_checkpointed(form: str, implementation: str, reshard_after_forward: bool | None) -> None:
    """Against the unsharded model with the same checkpointing; three Adam steps."""
    start_lockstep(
        checkpointed_workload(form),
        implementation,
        reshard_after_forward=reshard_after_forward,
    ).train(3)


def train_within_memory_budget(reshard_after_forward: bool) -> None:
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        train_checkpointed("none", "compiled", reshard_after_forward)


def wrap_after_sharding(implementation: str) -> None:
    """`checkpoint_wrapper` around modules that are units already."""
    torch.manual_seed(42)
    workload = checkpointed_workload("none")
    reference = workload.build()
    model = copy.deepcopy(reference)
    shard_units(implementation, model, workload.list_units(model))
    for each in (reference, model):
        wrap_blocks(each)
    forward = compile_if_asked(implementation, model)
    optimizers = [make_adam(reference.parameters()), make_adam(model.parameters())]
    lockstep = Lockstep(
        workload=workload, reference=reference, model=model, forward=forward, optimizers=optimizers
    )
    lockstep.train(2)
    plain = [name for name, _ in workload.build().named_parameters()]
    assert list(model.state_dict()) == plain


def count_collectives(
    form: str, implementation: str, reshard_after_forward: bool | None
) -> tuple[int, int, int]:
    """Gathers forward, gathers backward and reductions that a second step really starts."""
    lockstep = start_lockstep(
        checkpointed_workload(form),
        implementation,
        reshard_after_forward=reshard_after_forward,
    )
    batch = lockstep.workload.batch_of(0, 0)
    lockstep.workload.loss(lockstep.forward, batch).backward()
    with torch.profiler.profile() as forward:
        loss = lockstep.workload.loss(lockstep.forward, batch)
    with torch.profiler.profile() as backward:
        loss.backward()
    assert count_events(forward, REDUCTION) == 0
    return count_events(forward, GATHER), count_events(backward, GATHER), count_events(backward, REDUCTION)


GATHER = ("c10d::_allgather_base_", "_c10d_functional::all_gather_into_tensor")
REDUCTION = ("c10d::_reduce_scatter_base_", "_c10d_functional::all_to_all_single")  # gloo's, compiled


def count_events(profile: torch.profiler.profile, names: tuple[str, str]) -> int:
    """The functional collectives, out variants too; or, where there are none, FSDP2's."""
    counts = {event.key: event.count for event in profile.key_averages()}
    ours = sum(counts.get(name, 0) for name in (names[1], f"{names[1]}_out"))
    return ours or counts.get(names[0], 0)


def compile_checkpointed_unit(form: str) -> None:
    """Each block, not the root, is what is compiled."""
    torch.manual_seed(42)
    workload = checkpointed_workload(form)
    reference = workload.build()
    model = copy.deepcopy(reference)
    shard_units("compiled", model, workload.list_units(model))
    for block in model.blocks:
        block.compile(backend="graphshard", fullgraph=True)
    optimizers = [make_adam(reference.parameters()), make_adam(model.parameters())]
    Lockstep(workload=workload, reference=reference, model=model, forward=model, optimizers=optimizers).train(
        2
    )


def compile_composable() -> None:
    """torch cannot trace these hooks, and after a graph break cannot match the recomputation: sharded or not."""
    for implementation in ("unsharded", "compiled"):
        torch.manual_seed(42)
        model = build_checkpointed("composable")
        if implementation == "compiled":
            shard_units(implementation, model, units_of("composable", model))
        backend = "graphshard" if implementation == "compiled" else "aot_eager"
        inputs = torch.randn(4, 6)
        with pytest.raises(torch._dynamo.exc.Unsupported, match=COMPOSABLE_STOPS):
            torch.compile(model, backend=backend, fullgraph=True)(inputs)
        output = torch.compile(model, backend=backend)(inputs)
        with pytest.raises(CheckpointError, match="different metadata than during the forward"):
            output.sum().backward()


class Attention(nn.Module):
    """torch's attention, which counts among the ops that may draw random numbers."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.project = nn.Linear(width, 3 * width, bias=False)  # a bias of the keys changes nothing
        self.leave = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        parts = [part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.project(x).chunk(3, -1)]
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return x + self.leave(mixed.transpose(1, 2).flatten(2))


class CheckpointedAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Attention() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


ATTENTION = Workload(
    build=CheckpointedAttention,
    list_units=lambda model: list(model.blocks),
    draw_batch=lambda generator, size: (torch.randn(size, 5, 8, generator=generator),),
    loss=lambda forward, batch: forward(*batch).square().mean(),
)


def train_checkpointed_attention(implementation: str, options: dict[str, Any]) -> None:
    lockstep = start_lockstep(ATTENTION, "sharded" if implementation == "compiled" else implementation)
    lockstep.forward = compile_if_asked(implementation, lockstep.model, **options)
    lockstep.train(2)


class Hooked(nn.Module):
    """Reads its weight in a backward hook, which is no recomputation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 4))
        self.seen: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x @ self.weight
        y.register_hook(lambda grad: self.seen.append(type(self.weight).__name__))
        return y


def read_in_backward_hook() -> list[str]:
    model = shard_units("sharded", Hooked(), [])
    model(torch.ones(2, 4)).sum().backward()
    return model.seen


def change_before_recomputation(form: str, implementation: str) -> None:
    """An optimizer step between forward and backward: the recomputation would read other weights."""
    lockstep = start_lockstep(checkpointed_workload(form), implementation)
    lockstep.train(1)
    batch = lockstep.workload.batch_of(0, 0)
    lockstep.workload.loss(lockstep.forward, batch).backward()
    late = lockstep.workload.loss(lockstep.forward, batch)
    lockstep.optimizers[1].step()
    with pytest.raises(ParameterStateError, match=r"parameter\(?s?\)? .*blocks\.1\.\S+.* changed in place"):
        late.backward()
    lockstep.optimizers[1].zero_grad()
    lockstep.reference.load_state_dict(
        {name: value.full_tensor() for name, value in lockstep.model.state_dict().items()}
    )
    lockstep.optimizers = [make_adam(each.parameters()) for each in (lockstep.reference, lockstep.model)]
    lockstep.train(1)  # nothing is left of it


def change_between_two_forwards() -> list[bool]:
    """The first forward's recomputation reads weights that a second forward has read since: nothing is said."""
    lockstep = start_lockstep(checkpointed_workload("function"), "sharded")
    lockstep.train(1)
    batch = lockstep.workload.batch_of(0, 0)
    lockstep.workload.loss(lockstep.forward, batch).backward()
    expected = {name: each.grad.to_local() for name, each in lockstep.model.named_parameters()}
    first = lockstep.workload.loss(lockstep.forward, batch)
    lockstep.optimizers[1].step()
    lockstep.workload.loss(lockstep.forward, batch)
    lockstep.optimizers[1].zero_grad()
    first.backward()
    return [
        torch.equal(each.grad.to_local(), expected[name])
        for name, each in lockstep.model.named_parameters()
        if name.startswith("blocks.")
    ]


def compare_with_and_without(form: str) -> None:
    """Compiled: the same gradients with and without checkpointing, bit for bit."""
    found = []
    for each in ("none", form):
        torch.manual_seed(42)
        workload = checkpointed_workload(each)
        model = workload.build()
        shard_units("compiled", model, workload.list_units(model))
        workload.loss(compile_if_asked("compiled", model), workload.batch_of(0, 0)).backward()
        found.append([parameter.grad.to_local() for parameter in model.parameters()])
    for one, other in zip(*found, strict=True):
        assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("form", CHECKPOINTING)
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_trains_like_unsharded(run_on_gloo_ranks, implementation, form, reshard_after_forward):
    run_on_gloo_ranks(2, train_checkpointed, form, implementation, reshard_after_forward)


@pytest.mark.parametrize(
    ("form", "reshard_after_forward"),
    [
        pytest.param("function", False, marks=pytest.mark.slow),
        ("method", True),
        pytest.param("submodule", None, marks=pytest.mark.slow),
        ("selective", True),
        pytest.param("wrapper", True, marks=pytest.mark.slow),
    ],
)
def test_compiled_trains_like_unsharded(run_on_gloo_ranks, form, reshard_after_forward):
    run_on_gloo_ranks(2, train_checkpointed, form, "compiled", reshard_after_forward)


@pytest.mark.parametrize(
    ("implementation", "options"),
    [
        ("fsdp2", {}),
        ("sharded", {}),
        ("compiled", {"verify": "full"}),
        ("compiled", {"hardware": "cpu-loopback", "memory_budget": "1MB"}),
    ],
    ids=["fsdp2", "sharded", "compiled", "planned"],
)
def test_checkpointed_attention(run_on_gloo_ranks, implementation, options):
    """The partitioner saves a state of the random generator for each attention that runs again."""
    run_on_gloo_ranks(2, train_checkpointed_attention, implementation, options)


@pytest.mark.slow
def test_compiled_trains_like_unsharded_on_uneven_ranks(run_on_gloo_ranks):
    """Of 5 rows, rank 3 holds none."""
    run_on_gloo_ranks(4, train_checkpointed, "submodule", "compiled", None)


@pytest.mark.parametrize("reshard_after_forward", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_activation_memory_budget(run_on_gloo_ranks, reshard_after_forward):
    run_on_gloo_ranks(2, train_within_memory_budget, reshard_after_forward)


def test_composable_checkpoint_does_not_compile(run_on_gloo_ranks):
    run_on_gloo_ranks(1, compile_composable)


@pytest.mark.parametrize("implementation", ["fsdp2", *GRAPHSHARD])
def test_wrapping_after_sharding(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, wrap_after_sharding, implementation)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["method", "wrapper"])
def test_compiling_the_units(run_on_gloo_ranks, form):
    run_on_gloo_ranks(2, compile_checkpointed_unit, form)


@pytest.mark.compiles("True")
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@pytest.mark.parametrize(
    ("implementation", "form"),
    [("fsdp2", form) for form in FORMS if form != "selective"] + [("compiled", "function")],
)
def test_collectives_per_step(run_on_gloo_ranks, implementation, form, reshard_after_forward):
    """The other compiled forms are counted in their graphs, in tests/test_checkpoint_counts.py.

    Not FSDP2's selective form: its policy sees each gather, and the profiler then counts it twice.
    """
    backward_gathers = {True: 3, False: 0, None: 2}[reshard_after_forward]
    counts = run_on_gloo_ranks(2, count_collectives, form, implementation, reshard_after_forward)
    assert counts == [(3, backward_gathers, 3)] * 2


def test_hook_in_backward_sees_the_shard(run_on_gloo_ranks):
    assert run_on_gloo_ranks(2, read_in_backward_hook) == [["DTensor"]] * 2


@pytest.mark.parametrize(
    ("form", "implementation"),
    [("function", "sharded"), ("submodule", "sharded"), ("wrapper", "sharded"), ("wrapper", "compiled")],
)
def test_weights_changed_before_recomputation(run_on_gloo_ranks, form, implementation):
    run_on_gloo_ranks(2, change_before_recomputation, form, implementation)


def test_weights_changed_before_another_forward(run_on_gloo_ranks):
    """The check of uncompiled recomputations knows the last forward only: here it misses wrong gradients."""
    assert not any(all(equal) for equal in run_on_gloo_ranks(2, change_between_two_forwards))


@pytest.mark.parametrize("form", [pytest.param("function", marks=pytest.mark.slow), "selective"])
def test_checkpointing_changes_no_bit(run_on_gloo_ranks, form):
    run_on_gloo_ranks(1, compare_with_and_without, form)
