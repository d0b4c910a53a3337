"""The shard ops: eager, fake and autograd implementations, on any dim, uneven and empty."""

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from support.all_ranks import pieces, run_values
from support.small_graphs import GraphBuilder, ParameterSpec, parameter_graph, reduce_grad, two_axes
from support.thorough import examples
from support.torch_versions import NEEDS_REDUCTION, REDUCES
from torch import nn

import graphshard
from graphshard.ir.params import ReduceGradCall, gradient_call, padded_shape, shard_shape
from graphshard.ir.shard_ops import REDUCE_GRAD, UNSHARD
from graphshard.pipeline.context import PassContext
from graphshard.pipeline.facts import check_typed

#: In place of a unit's handle: it leads nowhere.
HANDLE = torch.empty(0, dtype=torch.int8)

SHAPES = [
    ((4, 6), 0),
    ((4, 6), 1),
    ((5, 3), 0),
    ((3, 5), 1),
    ((5,), 0),
    ((1, 3), 0),
    ((2, 1, 5), 2),
    ((2, 3, 4), 1),
]
UNEVEN = pytest.mark.parametrize(
    ("shape", "dim"), SHAPES, ids=[f"{shape} dim {dim}" for shape, dim in SHAPES]
)


def _opcheck(op, arguments):
    """Schema, fake tensors, autograd registration; where results are defined, AOT dispatch on dynamic shapes."""
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    torch.library.opcheck(op, arguments, test_utils=checks if REDUCES else checks[:-1])


def _call(shard, shape, dim, num_ranks, **changes):
    """A gather over the default group, whose gradient is averaged by a sum and a division."""
    call = ParameterSpec(tuple(shape), dim, force_sum=True).call(shard, HANDLE, "w", num_ranks)
    return call._replace(group_name=dist.group.WORLD.group_name, **changes)


def _unshard_arguments(shard, shape, dim, num_ranks, **changes):
    return tuple(_call(shard, shape, dim, num_ranks, **changes))


def _reduce_arguments(grad, piece, dim, num_ranks, **changes):
    call = gradient_call(_call(None, grad.shape, dim, num_ranks), grad, piece, grad.dtype)
    return tuple(call._replace(**changes))


@UNEVEN
@pytest.mark.parametrize("is_padded", [True, False], ids=["padded", "unpadded"])
def test_opcheck_unshard(fake_group, shape, dim, is_padded):
    fake_group(3, rank=2)
    piece = padded_shape(shape, dim, 3) if is_padded else shard_shape(shape, dim, 3, 2)
    shard = torch.randn(piece, dtype=torch.float64, requires_grad=True)
    _opcheck(UNSHARD, _unshard_arguments(shard, shape, dim, 3))


@UNEVEN
def test_opcheck_reduce_grad(fake_group, shape, dim):
    fake_group(3, rank=2)
    grad = torch.randn(shape, dtype=torch.float64)
    for piece in (padded_shape(shape, dim, 3), shard_shape(shape, dim, 3, 2)):
        _opcheck(REDUCE_GRAD, _reduce_arguments(grad, piece, dim, 3))


@NEEDS_REDUCTION
@UNEVEN
def test_eager_on_the_fake_group(fake_group, shape, dim):
    """The fake group answers a gather with copies of this rank's shard, a reduction with its own slice."""
    fake_group(2)
    shard = torch.randn(padded_shape(shape, dim, 2))
    full = UNSHARD(*_unshard_arguments(shard, shape, dim, 2))
    assert torch.equal(full, torch.cat([shard, shard], dim).narrow(dim, 0, shape[dim]))
    grad = torch.randn(shape)
    reduced = REDUCE_GRAD(*_reduce_arguments(grad, shard.shape, dim, 2))
    assert torch.equal(reduced, pieces(grad * 0.5, dim, 2, padding=0.0)[0])


@UNEVEN
def test_results_are_contiguous_and_typed(fake_group, shape, dim):
    fake_group(2)
    for dtype in (torch.float32, torch.bfloat16):
        full = UNSHARD(
            *_unshard_arguments(torch.randn(padded_shape(shape, dim, 2), dtype=dtype), shape, dim, 2)
        )
        assert (full.shape, full.dtype, full.is_contiguous()) == (shape, dtype, True)
        reduced = REDUCE_GRAD(*_reduce_arguments(full, shard_shape(shape, dim, 2, 1), dim, 2))
        assert (list(reduced.shape), reduced.dtype) == (shard_shape(shape, dim, 2, 1), dtype)
        assert reduced.is_contiguous()


def test_one_rank_gets_a_tensor_of_its_own(fake_group):
    fake_group(1)
    shard = torch.randn(3, 2)
    full = UNSHARD(*_unshard_arguments(shard, (3, 2), 0, 1))
    assert torch.equal(full, shard)
    full.zero_()
    assert shard.any()


