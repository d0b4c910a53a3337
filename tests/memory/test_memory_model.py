"""The memory model: exact bytes on graphs small enough to count by hand."""

import operator

import pytest
import torch
from support.small_graphs import GROUP, GraphBuilder, aten
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from graphshard.ir.bucket_ops import PACK, UNPACK
from graphshard.ir.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, WAIT, c10d
from graphshard.ir.graph_text import node_names
from graphshard.ir.op_traits import fusion_runs
from graphshard.memory import model
from graphshard.memory.kept_inputs import kept_inputs
from graphshard.memory.model import DONATED, MemoryModel, copied_bytes, memory_timeline

MM = aten.mm.default
T = aten.t.default
CELL = 8  # bytes of a float64


def _live(gm: fx.GraphModule, kept=()) -> dict[str, int]:
    """Live cells at each node, by node name."""
    timeline = memory_timeline(gm, kept=kept)
    assert all(num_bytes % CELL == 0 for num_bytes in timeline.live_bytes)
    return {
        node.name: num_bytes // CELL
        for node, num_bytes in zip(timeline.nodes, timeline.live_bytes, strict=True)
    }


def test_values_die_after_their_last_reader():
    build = GraphBuilder()
    x = build.input("primals_1", 4, 4)
    a = build(MM, x, x)
    b = build(MM, a, a)
    c = build(MM, b, x)
    gm = build.finish(c)
    assert _live(gm, kept=[x]) == {"primals_1": 0, a.name: 16, b.name: 32, c.name: 32, "output": 16}
    assert memory_timeline(gm, kept=[x]).kept_bytes == 16 * CELL


def test_inputs_that_are_not_kept_die_too():
    build = GraphBuilder()
    saved, other = build.input("mm", 4, 4), build.input("mm_1", 2, 2)
    a = build(MM, saved, saved)
    b = build(MM, a, a)
    live = _live(build.finish(b, other))
    assert live == {"mm": 20, "mm_1": 20, a.name: 36, b.name: 36, "output": 20}


@pytest.mark.parametrize("are_boxed", [False, True])
def test_tangents_live_as_long_as_autograd_holds_them(monkeypatch, are_boxed):
    """Boxed, a backward takes them out of their list; else autograd holds what it calls a function with."""
    monkeypatch.setattr(model, "gradients_are_boxed", are_boxed)
    build = GraphBuilder()
    tangent = build.input("tangents_1", 4, 4)
    a = build(MM, tangent, tangent)
    b = build(MM, a, a)
    live = _live(build.finish(b))
    held = 0 if are_boxed else 16
    assert live == {"tangents_1": 16, a.name: 32, b.name: 32 + held, "output": 16 + held}


def test_outputs_live_to_the_end():
    build = GraphBuilder()
    x = build.input("primals_1", 4, 4)
    a = build(MM, x, x)
    b = build(MM, x, x)
    assert _live(build.finish(a, b), kept=[x])["output"] == 32


@pytest.mark.parametrize("view", [T, aten.alias.default], ids=str)
def test_a_view_keeps_what_it_looks_at(view):
    build = GraphBuilder()
    x = build.input("primals_1", 4, 4)
    a = build(MM, x, x)
    seen = build(view, a)
    b = build(MM, x, x)
    c = build(MM, seen, b)
    live = _live(build.finish(c), kept=[x])
    assert (live[seen.name], live[b.name], live[c.name], live["output"]) == (16, 32, 48, 16)


def test_items_of_a_tuple_die_one_by_one():
    build = GraphBuilder()
    bucket = build.input("mm", 20)
    pieces = build(UNPACK, bucket, 1, [16, 4])
    first, second = (build(operator.getitem, pieces, index) for index in range(2))
    a = build(PACK, [first], 1)
    b = build(PACK, [a, second], 1)
    live = _live(build.finish(b))
    assert live == {
        "mm": 20,
        pieces.name: 40,
        "getitem": 20,
        "getitem_1": 20,
        a.name: 36,
        b.name: 40,
        "output": 20,
    }


