"""move_reshards: pointwise ops run on pieces where the ranks then send fewer bytes."""

import pytest
import torch
from support.small_graphs import GraphBuilder, aten, reshard, run_pass, run_twice, tensor_axis, text_of
from torch.utils.checkpoint import CheckpointPolicy

from graphshard.ir import REDUCE_SCATTER, RESHARD, WAIT, ReshardCall, bytes_sent, copy_graph, local_shape
from graphshard.passes import MoveReshards
from graphshard.pipeline import PassContext
from graphshard.testing import run_on_all_ranks

CONTEXT = PassContext(mesh=tensor_axis(2))

#: Decides by bytes alone: the graphs here are small.
BY_BYTES = MoveReshards(collective_bytes=0)


class Program:
    """A graph of one rank; inputs are of a whole shape and a placement."""

    def __init__(self, num_ranks=2, rank=0):
        self.build, self.num_ranks, self.rank, self.given = GraphBuilder(), num_ranks, rank, []

    def input(self, placement, *shape, dtype=torch.float64):
        self.given.append((placement, shape, dtype))
        piece = local_shape(shape, placement, self.num_ranks, self.rank)
        return self.build.input(f"primals_{len(self.given)}", *piece, dtype=dtype)

    def move(self, node, src, dst, shape=None):
        shape = shape or list(node.meta["val"].shape)
        return reshard(self.build, node, src, dst, shape, self.num_ranks, self.rank, placed=True)

    def moved(self, src, dst, *shape):
        return self.move(self.input(src, *shape), src, dst, shape)

    def __call__(self, target, *args, **kwargs):
        return self.build(target, *args, **kwargs)


def _to_a_reduce_scatter(program, rows=4):
    """The result of a sum is multiplied and then cut; two readers."""
    total = program.moved("Partial(sum)", "Replicate", rows, 6)
    scaled = program(aten.mul.Tensor, total, program.input("Replicate", 6))
    first = program(aten.relu.default, program.move(scaled, "Replicate", "Shard(0)"))
    return first, program.move(program(aten.neg.default, scaled), "Replicate", "Shard(0)")


def _residuals(program):
    """A chain of sums; each is read by a norm that is cut, and by the next."""
    total = program.moved("Partial(sum)", "Replicate", 2, 4, 6)
    outputs = []
    for _ in range(2):
        outputs.append(program(aten.mean.dim, program.move(total, "Replicate", "Shard(1)"), [2], True))
        total = program(aten.add.Tensor, total, program.moved("Partial(sum)", "Replicate", 2, 4, 6))
    return *outputs, program.move(total, "Replicate", "Shard(1)")


def _two_gathers(program):
    """A gate: silu of one gathered value times another; the result is read whole."""
    gate = program(aten.silu.default, program.moved("Shard(1)", "Replicate", 4, 8))
    return (program(aten.mul.Tensor, gate, program.moved("Shard(1)", "Replicate", 4, 8)),)


def _two_sums(program, rows=4):
    """As above with pending sums: their all-reduces are split."""
    gate = program(aten.sigmoid.default, program.moved("Partial(sum)", "Replicate", rows, 8))
    return (program(aten.mul.Tensor, gate, program.moved("Partial(sum)", "Replicate", rows, 8)),)


def _beside_what_was_whole_before(program):
    """An input that is as large as the sum: each rank takes its rows."""
    total = program.moved("Partial(sum)", "Replicate", 4, 6)
    scaled = program(aten.mul.Tensor, total, program.input("Replicate", 4, 6))
    return (program(aten.relu.default, program.move(scaled, "Replicate", "Shard(0)")),)


def _columns_of_what_is_cut_by_rows(program):
    """The cast is cut by rows, and gathered for those who read it whole or take columns."""
    small = program(aten._to_copy.default, program.moved("Shard(0)", "Replicate", 4, 8), dtype=torch.float32)
    return small, program(aten.relu.default, program.move(small, "Replicate", "Shard(1)"))


