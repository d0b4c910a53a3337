"""`graphshard.schedule_graph`: planned for a machine that is a card, groups that are names and sizes."""

import itertools
import operator
import warnings
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from support.planner_graphs import MESH, inputs_of, random_graph
from support.small_graphs import GROUP, GraphBuilder, aten, text_of
from torch.fx.experimental.proxy_tensor import make_fx

import graphshard
from graphshard.cost import CostModel, GroupTopology, load_card, mesh_topologies
from graphshard.cost.tables import parse_tables
from graphshard.errors import (
    CardError,
    InfeasibleBudgetError,
    OptionError,
    OptionTypeError,
    ProblemError,
    TableError,
    UnpricedGroupError,
    UntypedGraphError,
)
from graphshard.ir.collectives import ALL_GATHER, ALL_REDUCE, WAIT, c10d, is_collective
from graphshard.ir.rewrite import copy_graph
from graphshard.pipeline.context import PassContext
from graphshard.planner.from_graph import problem_of_graph
from graphshard.planner.schedule_graph import schedule_with_prices, topologies
from graphshard.testing import run_on_all_ranks

CONTEXT = PassContext(mesh=MESH, full_checks=True)
GROUPS = {"shard_group": 2, "tensor_group": 2}


def _gathers(num_ranks=16, group="shard", width=64):
    """Two products with gathered factors."""
    build = GraphBuilder()
    value = build.input("primals_0", width, width, dtype=torch.bfloat16)
    for index in (1, 2):
        shard = build.input(f"primals_{index}", width // num_ranks, width, dtype=torch.bfloat16)
        value = build(aten.mm.default, value, build.gather(shard, num_ranks, group))
    return build.finish(value)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_planned_graph_computes_the_same(seed):
    gm = random_graph(seed)
    planned = copy_graph(gm)
    plan = graphshard.schedule_graph(planned, hardware="h100-sxm", groups=GROUPS)
    assert plan.seconds <= plan.unplanned_seconds
    inputs = inputs_of(gm, seed)
    for mine, theirs in zip(
        run_on_all_ranks(planned, inputs, MESH), run_on_all_ranks(gm, inputs, MESH), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=0)


def _waited_for_twice(num_waits=2):
    """Two sums, each read behind two waits."""
    build = GraphBuilder()
    source = build.input("primals_0", 64, 64)
    sums = [build(ALL_REDUCE, build(op, source), "sum", "tensor") for op in (aten.sin.default, aten.cos.default)]
    found = []
    for total in sums:
        waits = [build(WAIT, total) for _ in range(num_waits)]
        found.append(build(aten.mm.default, waits[0], source))
        found.append(build(aten.mm.default, waits[-1], found[-1]))
    return build.finish(*found)


def test_what_is_waited_for_twice_is_planned_with_one_wait():
    twice, once = _waited_for_twice(), _waited_for_twice(num_waits=1)
    started = [node for node in twice.graph.nodes if is_collective(node)]
    plans = [
        graphshard.schedule_graph(gm, hardware="h100-sxm", groups={"tensor": 4}, buckets=buckets)
        for gm, buckets in ((twice, [tuple(started)]), (once, []))
    ]
    assert text_of(twice, CONTEXT) == text_of(once, CONTEXT)
    assert plans[0].seconds == plans[1].seconds and len(plans[0].buckets) == 1


def test_of_what_is_waited_for_twice_an_error_leaves_both_waits():
    gm = _waited_for_twice()
    before = text_of(gm, CONTEXT)
    with pytest.raises(InfeasibleBudgetError):
        graphshard.schedule_graph(gm, hardware="h100-sxm", groups={"tensor": 4}, memory_budget=1)
    foreign = [node for node in _waited_for_twice().graph.nodes if is_collective(node)]
    with pytest.raises(ProblemError):
        graphshard.schedule_graph(gm, hardware="h100-sxm", groups={"tensor": 4}, prefetch=[tuple(foreign)])
    assert text_of(gm, CONTEXT) == before


def test_groups_that_are_names_have_the_size_their_gathers_say():
    """16 ranks are two nodes of the card; given as one node of 16, the links inside are used."""
    across, inside = (
        graphshard.schedule_graph(_gathers(width=8192), hardware="h100-sxm", groups=groups)
        for groups in (None, {"shard": GroupTopology(num_ranks=16, ranks_per_node=16)})
    )
    model = CostModel(card=load_card("h100-sxm"), groups=mesh_topologies({"shard": 16}, 8))
    assert across.seconds == schedule_with_prices(_gathers(width=8192), model).seconds
    assert inside.seconds < across.seconds


def test_a_coalesced_gather_says_how_many_ranks_its_group_has():
    build = GraphBuilder()
    values = [build.input(f"primals_{index}", 4, 4) for index in range(2)]
    started = build(torch.ops._c10d_functional.all_gather_into_tensor_coalesced.default, values, 16, "shard")
    gm = build.finish(*(build(WAIT, build(operator.getitem, started, index)) for index in range(2)))
    assert graphshard.schedule_graph(gm, hardware="h100-sxm").seconds > 0


def test_ranks_of_a_process_group_that_exists(fake_group):
    """8 ranks on a card with one rank a node: its all-reduce says nothing of its size."""
    name = fake_group(8).get_group().group_name
    build = GraphBuilder()
    gm = build.finish(build(WAIT, build(ALL_REDUCE, build.input("primals_0", 4, 4), "sum", name)))
    few = copy_graph(gm)
    plan = graphshard.schedule_graph(gm, hardware="cpu-ethernet-1g")
    assert graphshard.schedule_graph(few, hardware="cpu-ethernet-1g", groups={name: 2}).seconds < plan.seconds


def test_ranks_of_a_process_group_lie_where_they_are(fake_group):
    """Ranks 0 and 3 to 8 on nodes of 4: 2, 4 and 1 of them."""
    fake_group(12)
    name = dist.new_group([0, *range(3, 9)]).group_name
    build = GraphBuilder()
    gm = build.finish(build(WAIT, build(ALL_REDUCE, build.input("primals_0", 4, 4), "sum", name)))
    card = replace(load_card("h100-sxm"), ranks_per_node=4)
    assert topologies(gm, card, {}) == {
        name: GroupTopology(num_ranks=7, ranks_per_node=4, num_nodes=3, fewest_per_node=1)
    }


@pytest.mark.parametrize("num_ranks", [9, 12, 20])
def test_a_number_of_ranks_lies_as_on_a_mesh_of_one_axis(num_ranks):
    card = load_card("h100-sxm")
    assert topologies(_two_groups(), card, {"shard": num_ranks}) == mesh_topologies({"shard": num_ranks}, 8)


def test_an_all_reduce_over_an_unknown_group_asks_for_its_ranks():
    build = GraphBuilder()
    gm = build.finish(build(WAIT, build(ALL_REDUCE, build.input("primals_0", 4, 4), "sum", "elsewhere")))
    with pytest.raises(UnpricedGroupError, match=r"'elsewhere'.*groups=\{name: ranks\}"):
        graphshard.schedule_graph(gm, hardware="h100-sxm")
    plan = graphshard.schedule_graph(gm, hardware="h100-sxm", groups={"elsewhere": 8})
    assert plan.exposed_seconds > 0


def test_the_users_buckets_prefetches_and_limits_are_kept():
    """Without them each of these two gathers starts at once, alone."""
    gm = _gathers(width=8192)
    first, second = filter(is_collective, gm.graph.nodes)

    def planned(**wishes):
        return graphshard.schedule_graph(copy_graph(gm), hardware="h100-sxm", **wishes)

    def in_copy(ask):
        copied = copy_graph(gm)
        return graphshard.schedule_graph(copied, hardware="h100-sxm", **ask(*filter(is_collective, copied.graph.nodes)))

    free = planned()
    assert [(bucket.start, bucket.wait) for bucket in free.buckets] == [(0, 0), (0, 1)]
    limited = planned(max_gathers=1)
    assert limited.buckets[1].start > 0 or limited.buckets[1].issued_at >= limited.buckets[0].finished_at
    merged = in_copy(lambda one, other: {"buckets": [[one, other]]})
    assert [bucket.names for bucket in merged.buckets] == [(first.name, second.name)]
    ahead = in_copy(lambda one, other: {"prefetch": [(one, other)]})
    assert ahead.buckets[1].issued_at == pytest.approx(ahead.buckets[0].finished_at)


def test_the_users_limit_of_reductions_is_kept():
    build = GraphBuilder()
    value = build.input("primals_0", 8192, 8192, dtype=torch.bfloat16)
    reduced = []
    for _ in range(4):
        value = build(aten.mm.default, value, value)
        reduced.append(build.reduction(value, 16, "shard"))
    gm = build.finish(*reduced, value)

    def most_open(**limit):
        plan = graphshard.schedule_graph(copy_graph(gm), hardware="h100-sxm", groups={"shard": 16}, **limit)
        return max(itertools.accumulate(1 if step.is_start else -1 for step in plan.steps))

    assert most_open(max_reductions=1) == 1 < most_open()


def _two_groups():
    """Two all-reduces of different groups beside each other, and nothing else."""
    build = GraphBuilder()
    values = [build.input(f"primals_{index}", 1024, 1024) for index in range(2)]
    names = ("replicate", "shard")
    return build.finish(
        *[build(WAIT, build(ALL_REDUCE, one, "sum", name)) for one, name in zip(values, names, strict=True)]
    )


def test_groups_on_one_link_take_turns():
    options = {"hardware": "h100-sxm", "groups": {"replicate": 8, "shard": 8}}
    apart = graphshard.schedule_graph(_two_groups(), **options)
    together = graphshard.schedule_graph(_two_groups(), **options, shared_links=[("replicate", "shard")])
    assert together.seconds == pytest.approx(2 * apart.seconds)
    assert together.bounds.seconds > apart.bounds.seconds and together.gap < 0.01


def test_measured_tables_are_used(tmp_path):
    table = tmp_path / "times.csv"
    table.write_text("group,op,bytes,seconds\nshard,all_gather,1024,0.5\nshard,all_gather,1048576,0.5\n")
    plan = graphshard.schedule_graph(_gathers(), hardware="h100-sxm", tables=table)
    assert (
        plan.exposed_seconds == pytest.approx(0.5) and len(plan.buckets) == 1
    )  # a start-up of 0.5 s is paid once


@pytest.mark.parametrize(("device_type", "prefers"), [("cuda", True), ("cpu", False), (None, False)])
def test_few_large_buckets_are_preferred_on_gpus(device_type, prefers):
    """None: the fake tensors of this graph are on a CPU."""
    gm = _gathers()
    model = CostModel(card=load_card("h100-sxm"), groups=topologies(gm, load_card("h100-sxm"), {}))
    assert problem_of_graph(gm, model, device_type=device_type).problem.prefers_large is prefers


@pytest.mark.parametrize("ask", [graphshard.schedule_graph, graphshard.inspect_graph])
def test_what_a_table_lacks_is_one_warning_where_the_user_asked(ask):
    build = GraphBuilder()
    value = build.input("primals_0", 64, 64)
    for index in (1, 2, 3):
        value = build(aten.mm.default, value, build.gather(build.input(f"primals_{index}", 4, 64), 16, "shard"))
    gm = build.finish(build(WAIT, build(ALL_REDUCE, value, "sum", "shard")))
    tables = parse_tables("group,op,bytes,seconds\nshard,all_gather,8,1e-6\nshard,all_gather,16,1e-6\n", where="t.csv")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ask(gm, hardware="h100-sxm", tables=tables)
    (warning,) = caught
    for part in (
        "t.csv has no all_reduce over shard nor over 16 ranks; the times of card",
        "t.csv: all_gather over shard (16 ranks) was measured from 8 B to 16 B; above it",
    ):
        assert part in str(warning.message)
    assert warning.filename == __file__


@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        ({"shard": "16"}, OptionTypeError, r"groups\['shard'\]='16' must be a number of ranks \(an int\)"),
        ({"shard": None}, OptionTypeError, r"groups\['shard'\]=None must be a number of ranks"),
        ({"shard": 16.0}, OptionTypeError, r"groups\['shard'\]=16.0 must be a number of ranks"),
        ({3: 2}, OptionTypeError, "groups has 3, but the names of process groups are texts"),
        ({"shard": 0}, OptionError, r"groups\['shard'\]=0 must be the number of ranks, 1 or more"),
        ([("shard", 16)], OptionTypeError, r"groups=\[\('shard', 16\)\] must be ranks, or topologies, by the names"),
        (
            {"shard": 64},
            OptionError,
            r"groups\['shard'\] has 64 ranks, but all_gather_into_tensor_default \(all_gather_into_tensor\) has "
            r"group_size=16: give as many as the graph says",
        ),
    ],
)
@pytest.mark.parametrize("ask", [graphshard.schedule_graph, graphshard.inspect_graph])
def test_groups_that_cannot_be(ask, groups, error, message):
    with pytest.raises(error, match=message):
        ask(_gathers(), hardware="h100-sxm", groups=groups)