def test_items_of_a_view_share_its_memory():
    build = GraphBuilder()
    x = build.input("primals_1", 4, 4)
    a = build(MM, x, x)
    halves = build(aten.split.Tensor, a, 2)
    half = build(operator.getitem, halves, 1)
    b = build(MM, half, x)
    live = _live(build.finish(b), kept=[x])
    assert (live[half.name], live[b.name], live["output"]) == (16, 24, 8)


def test_an_in_place_op_allocates_nothing():
    build = GraphBuilder()
    x = build.input("primals_1", 4, 4)
    a = build(MM, x, x)
    written = build(aten.copy_.default, a, x)
    live = _live(build.finish(written), kept=[x])
    assert live[written.name] == live["output"] == 16


@pytest.mark.parametrize("op", [aten.index_put.default, aten.scatter_add.default], ids=str)
def test_what_a_scatter_writes_into_is_stored_once(op):
    """An embedding's gradient: zeros, into which rows are added."""
    build = GraphBuilder()
    rows, places = build.input("primals_1", 4, 4), build.input("primals_2", 4, dtype=torch.int64)
    zeros = build(aten.mul.Tensor, build.input("primals_4", 16, 4), 0.0)
    wide = build.input("primals_3", 4, 4, dtype=torch.int64)
    index = ([places], rows, True) if op is aten.index_put.default else (0, wide, rows)
    gradient = build(op, zeros, *index)
    product = build(MM, gradient, rows)
    live = _live(build.finish(product), kept=build.graph.find_nodes(op="placeholder"))
    assert (live[zeros.name], live[gradient.name], live[product.name]) == (0, 64, 128)


def test_what_a_scatter_reads_elsewhere_is_stored():
    build = GraphBuilder()
    places = build.input("primals_1", 4, 4, dtype=torch.int64)
    other = build.input("primals_2", 4, 4)
    zeros = build(aten.mul.Tensor, other, 0.0)
    scattered = build(aten.scatter_add.default, zeros, 0, places, zeros)
    live = _live(build.finish(scattered), kept=[places, other])
    assert live[scattered.name] == 32


def _written_in_place(build: GraphBuilder, op, to: fx.Node, source: fx.Node) -> fx.Node:
    if op is aten.index_put_.default:
        return build(op, to, [build.input("primals_9", 4, dtype=torch.int64)], source)
    return build(op, to, source)


@pytest.mark.parametrize("op", [aten.add_.Tensor, aten.copy_.default, aten.index_put_.default], ids=str)
def test_an_in_place_op_lets_go_of_what_it_only_reads(op):
    build = GraphBuilder()
    x = build.input("primals_1", 4, 4)
    a, b = build(MM, x, x), build(MM, x, x)
    written = _written_in_place(build, op, a, b)
    c = build(MM, x, x)
    d = build(MM, c, written)
    live = _live(build.finish(d), kept=[node for node in build.graph.nodes if node.name.startswith("primals_")])
    assert (live[written.name], live[c.name], live[d.name]) == (32, 32, 48)  # a, b; a, c; a, c, d


def test_what_an_in_place_kernel_reads_is_computed_in_it():
    """Who reads what it has written to does not read that."""
    build = GraphBuilder()
    x = build.input("primals_1", 4, 4)
    a, read = build(MM, x, x), build(aten.relu.default, x)
    c = build(MM, a, x)
    written = build(aten.add_.Tensor, c, read)
    d = build(MM, written, x)
    live = _live(build.finish(d), kept=[x])
    assert (live[c.name], live[written.name], live[d.name]) == (32, 16, 32)  # a, c; c; c, d


def test_an_op_that_writes_to_an_input_may_have_results_of_its_own():
    build = GraphBuilder()
    x, weight, mean, var = (build.input(f"primals_{i}", *shape) for i, shape in enumerate([(8, 4), (4,), (4,), (4,)]))
    normed = build(aten._native_batch_norm_legit.default, x, weight, weight, mean, var, True, 0.1, 1e-5)
    first = build(operator.getitem, normed, 0)
    live = _live(build.finish(first), kept=[x, weight, mean, var])
    assert (live[normed.name], live["output"]) == (32 + 4 + 4, 32)


def _flat(build: GraphBuilder, value: fx.Node) -> fx.Node:
    return build(aten.view.default, build(aten.reshape.default, value, [16]), [4, 4])


