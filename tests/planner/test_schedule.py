"""Plans of graphs: random ones with two process groups, and those of small models."""

import importlib
import operator
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.planner_graphs import MESH, PRICES, NodePrices, in_memory_graph, inputs_of, random_graph
from support.problems import LinePrices
from support.small_graphs import GraphBuilder, aten, text_of
from support.thorough import examples
from support.torch_versions import NEEDS_MESSAGES

from graphshard.budget_text import parse_bytes
from graphshard.errors import (
    InfeasibleBudgetError,
    OptionError,
    OptionTypeError,
    PriceError,
    UnpricedGroupError,
)
from graphshard.ir.collectives import (
    ALL_GATHER,
    ALL_REDUCE,
    FUNCTIONAL_FORMS,
    REDUCE_SCATTER,
    WAIT,
    c10d,
    is_collective,
    is_wait,
)
from graphshard.ir.custom_collectives import ALL_REDUCE_HOOK
from graphshard.ir.rewrite import copy_graph
from graphshard.memory import model as memory_model
from graphshard.memory.kept_inputs import kept_inputs
from graphshard.memory.model import memory_timeline
from graphshard.pipeline.context import PassContext
from graphshard.pipeline.facts import check_typed, check_waited
from graphshard.planner.from_graph import problem_of_graph
from graphshard.planner.plan_graph import measured_live
from graphshard.planner.schedule_graph import schedule_with_prices
from graphshard.planner.search import solve
from graphshard.planner.search.bound import lower_bounds
from graphshard.planner.search.simulate import simulate
from graphshard.planner.to_graph import planned_graph
from graphshard.testing import run_on_all_ranks

#: The module; its package shows the function of the same name.
graph_plan = importlib.import_module("graphshard.planner.plan_graph")

CONTEXT = PassContext(mesh=MESH, full_checks=True)
SEEDS = st.integers(0, 10**6)


@pytest.fixture
def copied_gathers(monkeypatch):
    """Gathers that hold their result twice, as gloo's do in larger groups: the seeds are of graphs with such."""
    monkeypatch.setattr(memory_model, "MAX_RANKS_IN_PLACE", 1)


def _peak(gm):
    timeline = memory_timeline(gm, kept=kept_inputs(gm))
    return timeline.peak_bytes + timeline.kept_bytes


def _planned(gm, prices=PRICES, **options):
    copied = copy_graph(gm)
    return copied, schedule_with_prices(copied, prices, **options)


def _assert_valid(gm):
    seen, started = set(), set()
    for node in gm.graph.nodes:
        assert all(source in seen for source in node.all_input_nodes)
        seen.add(node)
        if is_collective(node):
            started.add(node)
        elif is_wait(node):
            started.remove(node.args[0])
    assert not started
    assert not check_typed(gm, CONTEXT) and not check_waited(gm, CONTEXT)


@examples(12)
@given(seed=SEEDS)
def test_a_planned_graph_is_valid_no_slower_and_computes_the_same(seed):
    gm = random_graph(seed)
    planned, plan = _planned(gm)
    _assert_valid(planned)
    found = problem_of_graph(gm, PRICES)
    assert plan.unplanned_seconds == simulate(found.problem, found.unplanned).seconds
    assert plan.bounds.seconds * (1 - 1e-9) <= plan.seconds <= plan.unplanned_seconds
    inputs = inputs_of(gm, seed)
    before, after = (run_on_all_ranks(graph, inputs, MESH) for graph in (gm, planned))
    for one, other in zip(before, after, strict=True):
        assert all(map(torch.equal, one, other))


@examples(10)
@given(seed=SEEDS, share=st.floats(0.8, 1.6))
def test_the_budget_is_kept_by_the_memory_model_or_refused(seed, share):
    gm = random_graph(seed)
    budget = int(share * _peak(gm))
    text = text_of(gm, CONTEXT)
    try:
        planned, plan = _planned(gm, memory_budget=budget)
    except InfeasibleBudgetError as error:
        assert share < 1 and error.smallest_bytes > budget and text_of(gm, CONTEXT) == text
        planned, plan = _planned(gm, memory_budget=error.smallest_bytes)
        budget = error.smallest_bytes
    assert plan.peak_bytes == _peak(planned) <= budget == plan.budget_bytes