@NEEDS_REDUCTION
def test_a_gradient_of_any_layout_is_reduced(fake_group):
    fake_group(2)
    grad = torch.randn(3, 5).t()
    reduced = REDUCE_GRAD(*_reduce_arguments(grad, (3, 3), 0, 2))
    assert torch.equal(reduced, grad[:3] * 0.5)


@NEEDS_REDUCTION
@UNEVEN
def test_backward_of_unshard_is_reduce_grad(fake_group, shape, dim):
    fake_group(2, rank=1)
    shard = torch.randn(shard_shape(shape, dim, 2, 1), requires_grad=True)
    weight = torch.randn(shape)
    full = UNSHARD(*_unshard_arguments(shard, shape, dim, 2, divide_factor=4.0))
    (full * weight).sum().backward()
    expected = pieces(weight, dim, 2, padding=0.0)[1].narrow(dim, 0, shard.shape[dim]) * 0.25
    torch.testing.assert_close(shard.grad, expected, rtol=0.0, atol=0.0)


def test_no_gradient_for_a_shard_that_does_not_train(fake_group):
    fake_group(2)
    assert not UNSHARD(*_unshard_arguments(torch.randn(2, 2), (4, 2), 0, 2)).requires_grad


def test_fake_results_follow_the_arguments(fake_group):
    fake_group(4)
    shard = torch.empty(0, 3, dtype=torch.bfloat16, device="meta")
    assert UNSHARD(*_unshard_arguments(shard, (5, 3), 0, 4)).shape == (5, 3)
    reduced = REDUCE_GRAD(*_reduce_arguments(torch.empty(5, 3, device="meta"), (0, 3), 0, 4))
    assert reduced.shape == (0, 3) and reduced.device.type == "meta"