@pytest.mark.parametrize(
    ("conditional_view", "num_copied"),
    [
        (lambda build, a: build(aten.contiguous.default, a), 0),
        (lambda build, a: build(aten.contiguous.default, build(T, a)), 16),
        (_flat, 0),
        (lambda build, a: _flat(build, build(T, a)), 16),
        (lambda build, a: build(aten.reshape.default, build(T, a), [4, 2, 2]), 0),
        (lambda build, a: build(aten.to.dtype, a, torch.float64), 0),
        (lambda build, a: build(aten.to.dtype, a, torch.complex128), 32),
    ],
    ids=["contiguous", "contiguous of t", "reshape", "reshape of t", "split of t", "to", "to another dtype"],
)
def test_a_conditional_view_is_a_copy_where_it_must_be(conditional_view, num_copied):
    build = GraphBuilder()
    x = build.input("primals_1", 4, 4)
    a = build(MM, x, x)
    seen = conditional_view(build, a)
    read = build(UNPACK, build(PACK, [seen], 1), 1, [16])  # no generated kernel
    live = _live(build.finish(a, read), kept=[x])
    assert live[seen.name] == 16 + num_copied


@pytest.mark.parametrize("is_viewed", [False, True])
@pytest.mark.parametrize(("num_ranks", "num_copied"), [(2, 0), (8, 32)])
def test_a_gather_holds_input_output_and_copy_until_its_wait(is_viewed, num_ranks, num_copied):
    build = GraphBuilder()
    shard = build.input("primals_1", 4)
    packed = build(PACK, [shard], 1)
    started = build(ALL_GATHER, packed, num_ranks, GROUP)
    a = build(MM, build.input("primals_2", 2, 2), build.input("primals_3", 2, 2))
    full = build(WAIT, build(aten.view.default, started, [num_ranks, 4]) if is_viewed else started)
    b = build(PACK, [full], 1)
    gm = build.finish(a, b)
    live = _live(gm, kept=kept_inputs(gm))
    assert live[packed.name] == 4
    num_full = 4 * num_ranks
    assert live[started.name] == 4 + num_full + num_copied
    assert live[a.name] == live[full.name] == 4 + 4 + num_full + num_copied
    assert live[b.name] == 4 + num_full + num_full


def test_one_that_writes_to_memory_it_is_given_holds_that_and_its_input_until_its_wait():
    build = GraphBuilder()
    x, y = build.input("primals_1", 2, 2), build.input("primals_2", 4, 2)
    part, whole = build(MM, x, x), build(MM, y, x)
    started = build(c10d.all_gather_into_tensor_out.default, part, 2, GROUP, out=whole)
    a = build(MM, x, x)
    full = build(WAIT, started)
    b = build(MM, full, a)
    gm = build.finish(b)
    live = _live(gm, kept=[x, y])
    assert live[whole.name] == 4 + 8
    assert live[started.name] == 4 + 8 + 8  # gloo's copy too
    assert live[a.name] == live[full.name] == 4 + 4 + 8 + 8
    assert live[b.name] == 4 + 8 + 8


@pytest.mark.parametrize("is_own", [True, False])
def test_one_in_place_allocates_nothing_and_holds_its_memory_until_a_wait_for_either(is_own):
    build = GraphBuilder()
    x = build.input("primals_1", 2, 2)
    value = build(MM, x, x)
    started = build(c10d.all_reduce_.default, value, "sum", GROUP)
    a = build(MM, x, x)
    b = build(MM, a, a)
    wait = build(WAIT, started if is_own else value)
    c = build(MM, b, b)
    live = _live(build.finish(c), kept=[x])
    assert [live[node.name] for node in (value, started, a, b, wait, c)] == [4, 4, 8, 12, 8, 8]


def test_items_of_one_in_place_die_one_by_one():
    build = GraphBuilder()
    x = build.input("primals_1", 2, 2)
    values = [build(MM, x, x) for _ in range(2)]
    started = build(c10d.all_reduce_coalesced_.default, values, "sum", GROUP)
    first, second = (build(WAIT, build(operator.getitem, started, index)) for index in range(2))
    a = build(MM, first, x)
    b = build(MM, second, x)
    live = _live(build.finish(a, b), kept=[x])
    assert [live[node.name] for node in (started, first, second, a, b)] == [8, 8, 8, 12, 12]


