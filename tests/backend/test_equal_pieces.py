"""Halves in pieces: where they are cut, which pieces are equal, and what runs them (``share_code``)."""

import operator
import weakref
from types import SimpleNamespace

import pytest
import torch
from support.small_graphs import GROUP, GraphBuilder, aten
from support.torch_versions import NEEDS_REDUCTION
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch._inductor import inductor_prims
from torch._inductor.utils import get_donated_idxs
from torch.nn import functional as F

import graphshard
from graphshard._compat import RNG_WRAPPERS, run_and_save_rng_state, run_with_rng_state
from graphshard.backend import compilation
from graphshard.backend.inductor import (
    compile_in_pieces,
    compile_pieces,
    cut_in_pieces,
    num_compiled_ops,
    unwrap_undrawn,
)
from graphshard.errors import ScheduleOrderError
from graphshard.ir import REDUCE_SCATTER, WAIT


def _block(build: GraphBuilder, x: fx.Node, weight: fx.Node) -> fx.Node:
    """relu(x @ weight.T) + x"""
    return build(
        aten.add.Tensor, build(aten.relu.default, build(aten.mm.default, x, build(aten.t.default, weight))), x
    )


def _stack(num_blocks: int) -> fx.GraphModule:
    build = GraphBuilder()
    x, *weights = (build.input(f"primals_{index}", 4, 4) for index in range(num_blocks + 1))
    for weight in weights:
        x = _block(build, x, weight)
    return build.finish(build(aten.neg.default, x))


def _interpreted(monkeypatch) -> list[fx.GraphModule]:
    """Has pieces run node by node; returns the graphs that were compiled."""
    compiled: list[fx.GraphModule] = []

    def compile_piece(gm: fx.GraphModule, example_inputs, **arguments):
        compiled.append(gm)
        return lambda inputs: fx.Interpreter(gm).boxed_run(inputs)

    monkeypatch.setattr(compile_pieces, "compile_fx_inner", compile_piece)
    return compiled