@pytest.mark.usefixtures("copied_gathers")
@pytest.mark.parametrize(("seed", "is_in_task"), [(6, True), (12, True), (21, True), (47, False), (50, False)])
def test_memory_beyond_the_budget_is_added_where_it_was(seed, is_in_task):
    """Tasks that took more than planned get more; where only a copy or a collective did, the budget is less."""
    gm = random_graph(seed)
    budget = int(1.2 * _peak(gm))
    found = problem_of_graph(gm, PRICES, budget_bytes=budget)
    first = solve.plan(found.problem)
    live = measured_live(planned_graph(gm, found, first.steps), None)
    excess = max(live.values()) - budget
    assert excess > 0
    assert any(live[name] > budget for name in found.problem.position_names) == is_in_task
    with_less = solve.plan(replace(found.problem, budget_bytes=first.peak_bytes - excess))
    _, plan = _planned(gm, memory_budget=budget)
    assert plan.peak_bytes <= budget
    assert plan.seconds < with_less.seconds if is_in_task else plan.seconds == with_less.seconds


@pytest.mark.usefixtures("copied_gathers")
@pytest.mark.parametrize(("seed", "share"), [(16, 1.05), (45, 1.05), (6, 1.2), (47, 1.2)])
def test_bounds_and_gap_are_those_of_the_users_budget_after_planning_again(seed, share):
    """Nor is the best plan of a problem that counts more memory the best of the given one."""
    gm = random_graph(seed)
    budget = int(share * _peak(gm))
    _, plan = _planned(gm, memory_budget=budget)
    problem = problem_of_graph(gm, PRICES, budget_bytes=budget).problem
    assert plan.bounds == lower_bounds(problem)
    assert plan.gap == plan.seconds / plan.bounds.seconds - 1.0
    assert plan.solver == "beam"


@pytest.mark.usefixtures("copied_gathers")
@pytest.mark.parametrize(("seed", "share"), [(3, 1.0), (16, 1.05), (54, 1.0)])
def test_a_graph_that_keeps_the_budget_stays_where_it_is_faster_than_the_plan_that_does(seed, share):
    """The problem counts a little more for it than the memory model does, so that searches know nothing of it."""
    gm, _ = _planned(random_graph(seed))
    again, plan = _planned(gm, memory_budget=int(share * _peak(gm)))
    assert (plan.solver, plan.seconds) == ("none", plan.unplanned_seconds)
    assert text_of(again, CONTEXT) == text_of(gm, CONTEXT) and plan.peak_bytes == _peak(gm)


@examples(20)
@given(seed=SEEDS, share=st.floats(0.6, 1.0))
def test_a_budget_is_refused_only_where_the_leanest_plan_does_not_keep_it(seed, share):
    """Planned only once: what the memory model finds beyond the budget is not planned away."""
    gm, _ = _planned(random_graph(seed))
    budget = int(share * _peak(gm))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graph_plan, "_ATTEMPTS", 1)
        try:
            planned, plan = _planned(gm, memory_budget=budget)
        except InfeasibleBudgetError as error:
            assert error.smallest_bytes > budget
            budget = error.smallest_bytes
            planned, plan = _planned(gm, memory_budget=budget)
    assert _peak(planned) == plan.peak_bytes <= budget


@pytest.mark.usefixtures("copied_gathers")
@pytest.mark.parametrize(("seed", "share"), [(5, 0.85), (7, 0.8), (16, 0.85), (27, 0.8)])
def test_where_no_search_finds_one_within_the_budget_the_leanest_plan_is_taken(seed, share):
    """All plans for these take more than planned, as often as they are planned again; this one does not."""
    gm, _ = _planned(random_graph(seed))
    budget = int(share * _peak(gm))
    planned, plan = _planned(gm, memory_budget=budget)
    _assert_valid(planned)
    assert plan.solver == "leanest" and _peak(planned) == plan.peak_bytes <= budget == plan.budget_bytes