@pytest.mark.parametrize(
    ("links", "error", "message"),
    [
        ("shard", OptionTypeError, "shared_links='shard' must be a list with the names of the groups on each link"),
        (["shard"], OptionTypeError, r"shared_links=\['shard'\] must be a list"),
        ([3], OptionTypeError, r"shared_links=\[3\] must be a list"),
        ([(["shard"],)], OptionTypeError, r"shared_links=\[\(\['shard'\],\)\] must be a list"),
        ([("shard", "tp")], OptionError, "shared_links names 'tp', but the graph and groups= have 'shard'"),
    ],
)
def test_shared_links_that_cannot_be(links, error, message):
    with pytest.raises(error, match=message):
        graphshard.schedule_graph(_gathers(), hardware="h100-sxm", shared_links=links)


@pytest.mark.parametrize("ask", [graphshard.schedule_graph, graphshard.inspect_graph])
@pytest.mark.parametrize("is_input", [True, False])
def test_a_collective_without_a_fake_value_is_named(ask, is_input):
    gm = _gathers()
    first, _ = filter(is_collective, gm.graph.nodes)
    del (first.args[0] if is_input else first).meta["val"]
    message = (
        r'have no meta\["val"\], which says their bytes: all_gather_into_tensor_default \(all_gather_into_tensor\); '
        "capture the graph on fake tensors"
    )
    with pytest.raises(UntypedGraphError, match=message):
        ask(gm, hardware="h100-sxm")


