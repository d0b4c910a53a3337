"""Graph text: equal on every rank, and everything that changes behaviour prints."""

import re

import pytest
import torch
from support.small_graphs import GROUP, GraphBuilder, ParameterSpec, aten, one_axis, parameter_graph, text_of
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from graphshard.ir.collectives import ALL_REDUCE, REDUCE_SCATTER, WAIT, c10d, is_collective
from graphshard.ir.graph_text import (
    collective_sequence,
    dtype_text,
    graph_text,
    group_labels,
    text_fingerprint,
    value_text,
)
from graphshard.ir.mesh import MeshAxis, MeshLayout


def _line(gm, op):
    return next(line for line in graph_text(gm).splitlines() if f"= {op}(" in line)


@pytest.mark.parametrize("name", ["two_linears", "tied_embedding"])
@pytest.mark.parametrize("stage", ["captured", "joint", "forward", "backward"])
def test_the_same_text_on_every_rank(captured, name, stage):
    """5 rows over 4 ranks: the unpadded shards have two, two, one and no rows."""
    texts = set()
    for rank in range(4):
        graphs = captured(name, 4, rank)
        texts.add(text_of(getattr(graphs, stage), graphs.context))
    assert len(texts) == 1


def test_group_names_do_not_appear():
    gm, ctx = parameter_graph([ParameterSpec((5, 2))], 2)
    build = GraphBuilder()
    lowered = build.finish(build.gather(build.input("primals_1", 2), 2))
    assert GROUP not in text_of(gm, ctx) and "'shard'" in text_of(gm, ctx)
    assert graph_text(lowered, mesh=one_axis(2)).count("axis=shard") == 1
    assert GROUP not in graph_text(lowered)


def test_the_text_does_not_depend_on_group_names(captured):
    graphs = captured("two_linears", 2)
    before = text_of(graphs.forward, graphs.context)
    for node in filter(is_collective, graphs.forward.graph.nodes):
        node.args = (*node.args[:2], "a_name_of_another_run")
    layout = MeshLayout(axes=(MeshAxis(label="shard", size=2, group_name="a_name_of_another_run"),))
    assert graph_text(graphs.forward, mesh=layout, parameters=graphs.context.parameters) == before


def _functional_collectives():
    """Ops of the namespace with a group."""
    schemas = [
        schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("_c10d_functional::")
    ]
    names = [
        schema.name.removeprefix("_c10d_functional::")
        for schema in schemas
        if any(argument.name == "group_name" for argument in schema.arguments)
    ]
    return sorted(names)


def test_the_namespace_is_found():
    assert {"all_gather_into_tensor", "all_reduce"} <= set(_functional_collectives())


#: Ranks issue different ones by design, so they are no collectives.
POINT_TO_POINT = {"isend", "irecv", "batch_p2p_ops"}


@pytest.mark.parametrize("name", [name for name in _functional_collectives() if name not in POINT_TO_POINT])
def test_every_functional_collective_is_known(name):
    """An unknown one would print its raw group name, and no pass would see it."""
    op = getattr(c10d, name).default
    node = fx.Graph().call_function(op, ())
    assert is_collective(node)


def test_foreign_groups_are_numbered_by_first_use():
    build = GraphBuilder()
    value = build.input("primals_1", 2)
    for group in ("z_group", GROUP, "a_group", "z_group"):
        value = build(WAIT, build(ALL_REDUCE, value, "sum", group))
    gm = build.finish(value)
    axes = re.findall(r"axis=(\w+)", graph_text(gm, mesh=one_axis(2)))
    assert axes == ["group0", "shard", "group1", "group0"]
    assert group_labels(gm, one_axis(2)) == {GROUP: "shard", "z_group": "group0", "a_group": "group1"}