@examples(8)
@given(seed=SEEDS)
def test_names_of_nodes_do_not_matter(seed):
    one, plan = _planned(random_graph(seed))
    other, renamed = _planned(random_graph(seed, rename="other"))
    assert plan.steps == renamed.steps
    assert text_of(one, CONTEXT) == text_of(other, CONTEXT)


@examples(8)
@given(seed=SEEDS)
def test_a_planned_graph_can_be_planned_again(seed):
    first, _ = _planned(random_graph(seed))
    second, again = _planned(first)
    _assert_valid(second)
    assert again.seconds <= again.unplanned_seconds


@examples(10)
@given(seed=SEEDS)
def test_the_memory_of_the_graph_as_it_came_is_met(seed):
    """The problem's account of it is within the two copies of the largest value of the memory model's."""
    gm = random_graph(seed)
    found = problem_of_graph(gm, PRICES)
    assert abs(simulate(found.problem, found.unplanned).peak_bytes - _peak(gm)) <= 2 * 512


@pytest.mark.parametrize("half", ["forward", "backward"])
@pytest.mark.parametrize("name", ["two_linears", "blocks_3"])
def test_halves_of_small_models(captured, name, half):
    graphs = captured(name, 2)
    gm, ctx = getattr(graphs, half), getattr(graphs.context, f"for_{half}")()

    class Prices(NodePrices):
        def collective_seconds(self, kind, num_bytes, group):
            return LinePrices.collective_seconds(self, kind, num_bytes, group)

    planned, plan = _planned(gm, Prices(latency=2.0, bandwidth=10_000.0, copies=1e6))
    assert not check_waited(planned, ctx) and not check_typed(planned, replace(ctx, full_checks=True))
    assert plan.seconds < plan.unplanned_seconds
    assert any(len(bucket.names) > 1 for bucket in plan.buckets)


def _two_gathers(latency):
    build = GraphBuilder()
    shards = [build.input(f"primals_{i}", 2, 4) for i in range(2)]
    value = build.input("primals_2", 4, 4)
    for shard in shards:
        value = build(aten.mm.default, value, build.gather(shard, 2, "shard_group"))
    gm = build.finish(value)
    return gm, NodePrices(latency=latency, bandwidth=1000.0, copies=1e6)


def test_golden(golden):
    gm, prices = _two_gathers(latency=0.01)
    golden(text_of(gm, CONTEXT), "schedule_graph.before")
    _, plan = gm, schedule_with_prices(gm, prices)
    golden(text_of(gm, CONTEXT) + str(plan) + "\n", "schedule_graph.after")


def test_latency_decides_about_merging():
    assert [len(bucket.names) for bucket in _planned(*_two_gathers(latency=0.01))[1].buckets] == [1, 1]
    assert [len(bucket.names) for bucket in _planned(*_two_gathers(latency=10.0))[1].buckets] == [2]


def test_the_input_of_one_that_follows_another_exists_no_sooner():
    build = GraphBuilder()
    value = build.input("primals_0", 8, 8)
    grad = build(aten.mm.default, build(aten.relu.default, value), value)
    summed = build(WAIT, build(ALL_REDUCE, grad, "sum", "tensor_group"))
    gm = build.finish(build.reduction(summed, 2), build(aten.relu.default, value))
    found = problem_of_graph(gm, PRICES)
    assert [one.after for one in found.problem.collectives] == [(), (0,)]
    assert [one.earliest for one in found.problem.collectives] == [2, 2]


def test_what_cannot_move_stays_and_is_named():
    build = GraphBuilder()
    x = build.input("primals_0", 4, 4)
    state = build.input("primals_1", 2, 4)
    unwaited = build(ALL_REDUCE, x, "sum", "shard_group")
    gathered = build.gather(state, 2, "shard_group")
    written = build(aten.copy_.default, state, build(aten.relu.default, state))
    gm = build.finish(unwaited, build(aten.mm.default, x, gathered), written)
    planned, plan = _planned(gm)
    assert plan.notes == (
        "all_reduce_default (all_reduce) stays in its place: it is not read by one wait alone",
        "all_gather_into_tensor_default (all_gather_into_tensor) stays in its place: "
        "it reads or makes what another op writes to in place",
    )
    assert text_of(planned, CONTEXT) == text_of(gm, CONTEXT)