def _run_in_pieces(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    pieces = cut_in_pieces(gm)
    assert pieces is not None
    row, compiled = compile_in_pieces(gm, pieces, {})
    run = row.runner([code for _, code in compiled])
    return list(run(list(inputs)))


# --- Where halves are cut.


def test_equal_blocks_are_equal_pieces():
    pieces = cut_in_pieces(_stack(5))
    assert [[node.name for node in piece.nodes] for piece in pieces[:2]] == [
        ["t_default", "mm_default", "relu_default", "add_tensor"],
        ["t_default_1", "mm_default_1", "relu_default_1", "add_tensor_1"],
    ]
    # The last one has the op behind the blocks.
    assert len(pieces) == 5 and len({piece.key for piece in pieces}) == 2
    assert sum(len(piece.nodes) for piece in pieces) == 21 and num_compiled_ops(pieces) == 4 + 5


def test_pieces_that_only_follow_one_another_are_joined():
    """A block of two products is one piece, not two."""
    build = GraphBuilder()
    x, *weights = (build.input(f"primals_{index}", 4, 4) for index in range(7))
    for first, second in zip(weights[::2], weights[1::2], strict=True):
        x = build(aten.mm.default, build(aten.relu.default, build(aten.mm.default, x, first)), second)
    pieces = cut_in_pieces(build.finish(x))
    assert [len(piece.nodes) for piece in pieces] == [3, 3, 3]


def test_blocks_with_other_layouts_are_other_pieces():
    build = GraphBuilder()
    x, *weights = (build.input(f"primals_{index}", 4, 4) for index in range(5))
    for weight in weights[2:]:
        weight.meta["val"] = weight.meta["val"].t()
    for weight in weights:
        x = build(aten.mm.default, x, weight)
    first, second, third, fourth = (piece.key for piece in cut_in_pieces(build.finish(x)))
    assert first == second != third == fourth


def test_every_op_is_in_one_piece_and_views_are_made_where_they_are_read():
    build = GraphBuilder()
    x = build.input("primals_1", 4, 4)
    turned = value = build(aten.t.default, build(aten.relu.default, x))
    for _ in range(3):
        value = build(aten.mm.default, value, turned)
    gm = build.finish(value, turned)
    pieces = cut_in_pieces(gm)
    names = [node.name for piece in pieces for node in piece.nodes]
    assert names.count("relu_default") == names.count("mm_default_1") == 1 and names.count("t_default") > 1
    # The view is a result of the half, made behind its value, and made again for the products.
    outputs = [[node.name for node in piece.outputs] for piece in pieces]
    assert outputs[0][:2] == ["relu_default", "t_default"] and outputs[-1] == ["mm_default_2"]


def _with_convolution(build):
    x = build.input("primals_1", 1, 2, 8, 8)
    weight = build.input("primals_2", 2, 2, 3, 3)
    return build(aten.convolution.default, x, weight, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)


def _with_in_place_op(build):
    return build(aten.relu_.default, build(aten.neg.default, build.input("primals_1", 4)))


def _with_foreign_function(build):
    node = build.graph.call_function(torch.relu, (build.input("primals_1", 4),))
    node.meta["val"] = node.args[0].meta["val"]
    return node


def _with_a_number(build):
    number = build.graph.placeholder("primals_1")
    number.meta["val"] = 3
    return build(aten.add.Tensor, build.input("primals_2", 4), number)


def _attention(build: GraphBuilder, x: fx.Node) -> fx.Node:
    """Stands for an op of attention, whose results are tensors, numbers and nothing."""
    node = build.graph.call_function(aten.aminmax.default, (x,))
    node.meta["val"] = (x.meta["val"], 3, None)
    return node


def _with_an_item_that_is_a_number(build):
    node = _attention(build, build.input("primals_1", 4, 4))
    build.graph.call_function(operator.getitem, (node, 1)).meta["val"] = 3
    return build(operator.getitem, node, 0)


def test_numbers_among_the_results_of_an_op_do_not_matter():
    build = GraphBuilder()
    value = build(operator.getitem, _attention(build, build.input("primals_1", 4, 4)), 0)
    assert cut_in_pieces(build.finish(value)) is not None


@pytest.mark.parametrize(
    "make",
    [
        _with_convolution,
        _with_in_place_op,
        _with_foreign_function,
        _with_a_number,
        _with_an_item_that_is_a_number,
    ],
)
def test_some_halves_are_not_cut(make):
    build = GraphBuilder()
    assert cut_in_pieces(build.finish(make(build))) is None


def test_messages_between_two_ranks_are_not_cut():
    build = GraphBuilder()
    x = build.input("primals_1", 4)
    node = build.graph.call_function(
        getattr(torch.ops._c10d_functional, "isend", aten.relu_).default, (x, 1, 0, GROUP)
    )
    node.meta["val"] = x.meta["val"]
    assert cut_in_pieces(build.finish(node)) is None


# --- What runs them.


def test_values_are_those_of_the_half_and_equal_pieces_are_compiled_once(monkeypatch):
    compiled = _interpreted(monkeypatch)
    gm = _stack(5)
    inputs = [torch.randn(4, 4, dtype=torch.float64) for _ in range(6)]
    (expected,) = gm(*inputs)
    (got,) = _run_in_pieces(gm, inputs)
    torch.testing.assert_close(got, expected, rtol=0, atol=0)
    assert len(compiled) == 2


def test_results_may_be_inputs_views_constants_and_nothing(monkeypatch):
    _interpreted(monkeypatch)
    build = GraphBuilder()
    x, weight = build.input("primals_1", 4, 4), build.input("primals_2", 4, 4)
    value = build(aten.mm.default, x, weight)
    gm = build.finish(x, build(aten.t.default, weight), None, value, build(aten.t.default, value), value)
    given = [torch.randn(4, 4, dtype=torch.float64) for _ in range(2)]
    got = _run_in_pieces(gm, given)
    assert got[0] is given[0] and got[2] is None and got[3] is got[5]
    torch.testing.assert_close(got[1], given[1].t())
    torch.testing.assert_close(got[4], (given[0] @ given[1]).t())
    assert got[4].untyped_storage().data_ptr() == got[3].untyped_storage().data_ptr()


def test_nothing_is_held_longer_than_it_is_read(monkeypatch):
    """Inputs are gone once the last piece that reads them has started, and so are values between pieces."""
    alive: list[int] = []
    references: list[weakref.ref] = []

    def compile_piece(gm: fx.GraphModule, example_inputs, **arguments):
        def run(inputs):
            references.extend(map(weakref.ref, inputs))
            results = fx.Interpreter(gm).boxed_run(inputs)
            alive.append(sum(reference() is not None for reference in references))
            return results

        return run

    monkeypatch.setattr(compile_pieces, "compile_fx_inner", compile_piece)
    gm = _stack(4)
    pieces = cut_in_pieces(gm)
    row, compiled = compile_in_pieces(gm, pieces, {})
    run = row.runner([code for _, code in compiled])
    run([torch.randn(4, 4, dtype=torch.float64) for _ in range(5)])
    assert alive == [0, 0, 0, 0]


def _in_flight() -> fx.GraphModule:
    """A bucket is reduced while a product runs; the product behind the wait reads the sum."""
    build = GraphBuilder()
    x, value, weight = (build.input(f"primals_{index}", rows, 4) for index, rows in enumerate((4, 4, 2)))
    bucket = build(aten.neg.default, build(aten.mm.default, x, x))
    started = build(REDUCE_SCATTER, bucket, "sum", 2, GROUP)
    for _ in range(3):  # equal pieces, so those around them stay apart
        value = build(aten.mm.default, value, x)
    summed = build(WAIT, started)
    return build.finish(build(aten.add.Tensor, summed, weight), value)


def test_what_a_collective_in_flight_reads_leaves_its_piece():
    """Else Inductor could write over it in the same piece."""
    pieces = cut_in_pieces(_in_flight())
    started = next(piece for piece in pieces if any(node.target is REDUCE_SCATTER for node in piece.nodes))
    assert "neg_default" in {node.name for node in started.outputs}


def test_what_a_collective_in_flight_reads_is_held_until_its_wait(monkeypatch):
    bucket: list[weakref.ref] = []
    is_held: list[bool] = []

    def compile_piece(gm: fx.GraphModule, example_inputs, **arguments):
        outputs = gm.graph.output_node().args[0]
        targets = [node.target for node in outputs]

        def run(inputs):
            is_held.extend(reference() is not None for reference in bucket)
            inputs.clear()
            results = [torch.zeros(node.meta["val"].shape, dtype=torch.float64) for node in outputs]
            if aten.neg.default in targets:
                bucket.append(weakref.ref(results[targets.index(aten.neg.default)]))
            return results

        return run

    monkeypatch.setattr(compile_pieces, "compile_fx_inner", compile_piece)
    gm = _in_flight()
    pieces = cut_in_pieces(gm)
    assert len(pieces) > 2
    row, compiled = compile_in_pieces(gm, pieces, {})
    run = row.runner([code for _, code in compiled])
    results = run([torch.zeros(rows, 4, dtype=torch.float64) for rows in (4, 4, 2)])
    # In the pieces between the start and the wait, and not in that of the wait, which drops it as it starts.
    assert len(results) == 2 and is_held == [True] * (len(pieces) - 2) + [False] and bucket[0]() is None


def test_seeds_are_inputs_of_pieces(monkeypatch):
    """Each block draws with a seed of its own, from one vector: its piece is equal to those of other blocks."""
    compiled = _interpreted(monkeypatch)
    build = GraphBuilder()
    x, weight = build.input("primals_1", 4, 4), build.input("primals_2", 4, 4)
    seeds = build.input("primals_3", 3, dtype=torch.int64)
    for index in range(3):
        seed = build(inductor_prims.lookup_seed, seeds, index)
        x = build(aten.mul.Tensor, build(aten.mm.default, x, weight), seed)
    gm = build.finish(x)
    inputs = [
        torch.randn(4, 4, dtype=torch.float64),
        torch.randn(4, 4, dtype=torch.float64),
        torch.tensor([2, 3, 5]),
    ]
    (got,) = _run_in_pieces(gm, inputs)
    torch.testing.assert_close(got, 30 * inputs[0] @ inputs[1] @ inputs[1] @ inputs[1])
    assert len(compiled) == 1


# --- Through the backend and Inductor.


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.dropout(torch.relu(self.linear(x)), 0.25)


def _gradients(mesh, num_blocks: int, **options) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(num_blocks)))
    for block in model:
        graphshard.fully_shard(block, mesh=mesh)
    graphshard.fully_shard(model, mesh=mesh)
    torch._dynamo.reset()
    compiled = torch.compile(
        model, backend="graphshard", options={"hardware": None, **options}, fullgraph=True
    )
    torch.manual_seed(1)
    compiled(torch.linspace(-1, 1, 24).view(3, 8)).square().sum().backward()
    return [parameter.grad.to_local().clone() for parameter in model.parameters()]