@pytest.mark.parametrize("ask", [graphshard.schedule_graph, graphshard.inspect_graph])
def test_what_computes_without_a_fake_value_is_named(ask):
    gm = _gathers()
    for node in gm.graph.nodes:
        if node.target is aten.mm.default:
            del node.meta["val"]
    message = r'these have no meta\["val"\], which says what they cost: mm_default \(mm\), mm_default_1 \(mm\); capture'
    with pytest.raises(UntypedGraphError, match=message):
        ask(gm, hardware="h100-sxm")


@pytest.mark.parametrize("ask", [graphshard.schedule_graph, graphshard.inspect_graph])
def test_fake_values_of_several_modes_are_refused(ask, fake_group):
    """As make_fx leaves them by itself: memory of views cannot be told."""
    fake_group(2)
    gm = make_fx(_two_gathers)(torch.ones(8, 8), torch.ones(4, 8), torch.ones(4, 8))
    with pytest.raises(UntypedGraphError, match=r'of several fake modes.*tracing_mode="fake"'):
        ask(gm, hardware="h100-sxm")
    gm = make_fx(_two_gathers, tracing_mode="fake")(torch.ones(8, 8), torch.ones(4, 8), torch.ones(4, 8))
    ask(gm, hardware="h100-sxm")


def _two_gathers(x, first, second):
    name = dist.group.WORLD.group_name
    for shard in (first, second):
        x = x @ c10d.wait_tensor(c10d.all_gather_into_tensor(shard, 2, name))
    return x