def _written_beside(kind):
    """A cast of what is written in place before it, or a sum with what is written behind it; and far more compute."""
    build = GraphBuilder()
    x, state = build.input("primals_0", 4, 4), build.input("primals_1", 2, 4)
    product = build(aten.mm.default, x, x)
    if kind == "cast":
        written = build(aten.copy_.default, state, build(aten.relu.default, state))
        gathered = build.gather(build(aten.mul.Tensor, state, 2.0), 2)
        return build.finish(build(aten.mm.default, product, gathered), written)
    if kind == "out":
        written = build(aten.add.out, state, state, out=state)
        gathered = build.gather(build(aten.mul.Tensor, state, 2.0), 2)
        return build.finish(build(aten.mm.default, product, gathered), written)
    total = build(aten.add.Tensor, state, build.reduction(product, 2))
    written = build(aten.copy_.default, state, build(aten.relu.default, state))
    return build.finish(total, written, build(aten.mm.default, product, x))


@pytest.mark.parametrize("kind", ["cast", "out", "sum"])
def test_what_is_made_of_memory_that_is_written_in_place_does_not_move_past_the_write(kind):
    gm = _written_beside(kind)
    planned, plan = _planned(gm)
    assert plan.buckets
    _assert_computes_the_same(planned, gm)


def _assert_computes_the_same(planned, gm, seed=0):
    before, after = (run_on_all_ranks(graph, inputs_of(gm, seed), MESH) for graph in (gm, planned))
    for one, other in zip(before, after, strict=True):
        assert all(map(torch.equal, one, other))


@examples(20)
@given(seed=SEEDS)
def test_what_writes_to_memory_it_is_given_stays_and_the_graph_computes_the_same(seed):
    gm = in_memory_graph(seed)
    planned, plan = _planned(gm)
    order = [node.target for node in gm.graph.nodes if node.target in FUNCTIONAL_FORMS]
    assert [node.target for node in planned.graph.nodes if node.target in FUNCTIONAL_FORMS] == order
    assert sum(note.endswith("it writes its result to memory it is given") for note in plan.notes) == len(order)
    _assert_computes_the_same(planned, gm, seed)


def _two_gathers_into_one_buffer():
    """Each is summed, and the sums could be merged if they read memory of their own."""
    build = GraphBuilder()
    buffer = build.input("primals_0", 4, 4)
    sums = []
    for index in (1, 2):
        shard = build.input(f"primals_{index}", 2, 4)
        started = build(c10d.all_gather_into_tensor_out.default, shard, 2, "shard_group", out=buffer)
        sums.append(build(WAIT, build(ALL_REDUCE, build(WAIT, started), "sum", "tensor_group")))
    return build.finish(*sums)


def test_what_reads_a_buffer_is_not_moved_behind_what_is_gathered_into_it_next():
    gm = _two_gathers_into_one_buffer()
    planned, plan = _planned(gm)
    assert not plan.buckets
    _assert_computes_the_same(planned, gm)


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        (c10d.all_reduce_.default, "all_reduce"),
        (c10d.all_gather_into_tensor_out.default, "all_gather"),
        (c10d.reduce_scatter_tensor_out.default, "reduce_scatter"),
        (c10d.broadcast_.default, "broadcast"),
    ],
)
def test_one_that_writes_to_memory_it_is_given_takes_as_long_as_the_one_that_returns_it(target, kind):
    gm = _into_memory(target, "tensor_group")
    planned, plan = _planned(gm)
    assert plan.seconds - 1e-2 == pytest.approx(PRICES.collective_seconds(kind, 8 * 4 * 8, "tensor_group"))
    (note,) = plan.notes
    assert note.endswith("stays in its place: it writes its result to memory it is given")
    assert text_of(planned, CONTEXT) == text_of(gm, CONTEXT)
    with pytest.raises(UnpricedGroupError, match=r"'elsewhere' \(of "):
        _planned(_into_memory(target, "elsewhere"))


