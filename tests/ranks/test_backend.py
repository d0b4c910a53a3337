"""The torch.compile backend's own options and warnings."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.implementations import compile_if_asked, shard_units
from support.parity import start_lockstep
from support.toy_models import WORKLOADS, build_mlp
from torch.profiler import ProfilerActivity, profile
from torch.testing import assert_close

from graphshard.cost.collective_probes import probe_collectives
from graphshard.cost.probes import ProbeSizes
from graphshard.errors import InfeasibleBudgetError

KNOWN_OPTIONS = ("bucket", "overlap", "hardware", "memory_budget", "verify", "dump", "inductor")


def compile_with_options(options: dict[str, object]) -> str:
    """The text of the ValueError, in whatever Dynamo wrapped it."""
    from graphshard.errors import GraphShardError

    model = shard_units("compiled", build_mlp((4, 6), (6, 3)), [])
    with pytest.raises((ValueError, torch._dynamo.exc.BackendCompilerFailed)) as caught:
        compile_if_asked("compiled", model, **options)(torch.ones(2, 4))
    error = getattr(caught.value, "inner_exception", caught.value)
    assert isinstance(error, ValueError) and isinstance(error, GraphShardError)
    return str(error)


def step_within(memory_budget: int) -> None:
    torch.compiler.reset()
    model = shard_units("compiled", build_mlp((4, 6), (6, 3)), [])
    compiled = compile_if_asked("compiled", model, hardware="cpu-loopback", memory_budget=memory_budget)
    compiled(torch.ones(2, 4)).square().sum().backward()


def needs_of_a_step() -> list[int]:
    """What each refusal names, from one byte on, until a step runs within the last; less is refused again."""
    needs = [1]
    while len(needs) < 5:
        try:
            step_within(needs[-1])
        except (ValueError, torch._dynamo.exc.BackendCompilerFailed) as error:
            inner = getattr(error, "inner_exception", error)
            assert isinstance(inner, InfeasibleBudgetError), inner
            needs.append(inner.smallest_bytes)
        else:
            break
    with pytest.raises((InfeasibleBudgetError, torch._dynamo.exc.BackendCompilerFailed), match=f"{needs[-1]} bytes"):
        step_within(needs[-1] - 1)
    return needs[1:]


def compile_unsharded() -> None:
    """A warning that names fully_shard, then what Inductor gives."""
    torch.manual_seed(0)
    model = build_mlp((4, 6), (6, 3))
    inputs = torch.randn(5, 4)
    with pytest.warns(UserWarning, match="fully_shard"):
        found = torch.compile(model, backend="graphshard")(inputs)
    torch._dynamo.reset()
    assert_close(found, torch.compile(model, backend="inductor")(inputs), rtol=0, atol=0)
    found.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def train_with_dump(folder: str) -> None:
    lockstep = start_lockstep(WORKLOADS["mlp_even"], "sharded")
    lockstep.forward = compile_if_asked("compiled", lockstep.model, dump=folder)
    lockstep.train(2)


def accumulate_with_dump(folder: str) -> None:
    """The first micro-batch leaves gradients unreduced, the second adds to them and reduces."""
    lockstep = start_lockstep(WORKLOADS["mlp_even"], "sharded")
    forward = compile_if_asked("compiled", lockstep.model, dump=f"{folder}/{dist.get_rank()}")
    for step in range(2):
        lockstep.model.set_requires_gradient_sync(step == 1)
        lockstep.workload.loss(forward, lockstep.workload.batch_of(dist.get_rank(), step)).backward()


def train_with_options(options: dict[str, object]) -> None:
    lockstep = start_lockstep(WORKLOADS["mlp_7_15_3"], "sharded")
    lockstep.forward = compile_if_asked("compiled", lockstep.model, **options)
    lockstep.train(3)


_OURS = ("_c10d_functional::", "graphshard::")


def _functional_collectives(step: Callable[[], object]) -> set[str]:
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        step()
    return {event.name.rpartition("::")[2] for event in trace.events() if event.name.startswith(_OURS)}


def train_compiled_on_gloo() -> None:
    """Gradients are exchanged."""
    model = compile_if_asked("compiled", shard_units("compiled", build_mlp((4, 6), (6, 3)), []))
    model(torch.ones(2, 4)).sum().backward()  # compiles, which runs the collectives on fake tensors
    ran = _functional_collectives(lambda: model(torch.ones(2, 4)).sum().backward())
    assert {"all_to_all_single", "add_rows"} <= ran and "reduce_scatter_tensor" not in ran, ran


def calibrate_on_gloo() -> None:
    """A card's reduce-scatters are measured as they run."""
    sizes = ProbeSizes.for_device("cpu", quick=True)
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        probe_collectives(torch.device("cpu"), sizes)
    ran = {event.name for event in trace.events()}
    assert {"c10d::alltoall_base_", "graphshard::add_rows"} <= ran and "c10d::_reduce_scatter_base_" not in ran, ran