def _a_piece_that_lies_otherwise(program):
    """The piece is permuted; the view of what the reshard gave needs it contiguous."""
    turned = program(aten.permute.default, program.input("Shard(0)", 4, 4, 2), [0, 2, 1])
    rows = program(aten.view.default, program.move(turned, "Shard(0)", "Replicate", [4, 2, 4]), [4, 8])
    return (program(aten._to_copy.default, rows, dtype=torch.float32),)


def _a_cast(program):
    return (program(aten._to_copy.default, program.moved("Shard(0)", "Replicate", 4, 8), dtype=torch.float32),)


def _through_a_view(program):
    """Cut along the sequence, then along the width: an exchange in place of a gather."""
    rows = program(aten.view.default, program.moved("Shard(1)", "Replicate", 2, 4, 8), [8, 8])
    return (program.move(program(aten.exp.default, rows), "Replicate", "Shard(1)"),)


PROGRAMS = {
    "to a reduce-scatter": _to_a_reduce_scatter,
    "residuals": _residuals,
    "two gathers": _two_gathers,
    "two sums": _two_sums,
    "a cast": _a_cast,
    "through a view": _through_a_view,
    "beside what was whole before": _beside_what_was_whole_before,
    "columns of what is cut by rows": _columns_of_what_is_cut_by_rows,
    "a piece that lies otherwise": _a_piece_that_lies_otherwise,
}


def _graph(write, num_ranks=2, rank=0, **kwargs):
    program = Program(num_ranks, rank)
    return program.build.finish(*write(program, **kwargs)), program


def _moves(gm):
    """Source, destination and bytes of the reshards that send something."""
    nodes = gm.graph.find_nodes(op="call_function", target=RESHARD)
    calls = [(ReshardCall(*node.args), node.meta["val"].dtype) for node in nodes]
    found = [(call.src, call.dst, bytes_sent(call, dtype)) for call, dtype in calls]
    return [each for each in found if each[2]]


def test_golden(golden):
    gm, _ = _graph(_to_a_reduce_scatter)
    golden(text_of(gm, CONTEXT), "move_reshards.before")
    record = run_pass(BY_BYTES, gm, CONTEXT)
    golden(text_of(gm, CONTEXT), "move_reshards.after")
    assert record.report.counts == {"regions": 1, "bytes": 4 * 6 * 8 // 2, "collectives": 0}


def test_golden_of_split_all_reduces(golden):
    gm, _ = _graph(_two_sums)
    run_pass(BY_BYTES, gm, CONTEXT)
    golden(text_of(gm, CONTEXT), "move_reshards.split")


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("residuals", [("Partial(sum)", "Shard(1)", 192)] * 3),
        ("two gathers", [("Shard(1)", "Replicate", 128)]),
        ("two sums", [("Partial(sum)", "Shard(0)", 128)] * 2 + [("Shard(0)", "Replicate", 128)]),
        ("a cast", [("Shard(0)", "Replicate", 64)]),
        ("through a view", [("Shard(1)", "Shard(2)", 128)]),
    ],
)
def test_sends_fewer_bytes(name, expected):
    gm, _ = _graph(PROGRAMS[name])
    before = sum(sent for *_, sent in _moves(gm))
    report = run_pass(BY_BYTES, gm, CONTEXT).report
    assert _moves(gm) == expected
    assert report.counts["bytes"] == before - sum(sent for *_, sent in expected) > 0