def _into_memory(target, group):
    """One collective of 8 x 4 at most, and what reads its result."""
    build = GraphBuilder()
    part, whole = build.input("primals_0", 4, 4), build.input("primals_1", 8, 4)
    if target is c10d.all_gather_into_tensor_out.default:
        started = build(target, part, 2, group, out=whole)
    elif target is c10d.reduce_scatter_tensor_out.default:
        started = build(target, whole, "sum", 2, group, out=part)
    else:
        started = build(target, whole, 0 if target is c10d.broadcast_.default else "sum", group)
    return build.finish(build(aten.relu.default, build(WAIT, started)))


def test_a_wait_for_the_memory_it_writes_to_is_a_wait_for_it():
    build = GraphBuilder()
    x = build.input("primals_0", 8, 4)
    build(c10d.all_reduce_.default, x, "sum", "tensor_group")
    gm = build.finish(build(aten.relu.default, build(WAIT, x)))
    _, plan = _planned(gm)
    assert plan.seconds - 1e-2 == pytest.approx(PRICES.collective_seconds("all_reduce", 8 * 4 * 8, "tensor_group"))
    assert not check_waited(gm, CONTEXT)


@NEEDS_MESSAGES
def test_beside_a_message_between_two_ranks_nothing_moves():
    """Another rank may have another graph, so that another order could stop both."""
    build = GraphBuilder()
    x, shard = build.input("primals_0", 4, 4), build.input("primals_1", 2, 4)
    build(WAIT, build(c10d.isend.default, x, 1, 0, "pipeline"))
    gm = build.finish(build(aten.mm.default, build(aten.mm.default, x, x), build.gather(shard, 2, "shard_group")))
    planned, plan = _planned(gm)
    assert text_of(planned, CONTEXT) == text_of(gm, CONTEXT)
    message, gather = plan.notes
    assert message == (
        "isend_default (isend) stays in its place: it is a message between two ranks, whose time is not known and "
        "counts as none"
    )
    assert gather == (
        "all_gather_into_tensor_default (all_gather_into_tensor) stays in its place: it shares its graph with "
        "isend_default, a message between two ranks, which may have other graphs: moved, it could wait for a rank that "
        "waits for this one"
    )


def test_arguments_given_by_name_plan_the_same_and_print_the_same():
    def gathers(by_name):
        build = GraphBuilder()
        x = build.input("primals_0", 4, 4)
        for index, group in enumerate(("shard_group", "tensor_group", "shard_group"), start=1):
            shard = build.input(f"primals_{index}", 2, 4)
            if by_name:
                started = build(ALL_GATHER, input=shard, group_size=2, group_name=group)
                x = build(aten.mm.default, x, build(WAIT, tensor=started))
            else:
                x = build(aten.mm.default, x, build.gather(shard, 2, group))
        grad = build(REDUCE_SCATTER, **dict(input=x, reduce_op="sum", group_size=2, group_name="shard_group"))
        other = build(ALL_REDUCE, x, group_name="tensor_group", reduce_op="sum")
        return build.finish(x, build(WAIT, grad), build(WAIT, other))

    (given, one), (named, other) = _planned(gathers(False)), _planned(gathers(True))
    assert (one.seconds, one.steps) == (other.seconds, other.steps)
    assert text_of(gathers(False), CONTEXT) == text_of(gathers(True), CONTEXT).replace("tensor=", "")
    assert text_of(given, CONTEXT) == text_of(named, CONTEXT).replace("tensor=", "")
    _assert_computes_the_same(named, gathers(True))


def _coalesced(group):
    build = GraphBuilder()
    values = [build.input(f"primals_{i}", 4, 4) for i in range(2)]
    started = build(c10d.all_reduce_coalesced.default, values, "sum", group)
    return build.finish(*(build(WAIT, build(operator.getitem, started, i)) for i in range(2)))