def test_devices_print_without_an_index():
    gm = make_fx(lambda x: torch.zeros(2, device=x.device) + x)(torch.ones(2))
    for node in gm.graph.nodes:
        if node.target is aten.zeros.default:
            node.kwargs = {**node.kwargs, "device": torch.device("cuda", 3)}
    assert "device=cuda" in graph_text(gm) and "cuda:3" not in graph_text(gm)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.empty(2, 3), "f32[2, 3]"),
        (torch.empty(()), "f32[]"),
        (torch.empty(2, 3).t(), "f32[3, 2]@(1,3)"),
        (torch.empty(2, 6, dtype=torch.bfloat16)[:, :3], "bf16[2, 3]@(6,1)"),
        ([torch.empty(1), None], "(f32[1], none)"),
        (None, "none"),
        (3, "int"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_values(value, text):
    assert value_text(value) == text


@pytest.mark.parametrize(
    ("dtype", "text"),
    [
        (torch.float32, "f32"),
        (torch.float64, "f64"),
        (torch.bfloat16, "bf16"),
        (torch.int64, "i64"),
        (torch.uint8, "u8"),
        (torch.complex64, "c64"),
        (torch.bool, "bool"),
        (torch.float8_e4m3fn, "f8_e4m3fn"),
    ],
    ids=str,
)
def test_dtypes(dtype, text):
    assert dtype_text(dtype) == text


def _two_matrices(target, *args, **kwargs):
    build = GraphBuilder()
    x, y = build.input("primals_1", 2, 3), build.input("primals_2", 2, 3)
    return build.finish(
        build(target, *(x if arg == "x" else y if arg == "y" else arg for arg in args), **kwargs)
    )


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ((aten.add.Tensor, "x", "y"), (aten.add.Tensor, "y", "x")),
        ((aten.sum.dim_IntList, "x", [0]), (aten.sum.dim_IntList, "x", [1])),
        ((aten.sum.dim_IntList, "x", [0]), (aten.sum.dim_IntList, "x", [0], True)),
        ((aten.mul.Scalar, "x", 2), (aten.mul.Scalar, "x", 2.0)),
        ((aten.add.Tensor, "x", 1.0), (aten.add.Scalar, "x", 1.0)),
    ],
    ids=["operands", "dims", "optional argument", "number type", "overload"],
)
def test_arguments_print(one, other):
    assert graph_text(_two_matrices(*one)) != graph_text(_two_matrices(*other))


def test_keyword_arguments_print():
    plain = _two_matrices(aten.add.Tensor, "x", "y")
    scaled = _two_matrices(aten.add.Tensor, "x", "y", alpha=2)
    assert _line(plain, "add").endswith("add(%primals_1, %primals_2)")
    assert _line(scaled, "add").endswith("add(%primals_1, %primals_2, alpha=2)")


def test_dtypes_and_formats_print():
    gm = _two_matrices(
        aten._to_copy.default, "x", dtype=torch.bfloat16, memory_format=torch.contiguous_format
    )
    assert _line(gm, "_to_copy").endswith("(%primals_1, dtype=bf16, memory_format=torch.contiguous_format)")


@pytest.mark.parametrize("reduce_op", ["sum", "avg"])
def test_collectives_print_their_reduction_and_axis(reduce_op):
    build = GraphBuilder()
    gm = build.finish(build(WAIT, build(ALL_REDUCE, build.input("primals_1", 2), reduce_op, GROUP)))
    expected = f"all_reduce(%primals_1, '{reduce_op}', axis=shard)"
    assert graph_text(gm, mesh=one_axis(2)).splitlines()[1].endswith(expected)


def test_arguments_given_by_name_print_as_those_given_by_position():
    build = GraphBuilder()
    x = build.input("primals_1", 4)
    given = build(REDUCE_SCATTER, x, "sum", 2, GROUP)
    named = build(REDUCE_SCATTER, group_name=GROUP, group_size=2, reduce_op="sum", input=x)
    text = graph_text(build.finish(build(WAIT, given), build(WAIT, named)), mesh=one_axis(2))
    for name in ("%reduce_scatter_tensor_0", "%reduce_scatter_tensor_1"):
        assert f"{name}: f64[2] = reduce_scatter_tensor(%primals_1, 'sum', 2, axis=shard)" in text


def test_what_a_collective_writes_to_prints():
    build = GraphBuilder()
    x, out = build.input("primals_1", 2), build.input("primals_2", 4)
    gm = build.finish(build(WAIT, build(c10d.all_gather_into_tensor_out.default, x, 2, GROUP, out=out)))
    text = graph_text(gm, mesh=one_axis(2))
    assert "all_gather_into_tensor_out(%primals_1, 2, out=%primals_2, axis=shard)" in text
    assert collective_sequence(gm, one_axis(2)) == ["all_gather_into_tensor_out(f64[2]) over shard"]