@pytest.mark.parametrize("ask", [graphshard.schedule_graph, graphshard.inspect_graph])
def test_what_is_no_graph_of_collectives_is_refused(ask, captured):
    with pytest.raises(OptionTypeError, match="gm=None must be a captured graph"):
        ask(None, hardware="h100-sxm")
    sharded = captured("two_linears", 2).joint
    with pytest.raises(OptionError, match=r"gm has shard ops \(unshard.* and \d+ others\).*run the pass lower_shards"):
        ask(sharded, hardware="h100-sxm")


@pytest.mark.parametrize("ask", [graphshard.schedule_graph, graphshard.inspect_graph])
def test_collectives_with_a_derivative_of_their_own_are_refused(ask):
    build = GraphBuilder()
    gather = torch.ops._c10d_functional_autograd.all_gather_into_tensor.default
    gathered = build(gather, build.input("x", 4, 4), 2, GROUP)
    gm = build.finish(build(WAIT, gathered))
    with pytest.raises(OptionError, match=r"own \(all_gather_into_tensor.*set their target.*_c10d_functional, which"):
        ask(gm, hardware="h100-sxm")


def test_how_a_graph_is_called_stays_as_it_was(fake_group):
    fake_group(2)

    def step(xs):
        return {"y": _two_gathers(*xs)}

    given = [torch.ones(8, 8), torch.ones(4, 8), torch.ones(4, 8)]
    gm = make_fx(step, tracing_mode="fake")(given)
    graphshard.schedule_graph(gm, hardware="h100-sxm")
    assert list(gm(given)) == ["y"]
    exported = torch.export.export(_Named(), (torch.ones(8, 8),)).module()
    graphshard.schedule_graph(exported, hardware="h100-sxm", groups={dist.group.WORLD.group_name: 2})
    assert list(exported(torch.ones(8, 8))) == ["total"]