def _cuts(monkeypatch) -> list[int]:
    """The number of pieces of each half that is compiled in pieces."""
    found: list[int] = []
    real = compilation.compile_in_pieces

    def spy(gm, pieces, arguments):
        found.append(len(pieces))
        return real(gm, pieces, arguments)

    monkeypatch.setattr(compilation, "compile_in_pieces", spy)
    return found


@NEEDS_REDUCTION
def test_gradients_are_those_of_the_whole_half(fake_group, monkeypatch):
    """With dropout, bit for bit: pieces draw the same numbers."""
    cuts = _cuts(monkeypatch)
    donated: list[object] = []
    real = compile_pieces.compile_fx_inner

    def compile_piece(*args, **arguments):
        donated.append(get_donated_idxs())
        return real(*args, **arguments)

    monkeypatch.setattr(compile_pieces, "compile_fx_inner", compile_piece)
    mesh = fake_group(2)
    whole = _gradients(mesh, 6, share_code=False)
    assert not cuts
    in_pieces = _gradients(mesh, 6, share_code="always")
    assert len(cuts) == 2 and all(number > 2 for number in cuts)
    assert all(map(torch.equal, whole, in_pieces))
    # What AOTAutograd donates are positions of inputs of the whole half.
    assert len(donated) < sum(cuts) and not any(donated)


