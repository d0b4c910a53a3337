"""`run_on_all_ranks`: each collective computes what torch's would, and a mismatch is an error."""

import operator

import pytest
import torch
from support.small_graphs import GROUP, GraphBuilder, aten, one_axis

from graphshard.errors import CollectiveMismatchError, OptionError
from graphshard.ir.collectives import ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, WAIT, c10d
from graphshard.ir.mesh import MeshAxis, MeshLayout
from graphshard.ir.piece_ops import KEEP_PIECE, SPREAD
from graphshard.testing import run_on_all_ranks

NUM_RANKS = 3
MESH = one_axis(NUM_RANKS)


def _values(*shape):
    return [torch.randn(shape, dtype=torch.float64) for _ in range(NUM_RANKS)]


def _collective(target, *arguments, shape=(3, 2)):
    build = GraphBuilder()
    return build.finish(build(WAIT, build(target, build.input("x", *shape), *arguments, GROUP)))


def _run(gm, values, mesh=MESH):
    return [result[0] for result in run_on_all_ranks(gm, [[value] for value in values], mesh)]


def test_all_gather():
    build = GraphBuilder()
    gm = build.finish(build.gather(build.input("x", 3, 2), NUM_RANKS))
    values = _values(3, 2)
    assert all(torch.equal(result, torch.cat(values)) for result in _run(gm, values))


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        ("sum", lambda values: values[0] + values[1] + values[2]),
        ("avg", lambda values: (values[0] + values[1] + values[2]) / 3),
        ("max", lambda values: torch.stack(values).amax(0)),
        ("product", lambda values: torch.stack(values).prod(0)),
        ("min", lambda values: torch.stack(values).amin(0)),
    ],
)
def test_all_reduce(op, expected):
    values = _values(3, 2)
    results = _run(_collective(ALL_REDUCE, op), values)
    assert all(torch.equal(result, expected(values)) for result in results)


@pytest.mark.parametrize("op", ["sum", "avg"])
def test_reduce_scatter(op):
    values = _values(6, 2)
    results = _run(_collective(REDUCE_SCATTER, op, NUM_RANKS, shape=(6, 2)), values)
    total = (values[0] + values[1] + values[2]) / (3 if op == "avg" else 1)
    assert all(torch.equal(result, rows) for result, rows in zip(results, total.split(2), strict=True))


@pytest.mark.parametrize(
    "splits", [[[1, 1, 1]] * 3, [[1, 0, 2], [2, 1, 0], [0, 3, 1]]], ids=["even", "uneven"]
)
def test_all_to_all(splits):
    """Rank r sends `splits[r][s]` rows to rank s."""
    values = [torch.randn(sum(row), 2, dtype=torch.float64) for row in splits]
    received = [[splits[sender][rank] for sender in range(3)] for rank in range(3)]
    graphs = [
        _collective(ALL_TO_ALL, received[rank], splits[rank], shape=(sum(splits[rank]), 2))
        for rank in range(3)
    ]
    results = [r[0] for r in run_on_all_ranks(graphs, [[value] for value in values], MESH)]
    for rank, result in enumerate(results):
        want = torch.cat([values[sender].split(splits[sender])[rank] for sender in range(3)])
        assert torch.equal(result, want)


def test_inputs_are_not_changed():
    values = _values(3, 2)
    copies = [value.clone() for value in values]
    _run(_collective(ALL_REDUCE, "sum"), values)
    assert all(torch.equal(value, copy) for value, copy in zip(values, copies, strict=True))


def test_results_of_ranks_do_not_share_memory():
    """A rank that writes into its result must not change another rank's."""
    build = GraphBuilder()
    reduced = build(WAIT, build(ALL_REDUCE, build.input("x", 2), "sum", GROUP))
    gm = build.finish(build(aten.add_.Tensor, reduced, 1.0))
    values = _values(2)
    total = values[0] + values[1] + values[2]
    assert all(torch.equal(result, total + 1.0) for result in _run(gm, values))


@pytest.mark.parametrize("sizes", [(2, 2), (2, 3)])
def test_two_axes(sizes):
    """Gather over the rows of a grid, then sum over its columns."""
    words = zip("ab", sizes, ("ga", "gb"), strict=True)
    mesh = MeshLayout(
        axes=tuple(MeshAxis(label=label, size=size, group_name=name) for label, size, name in words)
    )
    build = GraphBuilder()
    gathered = build.gather(build.input("x", 1), sizes[1], "gb")
    gm = build.finish(build(WAIT, build(ALL_REDUCE, gathered, "sum", "ga")))
    grid = torch.arange(mesh.num_ranks, dtype=torch.float64).view(sizes)
    results = _run(gm, list(grid.reshape(-1, 1)), mesh)
    assert all(torch.equal(result, grid.sum(0)) for result in results)