def test_a_coalesced_collective_stays_and_takes_its_time_once():
    _, plan = _planned(_coalesced("tensor_group"))
    items = 2 * 1e-2  # these prices have one for each
    assert plan.seconds - items == pytest.approx(PRICES.collective_seconds("all_reduce", 2 * 4 * 4 * 8, "tensor_group"))
    (note,) = plan.notes
    assert note.endswith("stays in its place: it is of a kind that is not planned")


def test_a_coalesced_collective_on_an_unknown_group_is_an_error():
    with pytest.raises(UnpricedGroupError, match=r"'elsewhere' \(of all_reduce_coalesced_default, all_reduce_coal"):
        _planned(_coalesced("elsewhere"))


def test_a_users_hook_stays_and_its_time_is_said_to_be_unknown():
    build = GraphBuilder()
    value = build.input("primals_0", 4, 4)
    gm = build.finish(build(WAIT, build(ALL_REDUCE_HOOK, value, "hook", "elsewhere", build.handle())))
    _, plan = _planned(gm)
    assert plan.seconds == 0.0
    assert plan.notes == (
        "all_reduce_hook_default (all_reduce_hook) stays in its place: "
        "it is a user's hook, whose time is not known and counts as none",
    )


def test_nothing_to_plan():
    build = GraphBuilder()
    gm = build.finish(build(aten.relu.default, build.input("primals_0", 2, 2)))
    text = text_of(gm, CONTEXT)
    plan = schedule_with_prices(gm, PRICES)
    assert plan.buckets == () and plan.gap == 0.0 and text_of(gm, CONTEXT) == text


def _foreign():
    build = GraphBuilder()
    x = build.input("primals_0", 2, 2)
    return build.finish(build(WAIT, build(ALL_GATHER, x, 2, "elsewhere")))


def test_an_unknown_group_is_an_error_and_changes_nothing():
    gm = _foreign()
    text = text_of(gm, CONTEXT)
    message = r"process groups: 'elsewhere' \(of all_gather_into_tensor_default, all_gather_into_tensor\)"
    with pytest.raises(UnpricedGroupError, match=message):
        schedule_with_prices(gm, PRICES)
    assert text_of(gm, CONTEXT) == text


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_a_price_that_cannot_be_is_an_error(seconds):
    class Bad(NodePrices):
        def compute_seconds(self, gm):
            return {gm.graph.output_node().all_input_nodes[0]: seconds}

    with pytest.raises(PriceError, match="prices must be finite and not negative"):
        schedule_with_prices(random_graph(1), Bad())

    class BadLink(NodePrices):
        def collective_seconds(self, kind, num_bytes, group):
            return seconds

    with pytest.raises(PriceError, match="cannot take"):
        schedule_with_prices(random_graph(1), BadLink())


@pytest.mark.parametrize(
    ("value", "num_bytes"),
    [(5, 5), ("2000000", 2_000_000), ("60GiB", 60 * 2**30), ("2GB", 2 * 10**9), (" 1.5 mib ", 3 * 2**19), ("7b", 7)],
)
def test_budgets_that_can_be_read(value, num_bytes):
    assert parse_bytes(value) == num_bytes


@pytest.mark.parametrize("value", ["", "GiB", "5 parsecs", "-1GB", "1e9", "5", "60", 0, -3, "0GiB"])
def test_budgets_that_cannot(value):
    with pytest.raises(OptionError, match="memory_budget="):
        parse_bytes(value)


def test_a_small_number_without_a_unit_is_asked_for_one():
    words = "memory_budget='60' has no unit, and would be 60 bytes; write 60GiB, or 60B if bytes are meant"
    with pytest.raises(OptionError, match=words):
        parse_bytes("60")
    assert parse_bytes("60B") == parse_bytes(60) == 60


def test_a_budget_of_thousands_of_digits_is_not_printed():
    with pytest.raises(OptionError, match=r"^memory_budget must be positive$"):
        parse_bytes(-(10**6000))


@pytest.mark.parametrize("value", [1.5, True, None, [1]])
def test_budgets_of_another_type(value):
    with pytest.raises(OptionTypeError, match="must be bytes"):
        parse_bytes(value)