@pytest.mark.parametrize(
    ("policy", "suffix"),
    [(CheckpointPolicy.MUST_RECOMPUTE, "  !recompute"), (CheckpointPolicy.MUST_SAVE, "  !save"), (None, ")")],
    ids=["recompute", "save", "none"],
)
def test_recompute_tags_print(policy, suffix):
    gm = _two_matrices(aten.relu.default, "x")
    node = gm.graph.find_nodes(op="call_function", target=aten.relu.default)[0]
    if policy is not None:
        node.meta["recompute"] = policy
    assert _line(gm, "relu").endswith(suffix)


def test_parameters_print_name_placement_and_unit():
    gm, ctx = parameter_graph([ParameterSpec((5, 3), dim=1, unit="blocks.0")], 2)
    assert text_of(gm, ctx).splitlines()[0] == (
        "%primals_0: f64[5, 2] = shard p0 Shard(1) of [5, 3] over shard=2, unit blocks.0"
    )


def test_values_are_numbered_by_op_not_by_node_name():
    """Node names depend on the history of a graph; text does not."""
    texts = []
    for dead in (0, 3):
        build = GraphBuilder()
        x = build.input("primals_1", 2)
        for _ in range(dead):
            build.graph.erase_node(build(aten.relu.default, x))
        texts.append(graph_text(build.finish(build(aten.relu.default, build(aten.relu.default, x)))))
    assert texts[0] == texts[1]
    assert "%relu_1: f64[2] = relu(%relu_0)" in texts[0]


def test_no_two_values_share_a_name():
    """A saved value keeps the name of its op, which another op of the backward may count up to."""
    build = GraphBuilder()
    saved = [build.input(name, 3) for name in ("relu_1", "argsort_1", "primals_1")]
    outputs = [build(aten.argsort.default, saved[0]) for _ in range(3)]
    outputs += [build(aten.relu.default, value) for value in saved]
    names = [line.split(":")[0] for line in graph_text(build.finish(*outputs)).splitlines()[:-1]]
    assert len(names) == len(set(names))


def test_submodules_print_indented():
    build = GraphBuilder()
    inner = build.finish(build(aten.relu.default, build.input("arg0_1", 2)))
    outer = GraphBuilder()
    x = outer.input("primals_1", 2)
    root = torch.nn.Module()
    root.add_module("body", inner)
    body = outer.graph.get_attr("body")
    node = outer.graph.call_function(torch.ops.higher_order.cond, (x, body, body, [x]))
    outer.graph.output([node])
    text = graph_text(fx.GraphModule(root, outer.graph))
    assert "\n    %relu_0: f64[2] = relu(%arg0_1)\n" in text


def test_sequence_lists_collectives_in_order_of_issue():
    build = GraphBuilder()
    x = build.input("primals_1", 2, 3)
    gathered = build.gather(x, 2)
    gm = build.finish(build.reduction(gathered, 2), build(WAIT, build(ALL_REDUCE, x, "max", "other")))
    assert collective_sequence(gm, one_axis(2)) == [
        "all_gather_into_tensor(f64[2, 3]) over shard",
        "reduce_scatter_tensor(f64[4, 3], sum) over shard",
        "all_reduce(f64[2, 3], max) over group0",
    ]


def test_sequence_tells_the_source_of_a_broadcast():
    def sequence(source):
        build = GraphBuilder()
        x = build.input("primals_1", 2)
        return collective_sequence(build.finish(build(WAIT, build(c10d.broadcast.default, x, source, GROUP))))

    assert sequence(0) != sequence(1)


def test_symbolic_sizes_print():
    gm = make_fx(lambda x: x * 2, tracing_mode="symbolic")(torch.ones(3, 4))
    assert "%x_1: f32[s" in graph_text(gm).replace("%saved.", "%")
    assert "@" not in graph_text(gm)


def test_fingerprints_differ_with_the_text():
    assert text_fingerprint("a") == text_fingerprint("a") != text_fingerprint("b")
    assert len(text_fingerprint("a")) == 64