@pytest.mark.parametrize("name", PROGRAMS)
def test_second_run_changes_nothing(name):
    first, second = run_twice(BY_BYTES, _graph(PROGRAMS[name])[0], CONTEXT)
    assert first.report.changed and not second.report.changed


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("name", PROGRAMS)
def test_computes_what_it_computed(name, num_ranks):
    mesh = tensor_axis(num_ranks)
    context = PassContext(mesh=mesh, full_checks=True)
    pairs = [_graph(PROGRAMS[name], num_ranks, rank) for rank in range(num_ranks)]
    before = [gm for gm, _ in pairs]
    after = [copy_graph(gm) for gm in before]
    for gm in after:
        assert run_pass(BY_BYTES, gm, context).report.changed
    generator = torch.Generator().manual_seed(0)
    given = pairs[0][1].given
    alike = [torch.rand(shape, generator=generator, dtype=dtype) for _, shape, dtype in given]
    rows = [
        [
            whole
            if placement == "Replicate"
            else torch.rand(local_shape(whole.shape, placement, num_ranks, rank), generator=generator, dtype=dtype)
            for whole, (placement, _, dtype) in zip(alike, given, strict=True)
        ]
        for rank in range(num_ranks)
    ]
    expected, found = (run_on_all_ranks(graphs, rows, mesh) for graphs in (before, after))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_collective_more_must_save_what_it_costs():
    """Two all-reduces stay where a third collective would cost more than half of the bytes; large ones are split."""
    for rows, expected in ((1024, [("Partial(sum)", "Replicate")] * 2), (8192, [("Partial(sum)", "Shard(0)")] * 2)):
        gm, _ = _graph(_two_sums, rows=rows)
        report = run_pass(MoveReshards(), gm, CONTEXT).report
        assert [each[:2] for each in _moves(gm)][:2] == expected
        assert report.counts["collectives"] == (-1 if rows > 1024 else 0)
    gm, _ = _graph(_two_sums, rows=1024)
    assert run_pass(MoveReshards(collective_bytes=1024), gm, CONTEXT).report.changed


def test_a_collective_less_is_worth_its_price():
    """One gather of a larger value in place of two."""

    def write(program):
        one, other = (program.moved("Shard(0)", "Replicate", 4, *sizes) for sizes in ((1, 6), (8, 1)))
        return (program(aten.add.Tensor, one, other),)

    gm, _ = _graph(write)
    assert not run_pass(BY_BYTES, gm, CONTEXT).report.changed
    report = run_pass(MoveReshards(), gm, CONTEXT).report
    assert [each[:2] for each in _moves(gm)] == [("Shard(0)", "Replicate")]
    assert report.counts["collectives"] == 1 and report.counts["bytes"] == 2 * 8 * (6 + 8 - 48)


def test_new_nodes_are_recomputed_as_those_they_replace():
    gm, _ = _graph(_two_sums)
    for node in gm.graph.find_nodes(op="call_function", target=RESHARD):
        node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    run_pass(BY_BYTES, gm, CONTEXT)
    tagged = [node.meta.get("recompute") for node in gm.graph.find_nodes(op="call_function", target=RESHARD)]
    assert tagged == [CheckpointPolicy.MUST_RECOMPUTE] * 2 + [None]


def test_what_it_writes_beside_reshards_of_the_program_is_placed():
    build = GraphBuilder()
    given = [build.input(f"primals_{place}", 2, 8) for place in range(2)]
    total = reshard(build, given[0], "Shard(0)", "Replicate", (4, 8), placed=True)
    own = reshard(build, given[1], "Shard(0)", "Replicate", (4, 8))
    gm = build.finish(build(aten._to_copy.default, total, dtype=torch.float32), own)
    assert run_pass(BY_BYTES, gm, CONTEXT).report.changed
    calls = [ReshardCall(*node.args) for node in gm.graph.find_nodes(op="call_function", target=RESHARD)]
    assert sorted(call.placed for call in calls) == [False, True]


def _read_whole_too(program):
    total = program.moved("Partial(sum)", "Replicate", 4, 6)
    return program(aten.relu.default, total), program.move(total, "Replicate", "Shard(0)")


def _beside_an_unknown_value(program):
    """The other operand may differ between the ranks, so its product cannot be gathered."""
    product = program(aten.mul.Tensor, program.moved("Shard(0)", "Replicate", 4, 6), program.input("Replicate", 4, 6))
    return (program(aten._to_copy.default, product, dtype=torch.float32),)


def _minus_a_number_of_the_rank(program):
    rows = program(aten.sub.Tensor, program.moved("Shard(0)", "Replicate", 4, 6), 3 * program.rank)
    return (program(aten.lt.Scalar, rows, 0),)