def test_unknown_option_lists_the_known_ones(run_on_gloo_ranks):
    (message,) = run_on_gloo_ranks(1, compile_with_options, {"buckets": "unit"})
    assert "buckets" in message
    assert all(name in message for name in KNOWN_OPTIONS), message


@pytest.mark.parametrize(
    "options",
    [{"bucket": "all"}, {"verify": "always"}, {"overlap": "much"}, {"inductor": "fast"}],
    ids=lambda options: next(iter(options)),
)
def test_bad_value_of_an_option_is_named(run_on_gloo_ranks, options):
    ((name, value),) = options.items()
    (message,) = run_on_gloo_ranks(1, compile_with_options, options)
    assert name in message and value in message


def test_a_budget_holds_on_one_rank_too(run_on_gloo_ranks):
    """Nothing is planned there: the halves need what they need, the parameters and the input included."""
    (needs,) = run_on_gloo_ranks(1, needs_of_a_step)
    assert 1 <= len(needs) <= 2
    assert 4 * (6 * 5 + 3 * 7 + 2 * 4) < needs[-1] < 1000


def test_model_that_was_never_sharded_warns_and_runs(run_on_gloo_ranks):
    run_on_gloo_ranks(1, compile_unsharded)


def test_dump_holds_the_graphs_of_forward_and_backward(run_on_gloo_ranks, tmp_path: Path):
    run_on_gloo_ranks(2, train_with_dump, str(tmp_path))
    texts = {path.name: path.read_text() for path in tmp_path.rglob("*") if path.is_file()}
    assert any("all_gather" in text for text in texts.values()), sorted(texts)
    assert any("reduce_scatter" in text for text in texts.values()), sorted(texts)
    last = texts["graph0.backward.6-exchange_reductions.txt"]
    assert "all_to_all_single(" in last and "reduce_scatter" not in last


def test_a_half_for_another_state_is_dumped_beside_the_first(run_on_gloo_ranks, tmp_path: Path):
    run_on_gloo_ranks(2, accumulate_with_dump, str(tmp_path))
    for rank in ("0", "1"):
        names = {path.name for path in (tmp_path / rank).iterdir()}
        first = {name for name in names if name.startswith("graph0.backward.")}
        second = {name for name in names if name.startswith("graph0.backward-2.")}
        assert first and len(second) == len(first) + 1, sorted(names)  # the first communicates nothing, so no exchange
        assert {name for name in names if ".forward" in name or ".joint" in name} == names - first - second
        planned = [
            (tmp_path / rank / f"graph0.{half}.0-partitioned.txt").read_text()
            for half in ("backward", "backward-2")
        ]
        assert "reduce_grad(" not in planned[0] and "%saved.unreduced_0" not in planned[0]
        assert "reduce_grad(" in planned[1] and "%saved.unreduced_0" in planned[1]


@pytest.mark.inductor
@pytest.mark.parametrize(
    "options",
    [{"bucket": "unit"}, {"bucket": "none"}, {"overlap": False}, {"verify": "full"}],
    ids=lambda options: "-".join(f"{name}_{value}" for name, value in options.items()),
)
def test_parity_holds_under_each_option(run_on_gloo_ranks, options):
    run_on_gloo_ranks(2, train_with_options, options)


@pytest.mark.inductor
def test_reductions_on_gloo_are_exchanges(run_on_gloo_ranks):
    run_on_gloo_ranks(2, train_compiled_on_gloo)


def test_reductions_on_gloo_are_measured_as_exchanges(run_on_gloo_ranks):
    run_on_gloo_ranks(2, calibrate_on_gloo)