@pytest.mark.parametrize("num_rows", [1, 4, 5])
def test_pieces_are_those_of_neighbours(num_rows):
    """Four ranks in pairs: ranks 0 and 2 keep the first rows, 1 and 3 the others, padded with zeros."""
    pairs = MeshAxis(label="shard/2", size=2, group_name="pairs", part_of="shard")
    mesh = MeshLayout(axes=(*one_axis(4).axes, pairs))
    build = GraphBuilder()
    full = build.input("x", num_rows, 3)
    kept = build(KEEP_PIECE, full, 0, 2, "pairs")
    whole, piece = build(operator.getitem, kept, 0), build(operator.getitem, kept, 1)
    gm = build.finish(whole, piece, build(SPREAD, full, 0, 2, "pairs"), build.gather(piece, 2, "pairs"))
    value = torch.randn(num_rows, 3, dtype=torch.float64)
    padded = torch.cat([value, value.new_zeros(num_rows % 2, 3)])
    for rank, result in enumerate(run_on_all_ranks(gm, [[value]] * 4, mesh)):
        whole, piece, spread, gathered = result
        assert torch.equal(whole, value) and torch.equal(gathered, padded)
        assert torch.equal(piece, padded.chunk(2)[rank % 2]) and torch.equal(spread, piece)


def test_ranks_of_different_groups_run_at_their_own_pace():
    """Columns of a grid may issue different collectives: only a group must agree."""
    mesh = MeshLayout(
        axes=(MeshAxis(label="a", size=2, group_name="ga"), MeshAxis(label="b", size=2, group_name="gb"))
    )
    summed = _reduction_over("ga", times=1)
    twice = _reduction_over("ga", times=2)
    values = [torch.tensor([float(rank)]) for rank in range(4)]
    results = run_on_all_ranks([summed, twice, summed, twice], [[value] for value in values], mesh)
    assert [float(result[0]) for result in results] == [2.0, 8.0, 2.0, 8.0]


def _reduction_over(group, times):
    build = GraphBuilder()
    value = build.input("x", 1)
    for _ in range(times):
        value = build(WAIT, build(ALL_REDUCE, value, "sum", group))
    return build.finish(value)


@pytest.mark.parametrize(
    "other",
    [
        lambda: _collective(ALL_REDUCE, "max"),
        lambda: _collective(ALL_REDUCE, "sum", shape=(2, 3)),
        lambda: _collective(REDUCE_SCATTER, "sum", NUM_RANKS),
    ],
    ids=["reduction", "shape", "kind"],
)
def test_a_mismatch_names_both_ranks(other):
    graphs = [_collective(ALL_REDUCE, "sum"), _collective(ALL_REDUCE, "sum"), other()]
    shape = graphs[2].graph.find_nodes(op="placeholder")[0].meta["val"].shape
    values = [*_values(3, 2)[:2], torch.randn(tuple(shape), dtype=torch.float64)]
    with pytest.raises(CollectiveMismatchError, match=r"rank 0 reaches .*all_reduce.* where rank 2 reaches"):
        run_on_all_ranks(graphs, [[value] for value in values], MESH)


def test_a_rank_that_ends_early_is_an_error():
    build = GraphBuilder()
    nothing = build.finish(build.input("x", 3, 2))
    graphs = [_collective(ALL_REDUCE, "sum"), _collective(ALL_REDUCE, "sum"), nothing]
    with pytest.raises(CollectiveMismatchError, match="no collective has all its ranks: rank 0 waits in"):
        run_on_all_ranks(graphs, [[value] for value in _values(3, 2)], MESH)


def test_a_foreign_group_is_an_error():
    with pytest.raises(CollectiveMismatchError, match=r"not of the mesh \(\['shard_group'\]\)"):
        run_on_all_ranks(_reduction_over("foreign", 1), [[torch.ones(1)]] * NUM_RANKS, MESH)


def test_an_unknown_collective_is_an_error():
    gm = _collective(c10d.broadcast.default, 0)
    with pytest.raises(CollectiveMismatchError, match=r"broadcast.* is not among the collectives"):
        run_on_all_ranks(gm, [[value] for value in _values(3, 2)], MESH)


def test_an_unknown_reduction_is_an_error():
    with pytest.raises(CollectiveMismatchError, match="reduction 'band' is not among"):
        run_on_all_ranks(_collective(ALL_REDUCE, "band"), [[value] for value in _values(3, 2)], MESH)


def test_inputs_for_every_rank_are_required():
    with pytest.raises(OptionError, match="the mesh has 3 ranks, but inputs are given for 2: give one list"):
        run_on_all_ranks(_collective(ALL_REDUCE, "sum"), [[value] for value in _values(3, 2)[:2]], MESH)


def test_all_to_all_refuses_rows_nobody_sends():
    """Rank 0 expects two rows of rank 1, which sends it one."""
    received, sent = [[1, 2], [1, 1]], [[1, 1], [1, 1]]
    mesh = one_axis(2)
    graphs = [_collective(ALL_TO_ALL, received[rank], sent[rank], shape=(2, 1)) for rank in range(2)]
    with pytest.raises(CollectiveMismatchError, match=r"expects \[1, 2\] rows .* is sent \[1, 1\]"):
        run_on_all_ranks(graphs, [[torch.ones(2, 1)]] * 2, mesh)
