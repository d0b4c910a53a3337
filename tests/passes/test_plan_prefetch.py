"""plan_collectives: what a user says of prefetches and of own collectives, where units differ from each other."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from support.small_graphs import aten, num_targets, run_pass
from support.small_models import MODELS, example_batch, shard_units
from torch import fx, nn

from graphshard.errors import InfeasibleBudgetError
from graphshard.ir import (
    ALL_GATHER,
    ALL_REDUCE_HOOK,
    CUSTOM_ALL_GATHER,
    CUSTOM_REDUCE_SCATTER,
    REDUCE_SCATTERS,
)
from graphshard.ir.collectives import is_collective, is_wait
from graphshard.ir.rewrite import copy_graph, output_values
from graphshard.passes import PlanCollectives
from graphshard.pipeline import KnownPlan, PassContext, reduced_parameters, shards_behind, ungathered_readers
from graphshard.pipeline.facts import Fact
from graphshard.testing import capture_graphs

HELD = (Fact.TYPED, Fact.WAITED, Fact.GATHERED, Fact.REDUCED, Fact.LOWERED)

#: Plans of graphs this small need no more.
QUICK = {"exact_states": 10, "polishes": False, "move_compute": False}

Half = tuple[fx.GraphModule, PassContext]


class Prices:
    """A unit of time for each product, and several for each gather of a block: a free plan gathers far ahead."""

    def compute_seconds(self, gm: fx.GraphModule) -> dict[fx.Node, float]:
        return dict.fromkeys(filter(_is_product, gm.graph.nodes), 1.0)

    def collective_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        return 2.0 + num_bytes / 1e6

    def overlapped_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        return 0.0

    def spread_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        return 0.0

    def core_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        return 0.0

    def copy_seconds(self, num_bytes: int) -> float:
        return 0.0


def _is_product(node: fx.Node) -> bool:
    return node.target in (aten.mm.default, aten.addmm.default)


@pytest.fixture
def blocks(fake_group: Callable[..., Any]) -> Callable[..., dict[str, Half]]:
    """The halves of three blocks, the first of which may be prepared; ``frozen`` blocks do not train."""

    def capture(prepare: Callable[[nn.Module], Any] = lambda model: None, frozen: int | None = None) -> Any:
        model = MODELS["blocks_3"]().double()
        if frozen is not None:
            model.blocks[frozen].requires_grad_(False)
        shard_units(model, fake_group(2))
        prepare(model)
        graphs = capture_graphs(model, example_batch("blocks_3", dtype=torch.float64), full_checks=False)
        ctx = replace(graphs.context, prices=Prices())
        return {
            "forward": (graphs.forward, ctx.for_forward()),
            "backward": (graphs.backward, ctx.for_backward()),
        }

    return capture


def _gathers(gm: fx.GraphModule, ctx: PassContext, unit: str) -> list[fx.Node]:
    gathers = gm.graph.find_nodes(op="call_function", target=ALL_GATHER)
    return [node for node in gathers if shards_behind(node, ctx)[0].unit == unit]


def _num_products(gm: fx.GraphModule, until: fx.Node) -> int:
    """The number of products in front of a node."""
    nodes = list(gm.graph.nodes)
    return sum(map(_is_product, nodes[: nodes.index(until)]))


def _products_of(gm: fx.GraphModule, ctx: PassContext, unit: str) -> int:
    """The number of products up to the last gradient of a unit."""
    served = reduced_parameters(gm, ctx)
    ends = [node for node, bindings in served.items() if bindings[0].unit == unit]
    return max(_num_products(gm, node.args[0]) for node in ends)


def test_of_several_that_name_a_unit_the_first_has_it_gathered(blocks):
    """Each unit names the next two: what the one before has named is on its way."""
    gm, ctx = blocks()["forward"]
    named = (("blocks.0", ("blocks.1", "blocks.2")), ("blocks.1", ("blocks.2",)))
    run_pass(PlanCollectives(**QUICK), gm, replace(ctx, forward_prefetch=named), *HELD)
    (first,), (second,), (third,) = (_gathers(gm, ctx, f"blocks.{index}") for index in range(3))
    waited = [_num_products(gm, next(iter(node.users))) for node in (first, second, third)]
    assert [_num_products(gm, node) for node in (second, third)] == [waited[0]] * 2
    assert waited[0] < waited[1] < waited[2]


@pytest.mark.parametrize("how", ["pre", "named"])
def test_a_unit_that_kept_its_parameters_has_the_next_gathered_where_the_backward_comes_to_it(blocks, how):
    gm, ctx = blocks(lambda model: model.blocks[1].set_reshard_after_forward(False))["backward"]
    assert not _gathers(gm, ctx, "blocks.1")
    before = _products_of(gm, ctx, "blocks.2")
    if how == "named":
        ctx = replace(ctx, backward_prefetch=(("blocks.1", ("blocks.0",)),))
    run_pass(PlanCollectives(backward_prefetch="pre" if how == "pre" else "", **QUICK), gm, ctx, *HELD)
    (gather,) = _gathers(gm, ctx, "blocks.0")
    assert _num_products(gm, gather) >= before


def test_a_frozen_unit_holds_back_the_next_until_its_parameters_were_read(blocks):
    """It has no gradients that "post" could wait for."""
    gm, ctx = blocks(frozen=1)["backward"]
    readers = [
        reader
        for gather in _gathers(gm, ctx, "blocks.1")
        for wait in gather.users
        for reader in ungathered_readers(wait)
    ]
    before = max(_num_products(gm, reader) for reader in readers)

    def soonest(rule: str) -> int:
        planned = copy_graph(gm)
        run_pass(PlanCollectives(backward_prefetch=rule, **QUICK), planned, ctx, *HELD)
        return min(_num_products(planned, gather) for gather in _gathers(planned, ctx, "blocks.0"))

    assert soonest("") < before <= soonest("post")


def test_gradients_that_are_not_reduced_hold_back_the_next_unit_as_well(blocks):
    """As in a micro-batch before the last."""
    gm, ctx = blocks()["backward"]
    before = _products_of(gm, ctx, "blocks.2")
    gradients = [binding.gradient for binding in ctx.parameters]
    outputs = output_values(gm.graph)
    for index in gradients:
        (reduction,) = (node for node in reduced_parameters(gm, ctx) if _makes(node, outputs[index]))
        outputs[index] = reduction.args[0]
    gm.graph.output_node().args = (tuple(outputs),)
    for node in reversed(gm.graph.nodes):
        if not node.users and (is_wait(node) or node.target in REDUCE_SCATTERS or node.op == "call_function"):
            gm.graph.erase_node(node)
    ctx = replace(ctx, unreduced=frozenset(gradients))
    run_pass(PlanCollectives(backward_prefetch="post", **QUICK), gm, ctx, *HELD)
    assert not any(node.target in REDUCE_SCATTERS for node in gm.graph.nodes)
    gathers = _gathers(gm, ctx, "blocks.1")
    assert gathers and min(_num_products(gm, gather) for gather in gathers) >= before


def _makes(node: fx.Node, output: fx.Node) -> bool:
    pending = [output]
    while pending:
        value = pending.pop()
        if value is node:
            return True
        if not is_collective(value):
            pending.extend(value.all_input_nodes)
    return False


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_a_known_plan_with_prefetches_is_followed(blocks, half):
    """By a rank with more or less compute, and by one whose budget nothing keeps."""
    gm, ctx = blocks()[half]
    pass_ = PlanCollectives(forward_prefetch="pre", backward_prefetch="pre", **QUICK)
    leader = copy_graph(gm)
    known = run_pass(pass_, leader, ctx, *HELD).report.planned.known
    with pytest.raises(InfeasibleBudgetError):
        run_pass(replace(pass_, memory_budget=1), copy_graph(gm), replace(ctx, known_plan=known), *HELD)
    for scale in (0.7, 1.4):
        steps = tuple((round(position * scale), *step) for position, *step in known.steps)
        other = KnownPlan(num_tasks=round(known.num_tasks * scale), steps=steps)
        follower = copy_graph(gm)
        run_pass(pass_, follower, replace(ctx, known_plan=other), *HELD)
        started, wanted = (
            [str(node) for node in each.graph.nodes if is_collective(node)] for each in (follower, leader)
        )
        assert started == wanted


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_a_start_that_splits_what_is_prefetched_is_left(blocks, half):
    """As that of a half with more collectives would: the first one here is another."""
    gm, ctx = blocks()[half]
    pass_ = PlanCollectives(forward_prefetch="pre", backward_prefetch="pre", **QUICK)
    alone, other = copy_graph(gm), copy_graph(gm)
    known = run_pass(pass_, alone, ctx, *HELD).report.planned.known
    run_pass(pass_, other, replace(ctx, start=replace(known, splits=((0, 2),))), *HELD)
    assert [str(node) for node in other.graph.nodes] == [str(node) for node in alone.graph.nodes]


class OwnCollectives:
    """Never called: nothing runs."""

    def allocate(self, size, *, dtype, device):
        raise NotImplementedError

    def __call__(self, output_tensor, input_tensor, group, *options):
        raise NotImplementedError


def _with_own_collectives(model: nn.Module) -> None:
    model.blocks[0].set_custom_all_gather(OwnCollectives())
    model.blocks[0].set_custom_reduce_scatter(OwnCollectives())
    model.blocks[1].set_all_reduce_hook(lambda flat: None)


@pytest.mark.parametrize("rule", ["", "pre"])
def test_own_collectives_and_hooks_are_called_once_per_unit(blocks, rule):
    halves = blocks(_with_own_collectives)
    counts = {}
    for half, (gm, ctx) in halves.items():
        run_pass(PlanCollectives(forward_prefetch=rule, backward_prefetch=rule, **QUICK), gm, ctx, *HELD)
        targets = (CUSTOM_ALL_GATHER, CUSTOM_REDUCE_SCATTER, ALL_REDUCE_HOOK)
        counts[half] = [num_targets(gm, target) for target in targets]
    assert counts == {"forward": [1, 0, 0], "backward": [1, 1, 1]}