def test_a_reduction_holds_input_and_clone_until_its_wait():
    build = GraphBuilder()
    grad = build.input("mm", 8)
    started = build(REDUCE_SCATTER, grad, "sum", 2, GROUP)
    reduced = build(WAIT, started)
    a = build(PACK, [reduced], 1)
    assert _live(build.finish(a)) == {
        "mm": 8, started.name: 8 + 8 + 4, reduced.name: 8 + 8 + 4, a.name: 4 + 4, "output": 4,
    }  # fmt: skip


def test_copies_depend_on_the_device():
    graph = fx.Graph()
    source, started = graph.placeholder("x"), None
    source.meta["val"] = torch.empty(4, device="meta")
    started = graph.call_function(ALL_GATHER, (source, 2, GROUP))
    started.meta["val"] = torch.empty(8, device="meta")
    assert copied_bytes(started) == 0
    started.meta["val"] = torch.empty(8)
    assert copied_bytes(started) == 0  # in place, in a group of few ranks
    started.args, started.meta["val"] = (source, 8, GROUP), torch.empty(32)
    assert copied_bytes(started) == 32 * 4


def test_what_a_collective_holds_leaves_out_its_output_and_kept_inputs():
    build = GraphBuilder()
    shard, grad = build.input("primals_1", 4), build.input("mm", 8)
    gather = build(ALL_GATHER, shard, 2, GROUP)
    reduction = build(REDUCE_SCATTER, grad, "sum", 2, GROUP)
    total = build(ALL_REDUCE, grad, "sum", GROUP)
    gm = build.finish(*(build(WAIT, node) for node in (gather, reduction, total)))
    model = MemoryModel(gm, kept=[shard])
    assert model.held_bytes(gather) == 0  # gloo receives into the result
    assert model.held_bytes(reduction) == (8 + 8) * CELL
    assert model.held_bytes(total) == 8 * CELL


def test_a_fused_chain_stores_its_end_only():
    build = GraphBuilder()
    x = build.input("primals_1", 4, 4)
    a = build(MM, x, x)
    chain = a
    for _ in range(3):
        chain = build(aten.mul.Tensor, chain, 2.0)
    b = build(MM, chain, x)
    live = _live(build.finish(b), kept=[x])
    assert live[chain.name] == 16 and live[b.name] == 32  # the chain's end is written over the product


def _over(make, *, source="mm", dtype=torch.float64, donated=True):
    """Most live cells of a graph in which ``make(build, a, x)`` computes what two products read of a 4 x 4 value."""
    build = GraphBuilder()
    x = build.input("primals_1", 4, 4, dtype=dtype)
    if source == "saved":
        a = build.input("mm_0", 4, 4, dtype=dtype)
        a.meta.update({DONATED: True} if donated else {})
    else:
        a = build(MM, x, x)
    result = make(build, a, x)
    flat = build(aten.view.default, result, [4, 4])
    others = [build(MM, flat, x), build(MM, build(T, flat), x)]
    gm = build.finish(*others)
    live = dict(zip(gm.graph.nodes, memory_timeline(gm, kept=[x]).live_bytes, strict=True))
    return live[result] / (16 * x.meta["val"].element_size())


def _cast(build, value, dtype):
    return build(torch.ops.prims.convert_element_type.default, value, dtype)


def _read_elsewhere(build, a, x):
    build(aten.relu.default, build(aten.sum.dim_IntList, a, [0]))
    return build(aten.mul.Tensor, a, x)


def _summed_too(build, a, x):
    result = build(aten.mul.Tensor, a, x)
    build(aten.sum.dim_IntList, result, [0])
    return result


def _behind_a_view(build, a, x):
    return build(aten.mul.Tensor, build(aten.exp.default, build(aten.view.default, a, [4, 4])), x)


def _with_a_view_inside(build, a, x):
    return build(aten.mul.Tensor, build(aten.view.default, build(aten.relu.default, a), [2, 8]), 2.0)


def _inner_value_read_twice(build, a, x):
    inner = build(aten.mul.Tensor, a, x)
    return build(aten.mul.Tensor, inner, build(aten.add.Tensor, inner, x))