@examples(20)
@given(rows=st.integers(1, 9), columns=st.integers(1, 4), dim=st.integers(0, 1), num_ranks=st.integers(2, 5))
def test_all_ranks_unpadded(rows, columns, dim, num_ranks):
    """Every rank holds its `torch.chunk`, possibly nothing, and reduces to a shard of the same shape."""
    shape = (columns, rows) if dim else (rows, columns)
    _, ctx = parameter_graph([ParameterSpec(shape, dim)], num_ranks)
    graphs = []
    for rank in range(num_ranks):
        mine, _ = parameter_graph([ParameterSpec(shape, dim)], num_ranks)
        (node,) = mine.graph.find_nodes(op="call_function", target=REDUCE_GRAD)
        piece = shard_shape(shape, dim, num_ranks, rank)
        node.args = tuple(ReduceGradCall(*node.args)._replace(shard_shape=piece))
        mine.recompile()
        graphs.append(mine)
    full = torch.randn(shape, dtype=torch.float64)
    grads = [torch.randn(shape, dtype=torch.float64) for _ in range(num_ranks)]
    sizes = [shard_shape(shape, dim, num_ranks, rank)[dim] for rank in range(num_ranks)]
    inputs = [[shard, grad] for shard, grad in zip(full.split(sizes, dim), grads, strict=True)]
    results = run_values(graphs, inputs, ctx.mesh)
    expected = (sum(grads) / num_ranks).split(sizes, dim)
    for (gathered, reduced), want in zip(results, expected, strict=True):
        assert torch.equal(gathered, full)
        torch.testing.assert_close(reduced, want, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(
    "dtypes", [(torch.float32, None), (None, torch.float32), (torch.bfloat16, torch.float64)]
)
def test_opcheck_with_other_dtypes(fake_group, dtypes):
    fake_group(3)
    param_dtype, reduce_dtype = dtypes
    shard = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    changes = {"dtype": param_dtype, "reduce_dtype": reduce_dtype, "divide_factor": 2.0}
    _opcheck(UNSHARD, _unshard_arguments(shard, (5, 3), 0, 3, **changes))
    grad = torch.randn(5, 3, dtype=param_dtype or torch.float64)
    arguments = _reduce_arguments(grad, (2, 3), 0, 3, dtype=torch.float64, reduce_dtype=reduce_dtype)
    _opcheck(REDUCE_GRAD, arguments)


MESH = two_axes(2, 3)
#: dtypes of the shard, of compute, of the reduction; and how exact a mean over the ranks then is.
DTYPES = [
    (torch.float64, None, None, 1e-12),
    (torch.float32, torch.bfloat16, torch.float32, 1e-6),
    (torch.float32, torch.bfloat16, None, 3e-2),
    (torch.float32, torch.float16, None, 3e-3),
    (torch.float64, torch.float32, torch.float64, 1e-12),
]
COPIES = pytest.mark.parametrize(("dtype", "param_dtype", "reduce_dtype", "tolerance"), DTYPES, ids=str)


def _gradients(spec):
    """For each of six ranks a gradient, and their sum in float64."""
    generator = torch.Generator().manual_seed(0)
    compute = spec.param_dtype or spec.dtype
    grads = [torch.randn(spec.shape, generator=generator).to(compute) for _ in range(MESH.num_ranks)]
    return grads, sum(grad.double() for grad in grads)


def _assert_pieces(results, full, dtype, tolerance):
    """Each rank holds its shard's rows of ``full``, on both copies."""
    wanted = [piece.to(dtype) for piece in pieces(full, 0, 3, padding=0.0)] * 2
    assert [result.dtype for result in results] == [dtype] * len(wanted)
    torch.testing.assert_close(results, wanted, rtol=tolerance, atol=tolerance)


@COPIES
@pytest.mark.parametrize("divide_factor", [None, 4.0])
@pytest.mark.parametrize("force_sum", [False, True])
def test_all_ranks_with_copies(dtype, param_dtype, reduce_dtype, tolerance, divide_factor, force_sum):
    """Two copies of three shards: the gradient is the sum over six ranks, divided; parameters are cast."""
    settings = {"dtype": dtype, "param_dtype": param_dtype, "reduce_dtype": reduce_dtype}
    spec = ParameterSpec((5, 2), num_replicas=2, divide_factor=divide_factor, force_sum=force_sum, **settings)
    gm, ctx = parameter_graph([spec], 3)
    assert ctx.mesh == MESH
    full = torch.randn(5, 2).to(dtype)
    grads, total = _gradients(spec)
    shards = pieces(full, 0, 3) * 2
    results = run_values(gm, [[shard, grad] for shard, grad in zip(shards, grads, strict=True)], MESH)
    assert all(torch.equal(gathered, full.to(param_dtype or dtype)) for gathered, _ in results)
    _assert_pieces([reduced for _, reduced in results], total / (divide_factor or 6), dtype, tolerance)


@COPIES
@pytest.mark.parametrize("pending", ["unreduced", "partial", "both"])
def test_all_ranks_with_pending_gradients(dtype, param_dtype, reduce_dtype, tolerance, pending):
    """What earlier micro-batches left is part of the sum, at whatever stage they left it."""
    spec = ParameterSpec(
        (5, 2), num_replicas=2, dtype=dtype, param_dtype=param_dtype, reduce_dtype=reduce_dtype
    )
    compute = param_dtype or dtype
    build = GraphBuilder()
    grads = [build.input(f"arg{i}_1", 5, 2, dtype=compute) for i in range(2)]
    earlier = build.input("arg2_1", 5, 2, dtype=reduce_dtype or compute)
    left = {}
    if pending != "unreduced":
        left["partial"] = reduce_grad(build, grads[0], "w", spec, 3, all_reduce=False)
    if pending != "partial":
        left["unreduced"] = earlier
    outputs = [left["partial"]] if "partial" in left else []
    gm = build.finish(*outputs, reduce_grad(build, grads[1], "w", spec, 3, **left))
    assert check_typed(gm, PassContext(full_checks=True)) == []
    values, total = _gradients(spec)
    inputs = [[value, 2 * value, 4 * value.to(reduce_dtype or compute)] for value in values]
    results = run_values(gm, inputs, MESH)
    count = {"unreduced": 2 + 4, "partial": 1 + 2, "both": 1 + 2 + 4}[pending]
    _assert_pieces([result[-1] for result in results], count * total / 6, dtype, count * tolerance)
    if "partial" in left:
        partial = results[0][0]
        assert (list(partial.shape), partial.dtype) == ([2, 2], reduce_dtype or compute)


def test_a_sharded_model_trains_uncompiled(fake_group):
    """On one rank `fully_shard` leaves the numbers of the plain model."""
    mesh = fake_group(1)
    torch.manual_seed(0)
    plain = nn.Linear(3, 2)
    sharded = nn.Linear(3, 2)
    sharded.load_state_dict(plain.state_dict())
    graphshard.fully_shard(sharded, mesh=mesh)
    x = torch.randn(4, 3)
    for model in (plain, sharded):
        model(x).square().sum().backward()
    assert torch.equal(sharded.weight.grad.full_tensor(), plain.weight.grad)


@pytest.mark.parametrize("rank", [0, 3])
def test_eager_forward_and_backward_keep_shard_shapes(fake_group, rank):
    mesh = fake_group(4, rank)
    model = graphshard.fully_shard(nn.Linear(3, 5), mesh=mesh)
    model(torch.randn(2, 3)).sum().backward()
    rows = shard_shape([5], 0, 4, rank)[0]
    assert model.weight.grad.to_local().shape == (rows, 3)
    assert model.bias.grad.to_local().shape == (rows,)
