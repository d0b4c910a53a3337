"""plan_collectives: the planner as a pass."""

import itertools
import sys
from dataclasses import dataclass, replace

import pytest
import torch
from support.all_ranks import assert_same, run_halves, step_inputs
from support.brief_search import briefly
from support.small_graphs import (
    GraphBuilder,
    aten,
    num_targets,
    open_reductions,
    products_and_sums,
    run_pass,
    run_twice,
    tensor_parallel_backward,
    text_of,
)
from support.small_models import MODELS, example_batch, shard_units

from graphshard.errors import InfeasibleBudgetError, OptionError, OptionTypeError, PassError, PlanError
from graphshard.ir.bucket_ops import JOIN_PARTS
from graphshard.ir.collectives import ALL_GATHER, REDUCE_SCATTER, is_collective, is_wait
from graphshard.ir.rewrite import copy_graph
from graphshard.memory import model, resident_bytes, step_bytes
from graphshard.memory.kept_inputs import kept_inputs
from graphshard.memory.model import memory_timeline
from graphshard.passes import BucketCollectives, PlanCollectives, ScheduleCollectives
from graphshard.pipeline.context import PassContext
from graphshard.pipeline.facts import Fact
from graphshard.pipeline.known_plan import KnownPlan
from graphshard.pipeline.pipeline import Pipeline
from graphshard.pipeline.provenance import reduced_parameters, shards_behind
from graphshard.planner import half_budget
from graphshard.planner.from_graph import problem_of_graph
from graphshard.planner.search import choose_splits as splits
from graphshard.planner.search import solve
from graphshard.testing import capture_graphs
from graphshard.units import size_text

plan_collectives = sys.modules[PlanCollectives.__module__]

HELD = (Fact.TYPED, Fact.WAITED, Fact.GATHERED, Fact.REDUCED, Fact.LOWERED)


@pytest.fixture(autouse=True)
def _boxed_gradients(monkeypatch):
    """Tangents live as long as with torch 2.13, in goldens too."""
    monkeypatch.setattr(model, "gradients_are_boxed", True)


@dataclass(frozen=True)
class Prices:
    """A unit of time for each product, a tenth for other ops; collectives as lines."""

    latency: float
    bandwidth: float = 1e4

    def compute_seconds(self, gm):
        return {
            node: 1.0 if node.target in (aten.mm.default, aten.addmm.default) else 0.1
            for node in gm.graph.nodes
            if node.op == "call_function" and not is_collective(node) and not is_wait(node)
            if isinstance(node.meta.get("val"), torch.Tensor)
        }

    def collective_seconds(self, kind, num_bytes, group):
        return self.latency + num_bytes / self.bandwidth

    def overlapped_seconds(self, kind, num_bytes, group):
        return 0.0

    def spread_seconds(self, kind, num_bytes, group):
        return 0.0

    def core_seconds(self, kind, num_bytes, group):
        return 0.0

    def copy_seconds(self, num_bytes):
        return num_bytes / 1e6


DEAR, CHEAP = Prices(latency=4.0), Prices(latency=0.01, bandwidth=400.0)


def _half(captured, name, half, prices=DEAR, num_ranks=2, **options):
    graphs = captured(name, num_ranks, **options)
    return getattr(graphs, half), replace(getattr(graphs.context, f"for_{half}")(), prices=prices)


def _peak(gm):
    timeline = memory_timeline(gm, kept=kept_inputs(gm))
    return timeline.peak_bytes + timeline.kept_bytes


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_golden(captured, golden, half):
    gm, ctx = _half(captured, "two_linears", half)
    golden(text_of(gm, ctx), f"plan_collectives.{half}.before")
    record = run_pass(PlanCollectives(), gm, ctx, *HELD)
    golden(text_of(gm, ctx) + f"{record.report.planned.plan}\n", f"plan_collectives.{half}.after")


def test_nothing_to_plan():
    build = GraphBuilder()
    gm = build.finish(build(aten.relu.default, build.input("primals_1", 2, 2)))
    record = run_pass(PlanCollectives(), gm, PassContext(prices=DEAR))
    assert not record.report.changed
    assert record.report.counts == {"collectives": 0, "buckets": 0}