@pytest.mark.parametrize("source", ["mm", "saved"])
@pytest.mark.parametrize(
    ("make", "num_values"),
    [
        (lambda build, a, x: build(aten.mul.Tensor, a, x), 1),
        (_behind_a_view, 1),
        (lambda build, a, x: build(aten.mul.Tensor, x, a), 1),
        (lambda build, a, x: _cast(build, build(aten.exp.default, _cast(build, a, torch.float32)), torch.float64), 1),
        (lambda build, a, x: build(aten.mul.Tensor, build(T, a), x), 2),
        (lambda build, a, x: build(aten.mul.Tensor, build(aten.slice.Tensor, a, 0, 0, 1), x), 2),
        (lambda build, a, x: build(aten.clone.default, build(T, a), memory_format=torch.contiguous_format), 2),
        (_with_a_view_inside, 2),
        (lambda build, a, x: _cast(build, a, torch.float32), 1.5),
        (_read_elsewhere, 2.25),
        (_summed_too, 2.25),
        (_inner_value_read_twice, 2),
    ],
    ids=[
        "one op", "a chain behind a view", "second operand", "casts there and back", "transposed", "broadcast",
        "copied", "a view inside", "another size", "another reader", "a generated reader of the result",
        "an inner value with two readers",
    ],
)  # fmt: skip
def test_what_a_generated_kernel_writes_over(make, num_values, source):
    """What dies in the kernel and lies as its result does, where one chain leads from the one to the other."""
    assert _over(make, source=source) == num_values


def test_a_larger_result_is_not_written_over_what_is_broadcast():
    build = GraphBuilder()
    x, z = build.input("primals_1", 4, 4), build.input("primals_2", 2, 4, 4)
    product = build(MM, x, x)
    result = build(aten.mul.Tensor, product, z)
    live = _live(build.finish(build(aten.bmm.default, result, z)), kept=[x, z])
    assert live[result.name] == 16 + 32


def test_saved_values_that_are_not_donated_are_not_written_over():
    assert _over(lambda build, a, x: build(aten.mul.Tensor, a, x), source="saved", donated=False) == 2


def test_a_value_that_several_kernels_recompute_keeps_its_sources():
    build = GraphBuilder()
    x = build.input("primals_1", 4, 4)
    a = build(MM, x, x)
    scaled = build(aten.mul.Tensor, a, 2.0)
    early = build(aten.sum.dim_IntList, scaled, [0])
    b = build(MM, x, x)
    late = build(aten.add.Tensor, scaled, b)
    live = _live(build.finish(early, late), kept=[x])
    assert live[b.name] == 16 + 4 + 16  # the product, a and the sum: no scaled


def test_a_value_that_a_kernel_outside_reads_is_stored():
    build = GraphBuilder()
    x = build.input("primals_1", 4, 4)
    a = build(MM, x, x)
    scaled = build(aten.mul.Tensor, a, 2.0)
    early = build(aten.sum.dim_IntList, scaled, [0])
    b = build(MM, scaled, x)
    live = _live(build.finish(early, b), kept=[x])
    assert live[scaled.name] == live[early.name] == 16 + 16 + 4  # one run: both results at once
    assert live[b.name] == 16 + 4 + 16


def test_a_dear_value_is_stored_when_two_kernels_read_it():
    build = GraphBuilder()
    x = build.input("primals_1", 4, 4)
    a = build(MM, x, x)
    dear = build(aten.exp.default, a)
    first = build(aten.sum.dim_IntList, dear, [0])
    b = build(MM, x, x)
    second = build(aten.add.Tensor, dear, b)
    live = _live(build.finish(first, second), kept=[x])
    assert live[b.name] == 16 + 4 + 16  # a is gone, its exponential is there
    assert live[dear.name] == 16 + 16 + 4


def test_runs_go_through_views_and_starts_and_end_at_other_nodes():
    build = GraphBuilder()
    x = build.input("primals_1", 4, 4)
    a = build(aten.relu.default, x)
    started = build(ALL_GATHER, x, 2, GROUP)
    b = build(aten.relu.default, build(T, a))
    c = build(MM, b, x)
    d = build(aten.relu.default, c)
    full = build(WAIT, started)
    e = build(aten.relu.default, d)
    gm = build.finish(e, full)
    order = list(gm.graph.nodes)
    first, last = fusion_runs(order)
    runs = {node: (order[first[i]], order[last[i]]) for i, node in enumerate(order)}
    assert runs[a] == runs[b] == (a, b)
    assert runs[started] == (started, started) and runs[c] == (c, c)
    assert runs[d] == (d, d) and runs[e] == (e, e)