def _random(program):
    drawn = program(aten.bernoulli.p, program.moved("Shard(0)", "Replicate", 4, 6), 0.5)
    product = program(aten.mul.Tensor, program.moved("Shard(0)", "Replicate", 4, 6), drawn)
    return (program(aten._to_copy.default, product, dtype=torch.float32),)


def _along_two_dims(program):
    total = program.moved("Partial(sum)", "Replicate", 4, 6)
    return program.move(total, "Replicate", "Shard(0)"), program.move(total, "Replicate", "Shard(1)")


def _rows_and_columns_in_one_op(program):
    """A vector scales rows in one product and columns in another: it cannot be cut for both."""
    vector, matrix = program.moved("Partial(sum)", "Replicate", 4), program.moved("Partial(sum)", "Replicate", 4, 4)
    by_rows = program(aten.mul.Tensor, matrix, program(aten.view.default, vector, [4, 1]))
    products = (by_rows, program(aten.mul.Tensor, matrix, vector))
    return [program(aten.relu.default, program.move(each, "Replicate", "Shard(0)")) for each in products]


def _not_in_a_row(program):
    """The gathered result would lie in memory otherwise than its reader expects."""
    turned = program(aten.t.default, program.moved("Shard(0)", "Replicate", 6, 4))
    product = program(aten.mul.Tensor, turned, program.moved("Shard(0)", "Replicate", 6))
    return (program(aten.lt.Scalar, product, 0),)


def _pieces_that_are_exchanged(program):
    """The sum is a piece of eight rows: columns of it are no columns of a whole tensor."""
    bias = program.moved("Partial(sum)", "Replicate", 4)
    rows = program(aten.add.Tensor, program.input("Shard(0)", 8, 4), bias)
    return (program(aten.relu.default, program.move(rows, "Shard(0)", "Shard(1)", [8, 4])),)


def _terms_that_are_scattered(program):
    scaled = program(aten.mul.Tensor, program.input("Replicate", 4, 4), program.moved("Shard(0)", "Replicate", 4))
    return (program(aten.relu.default, program.move(scaled, "Partial(sum)", "Shard(1)")),)


def _scattered_by_the_program(program):
    """The program's own reduce-scatter gives each rank other rows."""
    whole = program.moved("Shard(0)", "Replicate", 8, 6)
    rows = program(WAIT, program(REDUCE_SCATTER, whole, "sum", program.num_ranks, "tensor_group"))
    product = program(aten.mul.Tensor, rows, program.moved("Shard(1)", "Replicate", 4, 6))
    return (program(aten._to_copy.default, product, dtype=torch.float32),)


@pytest.mark.parametrize(
    "write",
    [
        _pieces_that_are_exchanged,
        _terms_that_are_scattered,
        _scattered_by_the_program,
        _read_whole_too,
        _beside_an_unknown_value,
        _minus_a_number_of_the_rank,
        _random,
        _along_two_dims,
        _rows_and_columns_in_one_op,
        _not_in_a_row,
    ],
)
def test_leaves_alone_what_would_send_no_less_or_something_else(write):
    gm, _ = _graph(write)
    assert not run_pass(BY_BYTES, gm, CONTEXT).report.changed


def test_leaves_sizes_alone_that_the_ranks_do_not_divide():
    gm, _ = _graph(_to_a_reduce_scatter, rows=5)
    assert not run_pass(BY_BYTES, gm, CONTEXT).report.changed


def test_leaves_reshards_of_the_program_alone():
    build = GraphBuilder()
    total = reshard(build, build.input("primals_1", 4, 6), "Partial(sum)", "Replicate", (4, 6))
    piece = reshard(build, build(aten.relu.default, total), "Replicate", "Shard(0)", (4, 6), placed=True)
    gm = build.finish(reshard(build, piece, "Shard(0)", "Replicate", (4, 6), placed=True))
    assert not run_pass(BY_BYTES, gm, CONTEXT).report.changed