@pytest.mark.usefixtures("interpreted")
def test_by_default_deep_models_are_cut_and_shallow_ones_are_not(fake_group, monkeypatch):
    cuts = _cuts(monkeypatch)
    mesh = fake_group(2)
    _gradients(mesh, 2)
    assert not cuts
    _gradients(mesh, 10)
    assert len(cuts) == 2


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    "options",
    [
        {"memory_budget": "1GiB", "hardware": "cpu-loopback"},
        {"inductor": {"allow_buffer_reuse": True}},
        {"inductor": {"triton.cudagraphs": True}},
    ],
    ids=["budget", "reuse", "cudagraphs"],
)
def test_halves_stay_whole(fake_group, monkeypatch, options):
    cuts = _cuts(monkeypatch)
    _gradients(fake_group(2), 2, share_code="always", **options)
    assert not cuts


def test_the_order_in_each_piece_is_checked(fake_group, monkeypatch):
    def compile_piece(gm, example_inputs, **arguments):
        code = SimpleNamespace(source_code="")
        code.__call__ = fx.Interpreter(gm).boxed_run
        return code

    monkeypatch.setattr(compile_pieces, "compile_fx_inner", compile_piece)
    with pytest.raises(BackendCompilerFailed, match="left the planned order") as found:
        _gradients(fake_group(2), 2, share_code="always", verify="full")
    assert ScheduleOrderError.__name__ in str(found.value)


# --- Attention of checkpointed blocks.


def _wrapped_attention(build: GraphBuilder, dropout: float, wrapper) -> tuple[fx.Node, ...]:
    """Attention with a saved state of the random generator; the state and the result, or the result alone."""
    query = build.input("primals_1", 1, 2, 4, 8, dtype=torch.float32)
    op = aten._scaled_dot_product_flash_attention_for_cpu.default
    call = (op, query, query, query, dropout)
    item = build.graph.call_function
    plain = build(*call)
    both = plain.meta["val"]
    build.graph.erase_node(plain)
    if wrapper is run_and_save_rng_state:
        node = item(wrapper, call)
        state, values = item(operator.getitem, (node, 0)), item(operator.getitem, (node, 1))
        state.meta["val"] = torch.empty(16, dtype=torch.uint8)
    elif wrapper is run_with_rng_state:
        state, values = build.input("rng_state", 16, dtype=torch.uint8), None
        values = item(wrapper, (state, *call))
    else:
        state = build.input("generator", 1)
        values = item(wrapper, call, {"rng_state": state})
    values.meta["val"] = both
    result = item(operator.getitem, (values, 0))
    result.meta["val"] = both[0]
    return (state, result) if wrapper is run_and_save_rng_state else (result,)


@pytest.mark.parametrize("wrapper", RNG_WRAPPERS)
def test_attention_without_dropout_is_unwrapped(wrapper):
    """Then checkpointed blocks are cut like others, and no state of the generator is saved."""
    build = GraphBuilder()
    gm = build.finish(*_wrapped_attention(build, 0.0, wrapper))
    assert cut_in_pieces(gm) is None
    unwrap_undrawn(gm)
    targets = [node.target for node in gm.graph.nodes if node.op == "call_function"]
    assert wrapper not in targets and aten._scaled_dot_product_flash_attention_for_cpu.default in targets
    assert cut_in_pieces(gm) is not None
    before = str(gm.graph)
    unwrap_undrawn(gm)
    assert str(gm.graph) == before
    if wrapper is run_and_save_rng_state:
        query = torch.randn(1, 2, 4, 8)
        state, result = gm(query)
        assert state.dtype == torch.uint8 and state.numel() == 0
        torch.testing.assert_close(result, F.scaled_dot_product_attention(query, query, query))


@pytest.mark.parametrize("wrapper", RNG_WRAPPERS)
def test_attention_with_dropout_stays_wrapped(wrapper):
    build = GraphBuilder()
    gm = build.finish(*_wrapped_attention(build, 0.5, wrapper))
    unwrap_undrawn(gm)
    assert wrapper in [node.target for node in gm.graph.nodes] and cut_in_pieces(gm) is None