class _Named(torch.nn.Module):
    def forward(self, x):
        return {"total": c10d.wait_tensor(c10d.all_reduce(x @ x, "sum", dist.group.WORLD.group_name))}


def test_exchanges_of_symbolic_pieces(fake_group):
    fake_group(2)

    def exchange(x, w):
        half = x.shape[0] // 2
        name = dist.group.WORLD.group_name
        return c10d.wait_tensor(c10d.all_to_all_single(x @ w, [half, half], [half, half], name)) @ w

    gm = make_fx(exchange, tracing_mode="symbolic")(torch.ones(8, 8), torch.ones(8, 8))
    plan = graphshard.schedule_graph(gm, hardware="h100-sxm", groups={dist.group.WORLD.group_name: 2})
    (bucket,) = plan.buckets
    assert bucket.num_bytes == 8 * 8 * 4
    assert gm(torch.ones(8, 8), torch.ones(8, 8)).shape == (8, 8)


def test_collectives_of_torch_itself_may_write_anywhere(fake_group):
    """Their schemas do not say so: nothing passes them that looks at the same memory."""
    fake_group(2)

    def step(x, w, flat):
        for _ in range(3):
            x = x @ w
        dist.all_reduce(flat[:8])
        name = dist.group.WORLD.group_name
        return x, c10d.wait_tensor(c10d.all_reduce(flat, "sum", name))

    gm = make_fx(step, tracing_mode="fake")(torch.ones(8, 8), torch.ones(8, 8), torch.ones(16))
    plan = graphshard.schedule_graph(gm, hardware="h100-sxm", groups={dist.group.WORLD.group_name: 2})
    order = [str(node.target) for node in gm.graph.nodes]
    assert order.index("c10d.allreduce_.default") < order.index("_c10d_functional.all_reduce.default")
    first, second = plan.notes
    assert "allreduce_ (allreduce_) stays in its place, and its time counts as none: it is no functional" in first
    assert "reads or makes what a method, a module or a function without a schema may write to in place" in second