def test_another_order_of_the_same_graph():
    build = GraphBuilder()
    x = build.input("primals_1", 4, 4)
    a, b = build(MM, x, x), build(MM, x, x)
    c = build(aten.mm.default, b, x)
    gm = build.finish(a, c)
    nodes = list(gm.graph.nodes)
    assert memory_timeline(gm, kept=[x]).peak_bytes == 3 * 16 * CELL
    late = [nodes[0], nodes[2], nodes[3], nodes[1], nodes[4]]
    assert memory_timeline(gm, kept=[x], order=late).peak_bytes == 2 * 16 * CELL


def test_symbolic_sizes_count_with_their_hints():
    graph = fx.Graph()
    x = graph.placeholder("x")
    env = ShapeEnv()
    size = env.create_symintnode(env.create_symbol(12, torch._dynamo.source.ConstantSource("s")), hint=12)
    with torch._subclasses.FakeTensorMode(shape_env=env):
        x.meta["val"] = torch.empty((size, 2))
    y = graph.call_function(aten.relu.default, (x,))
    y.meta["val"] = x.meta["val"]
    graph.output([y])
    gm = fx.GraphModule(torch.nn.Module(), graph)
    assert memory_timeline(gm, kept=[]).peak_bytes == 2 * 12 * 2 * 4


def test_an_expanded_input_weighs_what_is_stored():
    build = GraphBuilder()
    kept, tangent = build.input("primals_1", 1, 4), build.input("tangents_1", 1, 4)
    for node in (kept, tangent):
        node.meta["val"] = node.meta["val"].expand(4, 4)
    product = build(MM, tangent, kept)
    gm = build.finish(product)
    assert _live(gm, kept=[kept])[product.name] == 4 + 16
    assert memory_timeline(gm, kept=[kept]).kept_bytes == 4 * CELL


def test_tensors_of_the_module_are_kept():
    """As parameters are that ``make_fx`` meets in what it traces."""
    weight = torch.nn.Parameter(torch.zeros(4, 4, dtype=torch.float64))
    gm = make_fx(lambda x: x @ weight @ weight)(torch.zeros(4, 4, dtype=torch.float64))
    assert gm.graph.find_nodes(op="get_attr")
    timeline = memory_timeline(gm, kept=kept_inputs(gm))
    assert (timeline.kept_bytes, timeline.peak_bytes) == (2 * 16 * CELL, 2 * 16 * CELL)


def test_which_inputs_the_caller_keeps():
    build = GraphBuilder()
    shard, saved = build.input("primals_1", 2), build.input("mm", 2)
    forward = build.finish(saved)
    assert kept_inputs(forward) == [shard, saved]
    build = GraphBuilder()
    shard, saved, tangent = (build.input(name, 2) for name in ("primals_1", "mm", "tangents_1"))
    assert kept_inputs(build.finish(tangent)) == [shard]


def test_the_peak_in_words():
    build = GraphBuilder()
    x = build.input("primals_1", 4, 4)
    bucket = build(PACK, [x], 1)
    started = build(ALL_GATHER, bucket, 8, GROUP)
    gm = build.finish(build(WAIT, started))
    timeline = memory_timeline(gm, kept=[x])
    assert timeline.peak_node is started
    assert timeline.text(node_names(gm)) == (
        "peak 2176 bytes at %all_gather_into_tensor_0, where these are live:\n"
        "          1024  %all_gather_into_tensor_0\n"
        "          1024  %all_gather_into_tensor_0 (copy)\n"
        "           128  %pack_0\n"
        "beside 128 bytes of inputs that the caller keeps\n"
        "live while each node runs:\n"
        "             0  %primals_1\n"
        "           128  %pack_0\n"
        "          2176  %all_gather_into_tensor_0\n"
        "          2176  %wait_tensor_0\n"
        "          1024  output\n"
    )