@pytest.mark.parametrize("half", ["forward", "backward"])
@pytest.mark.parametrize("name", ["two_linears", "blocks_2"])
def test_second_run_changes_nothing(captured, name, half):
    first, second = run_twice(PlanCollectives(), *_half(captured, name, half), *HELD)
    assert first.report.changed and not second.report.changed


def test_latency_decides_about_merging(captured):
    counts = {}
    for prices in (DEAR, CHEAP):
        gm, ctx = _half(captured, "blocks_2", "forward", prices)
        counts[prices] = run_pass(PlanCollectives(), gm, ctx, *HELD).report.counts["buckets"]
        assert num_targets(gm, ALL_GATHER) == counts[prices]
    assert counts[DEAR] < counts[CHEAP]


@pytest.mark.parametrize(("states", "solver"), [({}, "exact"), ({"exact_states": 10}, "beam")])
def test_a_small_graph_is_searched_exactly_within_a_number_of_states(captured, states, solver):
    gm, ctx = _half(captured, "two_linears", "backward")
    assert run_pass(PlanCollectives(**states), gm, ctx, *HELD).report.planned.plan.solver == solver


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_without_merging_collectives_are_only_placed(captured, half):
    gm, ctx = _half(captured, "blocks_2", half)
    before = [num_targets(gm, target) for target in (ALL_GATHER, REDUCE_SCATTER)]
    record = run_pass(PlanCollectives(merge=False), gm, ctx, *HELD)
    assert record.report.changed
    assert [num_targets(gm, target) for target in (ALL_GATHER, REDUCE_SCATTER)] == before
    plan = record.report.planned.plan
    assert plan.seconds < plan.unplanned_seconds