def _wishes(what):
    gm = _gathers()
    first, second = filter(is_collective, gm.graph.nodes)
    return gm, eval(what, {"a": first, "b": second, "nan": float("nan")})


@pytest.mark.parametrize(
    ("option", "what", "message"),
    [
        ("buckets", "a", "must be a list of groups of nodes"),
        ("buckets", "[a, b]", "must be a list of groups of nodes"),
        ("buckets", "None", "buckets=None must be a list of groups"),
        ("buckets", "[['a']]", r"buckets has \('a',\) but must be a list of groups"),
        ("buckets", "[[[a]]]", "but must be a list of groups"),
        ("prefetch", "(a, b)", "must be a list of pairs of nodes"),
        ("prefetch", "[(a,)]", r"prefetch has \(all_gather_into_tensor_default,\) but must be a list of pairs"),
        ("prefetch", "[(a, b, a)]", "but must be a list of pairs"),
        ("prefetch", "{a: b}", "must be a list of pairs"),
        ("max_gathers", "'2'", r"max_gathers='2' must be a number of buckets \(an int\)"),
        ("max_gathers", "True", "max_gathers=True must be a number"),
        ("max_reductions", "nan", "max_reductions=nan must be a number"),
        ("max_reductions", "None", "max_reductions=None must be a number"),
        ("move_compute", "'false'", "move_compute='false' must be True or False"),
        ("move_compute", "1", "move_compute=1 must be True or False"),
    ],
)
def test_wishes_that_cannot_be_read(option, what, message):
    gm, value = _wishes(what)
    with pytest.raises(OptionTypeError, match=message):
        graphshard.schedule_graph(gm, hardware="h100-sxm", **{option: value})


def test_buckets_may_be_generated():
    gm, (first, second) = _wishes("(a, b)")
    plan = graphshard.schedule_graph(gm, hardware="h100-sxm", buckets=(nodes for nodes in [iter([first, second])]))
    assert len(plan.buckets) == 1


def test_a_budget_in_words():
    plan = graphshard.schedule_graph(_gathers(), hardware="h100-sxm", memory_budget="64KiB")
    assert plan.peak_bytes <= plan.budget_bytes == 64 * 1024
    with pytest.raises(InfeasibleBudgetError, match="bytes"):
        graphshard.schedule_graph(_gathers(), hardware="h100-sxm", memory_budget="1KiB")


def test_mistakes_change_nothing(tmp_path):
    gm = _gathers()
    before = text_of(gm, CONTEXT)
    with pytest.raises(CardError, match=r"a100-sxm.*h100-sxm"):
        graphshard.schedule_graph(gm, hardware="h1000")
    with pytest.raises(TableError, match="cannot be read"):
        graphshard.schedule_graph(gm, hardware="h100-sxm", tables=tmp_path / "none.csv")
    with pytest.raises(OptionError, match="memory_budget='lots'"):
        graphshard.schedule_graph(gm, hardware="h100-sxm", memory_budget="lots")
    for entry in (graphshard.schedule_graph, graphshard.inspect_graph):
        with pytest.raises(OptionTypeError, match="hardware=None must be a card, its name"):
            entry(gm, hardware=None)
        with pytest.raises(OptionTypeError, match=r"tables=\[1\] must be the path of a CSV file"):
            entry(gm, hardware="h100-sxm", tables=[1])
    assert text_of(gm, CONTEXT) == before
    assert len([node for node in gm.graph.nodes if is_collective(node) and node.target is ALL_GATHER]) == 2