@pytest.mark.parametrize("half", ["forward", "backward"])
@briefly()
def test_the_budget_is_kept_or_refused(captured, half):
    gm, ctx = _half(captured, "blocks_3", half)
    free = copy_graph(gm)
    run_pass(PlanCollectives(), free, ctx, *HELD)
    with pytest.raises(InfeasibleBudgetError) as refused:
        run_pass(PlanCollectives(memory_budget=_peak(gm) // 3), copy_graph(gm), ctx, *HELD)
    smallest = refused.value.smallest_bytes
    assert smallest < _peak(free)
    for budget in (smallest, (smallest + _peak(free)) // 2):
        tight = copy_graph(gm)
        report = run_pass(PlanCollectives(memory_budget=budget), tight, ctx, *HELD).report
        assert _peak(tight) == report.planned.plan.peak_bytes <= budget


def test_a_budget_holds_where_nothing_is_to_be_planned():
    build = GraphBuilder()
    x = build.input("primals_1", 4, 4)
    gm = build.finish(build(aten.mm.default, x, x))
    ctx = replace(PassContext(prices=Prices(latency=1.0)), held_bytes=100)
    half_budget.check_budget(gm, ctx, 356)
    with pytest.raises(
        InfeasibleBudgetError, match=r"budget of 355 bytes, in which 100 .* feasible one is 356 bytes"
    ):
        half_budget.check_budget(gm, ctx, 355)
    with pytest.raises(InfeasibleBudgetError, match="356 bytes"):
        PlanCollectives(memory_budget=355).run(gm, ctx)


def test_what_is_held_outside_of_the_graph_takes_of_the_budget(captured):
    gm, ctx = _half(captured, "blocks_3", "backward")
    free, tight = copy_graph(gm), copy_graph(gm)
    run_pass(PlanCollectives(), free, ctx, *HELD)
    beside, budget = replace(ctx, held_bytes=10**6), _peak(free) - 1 + 10**6
    run_pass(PlanCollectives(memory_budget=budget), tight, beside, *HELD)
    assert _peak(tight) < _peak(free)
    message = (
        r"budget of 976.6 KiB \(999999 bytes\), in which 976.6 KiB \(1000000 bytes\) outside of the graph count "
        r"\(shards that it does not read, "
        r"gradients that wait for a later micro-batch, gathered parameters\); the smallest .* is .* \((\d+) bytes\)"
    )
    with pytest.raises(InfeasibleBudgetError, match=message) as refused:
        run_pass(PlanCollectives(memory_budget=999_999), copy_graph(gm), beside, *HELD)
    smallest = refused.value.smallest_bytes
    assert smallest > 10**6 and str(smallest) in str(refused.value)
    least = copy_graph(gm)
    run_pass(PlanCollectives(memory_budget=smallest), least, beside, *HELD)
    assert _peak(least) + 10**6 <= smallest


@briefly()
def test_what_lives_through_the_step_counts_though_a_backward_does_not_read_it(captured):
    gm, ctx = _half(captured, "blocks_3", "backward")
    free, tight = copy_graph(gm), copy_graph(gm)
    run_pass(PlanCollectives(), free, ctx, *HELD)
    unread = replace(ctx, resident_bytes=step_bytes(gm) + 10**6)
    assert half_budget.held_beside(gm, unread) == 10**6
    assert half_budget.held_beside(gm, replace(unread, held_bytes=5)) == 10**6 + 5
    assert half_budget.held_beside(gm, replace(ctx, resident_bytes=1)) == 0
    plan = run_pass(
        PlanCollectives(memory_budget=_peak(free) - 1 + 10**6), tight, unread, *HELD
    ).report.planned.plan
    assert plan.peak_bytes == _peak(tight) < _peak(free) and plan.budget_bytes == _peak(free) - 1


@pytest.mark.parametrize("prices", [DEAR, CHEAP], ids=["dear", "cheap"])
@pytest.mark.parametrize("half", ["forward", "backward"])
@briefly()
def test_the_default_budget_is_what_units_gathered_one_ahead_take(captured, half, prices):
    """With each collective waited for at once."""
    gm, ctx = _half(captured, "blocks_3", half, prices)
    one_ahead, default = copy_graph(gm), copy_graph(gm)
    for step in (BucketCollectives(), ScheduleCollectives(memory="any", reductions_in_flight=1)):
        run_pass(step, one_ahead, ctx, *HELD)
    for node in list(one_ahead.graph.nodes):
        if is_collective(node):
            (wait,) = node.users
            node.append(wait)
    plan = run_pass(PlanCollectives(memory_budget="default"), default, ctx, *HELD).report.planned.plan
    assert _peak(default) == plan.peak_bytes <= plan.budget_bytes == _peak(one_ahead)
    assert plan.solver != "none"


@briefly()
def test_a_rank_that_follows_leaves_the_default_budget_to_the_one_that_planned(captured):
    gm, ctx = _half(captured, "blocks_3", "backward", CHEAP)
    free = copy_graph(gm)
    known = run_pass(PlanCollectives(), free, ctx, *HELD).report.planned.known
    run_pass(PlanCollectives(memory_budget="default"), gm, replace(ctx, known_plan=known), *HELD)
    assert text_of(gm, ctx) == text_of(free, ctx)


@pytest.mark.parametrize(("needed", "within"), [(1.2, 1.25), (9.0, None)], ids=["a little more", "no limit"])
@briefly()
def test_where_no_plan_keeps_the_default_budget_more_is_tried(captured, monkeypatch, needed, within):
    gm, ctx = _half(captured, "blocks_3", "backward", CHEAP)
    free = copy_graph(gm)
    peak = run_pass(PlanCollectives(), free, ctx, *HELD).report.planned.plan.peak_bytes
    default = peak / needed
    real = plan_collectives.plan_graph

    def plan_graph(gm, prices, *, memory_budget, **options):
        if memory_budget is not None and memory_budget < peak:
            raise InfeasibleBudgetError(memory_budget, peak, is_smallest=False)
        return real(gm, prices, memory_budget=memory_budget, **options)

    monkeypatch.setattr(plan_collectives, "plan_graph", plan_graph)
    monkeypatch.setattr(plan_collectives, "default_peak", lambda gm, ctx: default)
    report = run_pass(PlanCollectives(memory_budget="default"), gm, ctx, *HELD).report
    assert report.planned.plan.budget_bytes == (None if within is None else round(within * default))
    found = f"1.5 times as much: this one takes {size_text(peak)}"
    if within:
        found = f"is within {size_text(round(within * default))}"
    assert any(
        note.startswith("no plan is found within the") and note.endswith(found) for note in report.skipped
    )


@briefly()
def test_where_the_peak_of_the_step_is_known_it_counts_beside_what_lives_through_it(captured):
    gm, ctx = _half(captured, "blocks_3", "forward", DEAR)
    own = half_budget.default_peak(gm, ctx)
    inputs = gm.graph.find_nodes(op="placeholder")
    resident = resident_bytes(gm)
    assert resident == sum(node.meta["val"].nbytes for node in inputs) > 0
    backward, _ = _half(captured, "blocks_3", "backward", CHEAP)
    names = {binding.placeholder for binding in ctx.parameters}
    assert (
        0 < resident_bytes(backward) <= sum(node.meta["val"].nbytes for node in inputs if node.name in names)
    )

    def within(peak_bytes):
        step = PlanCollectives(memory_budget="default")
        planned = copy_graph(gm)
        report = run_pass(step, planned, replace(ctx, default_peak_bytes=peak_bytes), *HELD).report
        assert _peak(planned) <= report.planned.plan.budget_bytes
        return report.planned.plan

    assert within(own - resident).budget_bytes == within(None).budget_bytes == own
    wider = within(own)  # as if the backward held more
    assert wider.budget_bytes == own + resident
    assert own < wider.peak_bytes and wider.seconds < within(None).seconds


@briefly()
def test_gradients_that_waited_come_on_top_of_the_known_peak(captured):
    gm, ctx = _half(captured, "blocks_3", "backward", CHEAP)
    ctx = replace(ctx, default_peak_bytes=half_budget.default_peak(gm, ctx))

    def budget(name):
        more = copy_graph(gm)
        *_, last = more.graph.find_nodes(op="placeholder")
        with more.graph.inserting_after(last):
            node = more.graph.placeholder(name)
        node.meta["val"] = last.meta["val"].new_empty(100, dtype=torch.float64)
        return run_pass(
            PlanCollectives(memory_budget="default"), more, ctx, *HELD
        ).report.planned.plan.budget_bytes

    assert budget("unreduced_0") == budget("partial_0") == budget("other") + 800


@briefly()
def test_a_users_limit_of_reductions_is_kept(captured):
    def most_open(limit):
        gm, ctx = _half(captured, "blocks_3", "backward", CHEAP)
        run_pass(PlanCollectives(), gm, replace(ctx, max_reductions=limit), *HELD)
        return open_reductions(gm)

    assert most_open(1) == 1 and most_open(2) <= 2 < most_open(0)


@pytest.mark.parametrize("merge", [True, False])
def test_a_users_prefetch_is_kept(captured, merge):
    """The gathers of blocks.2 start where those of blocks.0 are waited for, each unit in one bucket."""
    gm, ctx = _half(captured, "blocks_3", "forward", Prices(latency=0.01))
    ctx = replace(ctx, forward_prefetch=(("blocks.0", ("blocks.2",)),))
    run_pass(PlanCollectives(merge=merge), gm, ctx, *HELD)
    nodes = list(gm.graph.nodes)
    units = {node: shards_behind(node, ctx)[0].unit for node in nodes if node.target is ALL_GATHER}
    first, then = ([node for node in units if units[node] == f"blocks.{index}"] for index in (0, 2))
    assert (len(first), len(then)) == ((1, 1) if merge else (6, 6))
    waited = max(nodes.index(wait) for node in first for wait in node.users)
    started = [nodes.index(node) for node in then]
    assert all(position > waited for position in started)
    between = nodes[waited : max(started)]
    assert not any(node.target is aten.addmm.default for node in between)


def _backward_of_units(captured, pass_):
    """A planned backward: its nodes, and by unit its gathers, in the order of the units' waits."""
    gm, ctx = _half(captured, "blocks_3", "backward", Prices(latency=0.01, bandwidth=1e6))
    run_pass(pass_, gm, ctx, *HELD)
    nodes = list(gm.graph.nodes)
    units: dict[str, list] = {}
    for gather in sorted(filter(_is_gather, nodes), key=lambda node: nodes.index(next(iter(node.users)))):
        units.setdefault(shards_behind(gather, ctx)[0].unit, []).append(gather)
    return nodes, units


def _is_gather(node):
    return node.target is ALL_GATHER


def _is_product(node):
    return node.target in (aten.mm.default, aten.addmm.default)


def test_a_backward_gathers_the_next_unit_right_after_the_one_before(captured):
    """As FSDP1's BACKWARD_PRE. A plan without it starts all gathers of these at once, each alone."""
    nodes, units = _backward_of_units(captured, PlanCollectives(backward_prefetch="pre"))
    assert len(units) == 3 and all(len(gathers) == 1 for gathers in units.values())
    for (before,), (then,) in itertools.pairwise(units.values()):
        (wait,) = before.users
        between = nodes[nodes.index(wait) : nodes.index(then)]
        assert nodes.index(then) > nodes.index(wait) and not any(map(_is_product, between))
    nodes, units = _backward_of_units(captured, PlanCollectives())
    assert max(len(gathers) for gathers in units.values()) > 1


def test_a_forward_gathers_the_next_unit_right_after_the_one_before(captured):
    """As FSDP1's forward_prefetch; a forward takes no notice of the setting of the backward."""

    def gathered_with(pass_):
        gm, ctx = _half(captured, "blocks_3", "forward", Prices(latency=0.01, bandwidth=1e6))
        run_pass(pass_, gm, ctx, *HELD)
        nodes = list(gm.graph.nodes)
        units: dict[str, list] = {}
        for gather in filter(_is_gather, nodes):
            units.setdefault(shards_behind(gather, ctx)[0].unit, []).append(gather)
        return nodes, units

    nodes, units = gathered_with(PlanCollectives(forward_prefetch="pre"))
    assert len(units) == 4 and all(len(gathers) == 1 for gathers in units.values())
    for (before,), (then,) in itertools.pairwise(units.values()):
        (wait,) = before.users
        between = nodes[nodes.index(wait) : nodes.index(then)]
        assert nodes.index(then) > nodes.index(wait) and not any(map(_is_product, between))
    free, kept = (gathered_with(PlanCollectives(backward_prefetch=given)) for given in ("", "pre"))
    assert list(map(str, free[0])) == list(map(str, kept[0])) != list(map(str, nodes))


@pytest.mark.parametrize("kept", [None, 2, 1], ids="kept_{}".format)
@briefly()
def test_a_backward_gathers_the_next_unit_behind_the_gradients_of_the_one_before(fake_group, kept):
    """As FSDP1's BACKWARD_POST; a gather that is read before all of these exist starts where it is read."""
    model = shard_units(MODELS["blocks_3"]().double(), fake_group(2))
    if kept is not None:
        model.blocks[kept].set_reshard_after_forward(False)
    graphs = capture_graphs(model, example_batch("blocks_3", dtype=torch.float64))
    gm = graphs.backward
    ctx = replace(graphs.context.for_backward(), prices=Prices(latency=0.01, bandwidth=1e6))
    units = [f"blocks.{index}" for index in (2, 1, 0)]
    problem = problem_of_graph(gm, ctx.prices).problem
    known = {one.name: one for one in problem.collectives}
    unit_of = {node.name: shards_behind(node, ctx)[0].unit for node in gm.graph.nodes if _is_gather(node)}
    assert {f"blocks.{kept}"} == set(units) - set(unit_of.values()) or kept is None
    served = {node.name: bindings[0].unit for node, bindings in reduced_parameters(gm, ctx).items()}
    exists = {
        unit: max(known[name].earliest for name, owner in served.items() if owner == unit) for unit in units
    }

    def too_soon(pass_):
        plan = run_pass(pass_, copy_graph(gm), ctx, *HELD).report.planned.plan
        found = []
        for before, unit in itertools.pairwise(units):
            for bucket in plan.buckets:
                members = [name for name in bucket.names if unit_of.get(name) == unit]
                soonest = max((min(exists[before], known[name].deadline) for name in members), default=0)
                found += members if bucket.start < soonest else []
        return found

    assert too_soon(PlanCollectives()) and not too_soon(PlanCollectives(backward_prefetch="post"))


def test_what_a_user_says_of_a_units_prefetch_comes_before_that_of_all(captured):
    gm, ctx = _half(captured, "blocks_3", "backward", Prices(latency=0.01, bandwidth=1e6))
    ctx = replace(ctx, backward_prefetch=(("blocks.2", ("blocks.0",)),))
    prefetch = PlanCollectives(backward_prefetch="pre")._wishes(gm, ctx).prefetch
    assert {tuple(shards_behind(node, ctx)[0].unit for node in pair) for pair in prefetch} == {
        ("blocks.2", "blocks.0")
    }
    run_pass(PlanCollectives(backward_prefetch="pre"), gm, ctx, *HELD)
    nodes = list(gm.graph.nodes)
    gathers = {shards_behind(node, ctx)[0].unit: node for node in nodes if _is_gather(node)}
    (wait,) = gathers["blocks.2"].users
    between = nodes[nodes.index(wait) : nodes.index(gathers["blocks.0"])]
    assert between and not any(map(_is_product, between))


@pytest.mark.parametrize("half", ["forward", "backward"])
@briefly()
def test_gathers_in_flight_are_limited(captured, half):
    def most_open(limit):
        gm, ctx = _half(captured, "blocks_3", half, CHEAP)
        run_pass(PlanCollectives(max_gathers=limit), gm, ctx, *HELD)
        most = open_now = 0
        for node in gm.graph.nodes:
            open_now += _is_gather(node)
            open_now -= is_wait(node) and _is_gather(node.args[0])
            most = max(most, open_now)
        return most

    assert most_open(1) == 1 and most_open(2) <= 2 < most_open(0)


def test_needs_prices(captured):
    gm, ctx = _half(captured, "two_linears", "forward", prices=None)
    with pytest.raises(PassError, match="plan_collectives: the context has no prices"):
        run_pass(PlanCollectives(), gm, ctx, *HELD)


def test_refuses_budgets_that_cannot_be():
    with pytest.raises(OptionError, match="memory_budget='much' cannot be read"):
        PlanCollectives(memory_budget="much")
    with pytest.raises(OptionTypeError, match="memory_budget=True"):
        PlanCollectives(memory_budget=True)
    with pytest.raises(OptionError, match="backward_prefetch='late' must be one of '', 'pre', 'post'"):
        PlanCollectives(backward_prefetch="late")
    with pytest.raises(OptionError, match="forward_prefetch='post' must be '' or 'pre'"):
        PlanCollectives(forward_prefetch="post")


def test_pipeline_text_reads_back():
    pipeline = Pipeline(PlanCollectives(merge=False, memory_budget="2GiB"), given=frozenset(HELD))
    assert str(pipeline) == "plan_collectives(merge=False, memory_budget='2GiB')"
    again = Pipeline.parse(str(pipeline), {"plan_collectives": PlanCollectives}, given=frozenset(HELD))
    assert again.passes == pipeline.passes


@pytest.mark.sampled
@pytest.mark.parametrize("merge", [True, False])
@pytest.mark.parametrize("prices", [DEAR, CHEAP], ids=["dear", "cheap"])
@pytest.mark.parametrize(("name", "num_ranks"), [("two_linears", 4), ("blocks_2", 2), ("tied_embedding", 2)])
@briefly()
def test_parity(captured, name, num_ranks, prices, merge):
    graphs = captured(name, num_ranks)
    planned = {}
    for half in ("forward", "backward"):
        gm, ctx = _half(captured, name, half, prices, num_ranks)
        run_pass(PlanCollectives(merge=merge), gm, ctx, *HELD)
        planned[half] = gm
    inputs, expected = step_inputs(name, num_ranks)
    after = run_halves(planned["forward"], planned["backward"], graphs.context, inputs)
    assert_same(after, expected)


def _starts(gm):
    return [(node.target, tuple(node.meta["val"].shape)) for node in gm.graph.nodes if is_collective(node)]


@pytest.mark.parametrize("half", ["forward", "backward"])
@briefly()
def test_a_known_plan_is_followed(captured, half):
    """Another cost model, hence another plan of its own; and the same graph as the other rank's."""
    gm, ctx = _half(captured, "blocks_2", half, DEAR)
    leader = copy_graph(gm)
    known = run_pass(PlanCollectives(), leader, ctx, *HELD).report.planned.known
    follower, alone = copy_graph(gm), copy_graph(gm)
    run_pass(PlanCollectives(), follower, replace(ctx, prices=CHEAP, known_plan=known), *HELD)
    run_pass(PlanCollectives(), alone, replace(ctx, prices=CHEAP), *HELD)
    assert text_of(follower, ctx) == text_of(leader, ctx) != text_of(alone, ctx)


@pytest.mark.parametrize("scale", [0.4, 2.5])
@pytest.mark.parametrize("half", ["forward", "backward"])
def test_a_known_plan_of_more_or_less_compute_is_followed(captured, half, scale):
    gm, ctx = _half(captured, "blocks_2", half, DEAR)
    leader = copy_graph(gm)
    known = run_pass(PlanCollectives(), leader, ctx, *HELD).report.planned.known
    steps = tuple((round(position * scale), *step) for position, *step in known.steps)
    other = KnownPlan(num_tasks=round(known.num_tasks * scale), steps=steps)
    run_pass(PlanCollectives(), gm, replace(ctx, known_plan=other), *HELD)
    assert _starts(gm) == _starts(leader)


@pytest.mark.parametrize("half", ["forward", "backward"])
@briefly()
def test_a_known_plan_gives_way_to_the_budget_of_this_rank(captured, monkeypatch, half):
    """Same collectives in the same order, but close to where their results are read."""
    monkeypatch.setattr(
        solve, "polished", lambda problem, steps, limit: list(steps)
    )  # which leaves nothing to give
    gm, ctx = _half(captured, "blocks_2", half, CHEAP)
    free, late = copy_graph(gm), copy_graph(gm)
    known = run_pass(PlanCollectives(merge=False), free, ctx, *HELD).report.planned.known
    budget = _peak(free) - 1
    following = replace(ctx, known_plan=known)
    run_pass(PlanCollectives(merge=False, memory_budget=budget), late, following, *HELD)
    assert _peak(late) <= budget and _starts(late) == _starts(free)
    with pytest.raises(InfeasibleBudgetError, match="no schedule keeps a memory budget of 100 bytes"):
        run_pass(PlanCollectives(merge=False, memory_budget=100), gm, following, *HELD)


def test_a_plan_of_another_graph_is_refused(captured):
    gm, ctx = _half(captured, "blocks_2", "forward")
    known = KnownPlan(num_tasks=1, steps=((0, True, (0,)), (0, False, (0,))))
    with pytest.raises(PlanError, match="the plan to follow is one of 1 collectives"):
        run_pass(PlanCollectives(), gm, replace(ctx, known_plan=known), *HELD)


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_a_plan_starts_from_that_of_a_like_graph(captured, monkeypatch, half):
    gm, ctx = _half(captured, "blocks_2", half, DEAR)
    first, again = copy_graph(gm), copy_graph(gm)
    found = run_pass(PlanCollectives(exact_states=0), first, ctx, *HELD).report.planned
    monkeypatch.setattr(solve, "_searched", lambda *_, **__: pytest.fail("a search runs"))
    started = run_pass(PlanCollectives(exact_states=0), again, replace(ctx, start=found.known), *HELD)
    planned = started.report.planned
    assert planned.plan.seconds <= found.plan.seconds and planned.plan.unplanned_seconds > planned.plan.seconds
    assert planned.plan.any_order_seconds == found.plan.any_order_seconds
    assert planned.plan.peak_bytes == _peak(again)


def test_a_start_that_does_not_fit_is_left(captured):
    """That of another graph, and one over the budget."""
    gm, ctx = _half(captured, "blocks_2", "backward", CHEAP)
    alone, other, tight = copy_graph(gm), copy_graph(gm), copy_graph(gm)
    found = run_pass(PlanCollectives(), alone, ctx, *HELD).report.planned
    start = KnownPlan(num_tasks=1, steps=((0, True, (0,)), (0, False, (0,))))
    run_pass(PlanCollectives(), other, replace(ctx, start=start), *HELD)
    assert text_of(other, ctx) == text_of(alone, ctx)
    budget = found.plan.peak_bytes - 1
    run_pass(PlanCollectives(memory_budget=budget), tight, replace(ctx, start=found.known), *HELD)
    assert _peak(tight) <= budget


@pytest.fixture
def all_over_large(monkeypatch):
    """Collectives of any size may be split, where a part passes beside the one in front of it."""
    monkeypatch.setattr(splits, "OVER_LARGE", 1)
    monkeypatch.setattr(splits, "NUM_PARTS", (2,))
    return Beside(latency=0.001, bandwidth=10.0)


class Beside(Prices):
    """As soon as half of a collective is over, the one behind it begins."""

    def overlapped_seconds(self, kind, num_bytes, group):
        return self.collective_seconds(kind, num_bytes, group) / 2


@pytest.mark.parametrize("half", ["forward", "backward"])
def test_golden_of_what_is_split(captured, golden, all_over_large, half):
    gm, ctx = _half(captured, "two_linears", half, all_over_large)
    record = run_pass(PlanCollectives(), gm, ctx, *HELD)
    assert num_targets(gm, JOIN_PARTS) == len(record.report.planned.plan.splits) > 0
    golden(text_of(gm, ctx) + f"{record.report.planned.plan}\n", f"plan_collectives.{half}.split")


#: The sums between layers take half as long as a product.
SUMS = Prices(latency=0.5)


def test_golden_of_moved_compute(golden):
    gm, ctx = tensor_parallel_backward(), PassContext(prices=SUMS)
    golden(text_of(gm, ctx), "plan_collectives.moved.before")
    first, second = run_twice(PlanCollectives(), gm, ctx)
    assert first.report.planned.plan.num_moved == 3 and first.report.changed
    assert not second.report.changed and second.report.planned.plan.num_moved == 0
    golden(text_of(gm, ctx) + f"{first.report.planned.plan}\n", "plan_collectives.moved.after")


def test_compute_stays_where_it_is_asked_to():
    gm = tensor_parallel_backward()
    record = run_pass(PlanCollectives(move_compute=False), gm, PassContext(prices=SUMS))
    assert record.report.planned.plan.num_moved == 0 and products_and_sums(gm) == "gasr" * 3


def test_without_merging_nothing_is_split(captured, all_over_large):
    gm, ctx = _half(captured, "two_linears", "forward", all_over_large)
    assert not run_pass(PlanCollectives(merge=False), gm, ctx, *HELD).report.planned.plan.splits


@pytest.mark.parametrize(
    "name", ["two_linears", pytest.param("called_thrice", marks=pytest.mark.slow), "tied_embedding"]
)
@briefly()
def test_parity_of_what_is_split(captured, all_over_large, name):
    graphs, planned = captured(name, 2), {}
    for half in ("forward", "backward"):
        gm, ctx = _half(captured, name, half, all_over_large)
        assert run_pass(PlanCollectives(), gm, ctx, *HELD).report.planned.plan.splits
        planned[half] = gm
        served = {binding.name for ones in reduced_parameters(gm, ctx).values() for binding in ones}
        assert served == (
            {binding.name for binding in ctx.reduced_bindings()} if half == "backward" else set()
        )
    inputs, expected = step_inputs(name, 2)
    assert_same(run_halves(planned["forward"], planned["backward"], graphs.context, inputs), expected)
