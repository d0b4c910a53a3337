"""Parameters cross into compiled code as padded local tensors, gradients come back as DTensors."""

import pytest
import torch
from support.small_graphs import ParameterSpec, aten
from support.small_models import FrozenFirst, TwoLinears, shard_units
from support.torch_versions import NEEDS_REDUCTION
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor, Shard

from graphshard._compat import is_to_local
from graphshard.backend.dtensor_boundary import cross_boundary
from graphshard.backend.extended_gathers import CHECKPOINTED_REGION
from graphshard.backend.padded_shards import Crossing, padded_local
from graphshard.ir.params import shard_shape
from graphshard.ir.shard_ops import UNSHARD

#: Graphs run as they were captured here, which a real model is warned of.
pytestmark = pytest.mark.filterwarnings("ignore:graphshard. this model was compiled by a backend:UserWarning")

ROWS_OF_FIVE = [2, 2, 1, 0]
#: Shapes of the handles of the two units with parameters.
UNIT_HANDLES = [(0,), (0,)]


def _sharded(mesh, cls=TwoLinears):
    torch.manual_seed(0)
    return shard_units(cls(), mesh)


def _crossing(shape, dim=0):
    return Crossing(position=0, source=0, shape=tuple(shape), dim=dim)


@pytest.mark.parametrize("rank", range(4))
def test_a_parameter_enters_as_a_view_of_its_padded_storage(fake_group, rank):
    weight = _sharded(fake_group(4, rank)).first.weight
    local = weight.to_local()
    assert local.shape[0] == ROWS_OF_FIVE[rank]
    padded = padded_local(weight, _crossing((2, 4)))
    assert padded.shape == (2, 4) and padded.is_contiguous() and not padded.requires_grad
    assert padded.untyped_storage().data_ptr() == weight._local_tensor.untyped_storage().data_ptr()
    assert torch.equal(padded[: local.shape[0]], local)


def test_an_in_place_update_shows_in_the_view(fake_group):
    weight = _sharded(fake_group(4, 2)).first.weight
    padded = padded_local(weight, _crossing((2, 4)))
    with torch.no_grad():
        weight.fill_(7.0)
    assert torch.equal(padded[:1], torch.full((1, 4), 7.0))


def _dtensor(local, mesh, shape, dim=0):
    stride = torch.empty(shape).stride()
    return DTensor.from_local(
        local, mesh, [Shard(dim)], run_check=False, shape=torch.Size(shape), stride=stride
    )


@pytest.mark.parametrize("rank", range(4))
def test_a_parameter_without_room_is_copied(fake_group, rank):
    """`load_state_dict(assign=True)` brings storage that ends with the rows."""
    local = torch.randn(ROWS_OF_FIVE[rank], 3)
    param = _dtensor(local, fake_group(4, rank), (5, 3))
    padded = padded_local(param, _crossing((2, 3)))
    assert torch.equal(padded[: len(local)], local) and not padded[len(local) :].any()
    shares = padded.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    assert shares == (len(local) == 2)


@pytest.mark.parametrize("rank", range(4))
def test_a_cut_along_dim_one_is_copied(fake_group, rank):
    local = torch.randn(3, ROWS_OF_FIVE[rank])
    padded = padded_local(_dtensor(local, fake_group(4, rank), (3, 5), dim=1), _crossing((3, 2), dim=1))
    assert padded.shape == (3, 2) and torch.equal(padded[:, : local.shape[1]], local)


def test_a_cut_along_dim_one_is_copied_even_with_room(fake_group):
    local = torch.randn(9)[:3].view(3, 1)
    padded = padded_local(_dtensor(local, fake_group(4, 2), (3, 5), dim=1), _crossing((3, 2), dim=1))
    assert torch.equal(padded[:, :1], local) and not padded[:, 1:].any()


def test_a_strided_local_is_copied(fake_group):
    local = torch.randn(4, 8).t()[:1]  # room behind it, but not in row order
    padded = padded_local(_dtensor(local, fake_group(4, 2), (5, 4)), _crossing((2, 4)))
    assert torch.equal(padded[:1], local) and not padded[1:].any()


def test_a_local_in_the_middle_of_a_storage_stays_inside_it(fake_group):
    flat = torch.randn(10)
    mesh = fake_group(4, 2)
    inside = padded_local(_dtensor(flat[3:6].view(1, 3), mesh, (5, 3)), _crossing((2, 3)))
    assert torch.equal(inside[:1], flat[3:6].view(1, 3))
    at_the_end = padded_local(_dtensor(flat[7:10].view(1, 3), mesh, (5, 3)), _crossing((2, 3)))
    assert torch.equal(at_the_end, torch.stack([flat[7:10], torch.zeros(3)]))


class _Recorder:
    """A backend that crosses the boundary and runs the graph as it is."""

    def __init__(self):
        self.example_shapes, self.runtime = [], []

    def __call__(self, gm, example_inputs):
        def compile_graph(graph, inputs):
            self.example_shapes = [tuple(value.shape) for value in inputs]

            def run(*values):
                self.runtime = list(values)
                return graph(*values)

            return run

        return cross_boundary(gm, example_inputs, compile_graph)


def _prim_to_local(*args, **kwargs):
    """What torch 2.11 captures for ``to_local(*args, **kwargs)``."""

    def prim_to_local(value):
        return value.to_local(*args, **kwargs)

    return prim_to_local


@pytest.mark.parametrize(
    ("op", "target", "arguments", "is_plain"),
    [
        ("call_method", "to_local", (), True),
        ("call_method", "to_local", (None,), False),
        ("call_method", "full_tensor", (), False),
        ("call_function", _prim_to_local(), (), True),
        ("call_function", _prim_to_local(grad_placements=(Shard(0),)), (), False),
        ("call_function", torch.relu, (), False),
    ],
    ids=["method", "with an argument", "another", "function", "function with an argument", "another function"],
)
def test_what_dynamo_captures_for_to_local(op, target, arguments, is_plain):
    graph = fx.Graph()
    node = graph.create_node(op, target, (graph.placeholder("x"), *arguments))
    assert is_to_local(node) is is_plain


def _compiled(model):
    torch._dynamo.reset()
    recorder = _Recorder()
    return torch.compile(model, backend=recorder, fullgraph=True), recorder


@pytest.mark.parametrize("rank", range(4))
def test_inputs_are_padded_plain_tensors_on_every_rank(fake_group, rank):
    model = _sharded(fake_group(4, rank))
    compiled, recorder = _compiled(model)
    compiled(torch.randn(2, 4))
    assert sorted(recorder.example_shapes) == sorted([(2, 4), (2,), (2, 4), (1, 5), (1,), *UNIT_HANDLES])
    assert [tuple(value.shape) for value in recorder.runtime] == recorder.example_shapes
    assert not any(isinstance(value, DTensor) for value in recorder.runtime)


@pytest.mark.parametrize("rank", range(4))
def test_gradients_come_back_as_unpadded_dtensors(fake_group, rank):
    model = _sharded(fake_group(4, rank))
    compiled, _ = _compiled(model)
    compiled(torch.randn(2, 4)).sum().backward()
    for param in model.parameters():
        assert isinstance(param.grad, DTensor)
        assert param.grad.shape == param.shape and param.grad.placements == param.placements
        assert list(param.grad.to_local().shape) == shard_shape(param.shape, 0, 4, rank)


def test_gradients_are_added_before_the_nodes_of_the_parameters_run(fake_group):
    """Such a node would detach a DTensor, through its dispatch; now it gets none."""
    model = _sharded(fake_group(2))
    compiled, _ = _compiled(model)
    params, given = list(model.parameters()), []
    nodes = [param.view_as(param).grad_fn.next_functions[0][0] for param in params]
    for node in nodes:
        node.register_prehook(lambda grads: given.append(grads[0]))
    seen = []
    for _ in range(3):
        compiled(torch.randn(2, 4)).sum().backward()
        seen.append([param.grad for param in params])
    assert given == [None] * (3 * len(params))
    assert all(one is first for grads in seen for one, first in zip(grads, seen[0], strict=True))


def test_hooks_of_parameters_see_their_gradients(fake_group):
    model = _sharded(fake_group(2))
    compiled, _ = _compiled(model)
    shapes, params = [], list(model.parameters())
    params[0].register_hook(lambda grad: shapes.append(tuple(grad.shape)))
    params[1].register_post_accumulate_grad_hook(lambda param: shapes.append(tuple(param.grad.shape)))
    compiled(torch.randn(2, 4)).sum().backward()
    assert sorted(shapes) == sorted(tuple(param.shape) for param in params[:2])


@NEEDS_REDUCTION
def test_gradients_have_the_values_of_the_shard(fake_group):
    """On the fake group a reduction keeps this rank's rows of its own gradient."""
    model = _sharded(fake_group(4, 1))
    x = torch.randn(2, 4)
    grads = []
    for call in (model, _compiled(model)[0]):
        model.zero_grad()
        call(x).square().sum().backward()
        grads.append([param.grad.to_local() for param in model.parameters()])
    torch.testing.assert_close(grads[1], grads[0], rtol=0.0, atol=0.0)
    assert all(grad.any() for grad in grads[1][:2])


def test_frozen_parameters_enter_without_gradients(fake_group):
    model = _sharded(fake_group(2), FrozenFirst)
    compiled, recorder = _compiled(model)
    compiled(torch.randn(2, 4)).sum().backward()
    assert sum(value.requires_grad for value in recorder.runtime) == 2
    assert len(recorder.runtime) == 5 + len(UNIT_HANDLES)
    assert model.first.weight.grad is None and model.second.weight.grad is not None


def test_without_grad_nothing_requires_grad(fake_group):
    compiled, recorder = _compiled(_sharded(fake_group(2)))
    with torch.no_grad():
        out = compiled(torch.randn(2, 4))
    assert not out.requires_grad and not any(value.requires_grad for value in recorder.runtime)


def test_each_call_reads_the_parameters_anew(fake_group):
    model = _sharded(fake_group(2))
    compiled, _ = _compiled(model)
    x = torch.randn(2, 4)
    with torch.no_grad():
        before = compiled(x)
        for param in model.parameters():
            param.zero_()
        assert before.any() and not compiled(x).any()


def _graph(extra, **options):
    """`unshard(p.to_local(**options))`, returned with another use of the parameter."""
    graph = fx.Graph()
    param = graph.placeholder("p")
    local = graph.call_method("to_local", (param,), options)
    handle = graph.get_attr("handle")
    full = graph.call_function(UNSHARD, tuple(ParameterSpec((5, 3)).call(local, handle, "p", 4)))
    graph.output((full, *extra(graph, param, local)))
    root = torch.nn.Module()
    root.register_buffer("handle", torch.empty(0, dtype=torch.int8))
    return fx.GraphModule(root, graph)


def _cross(gm, mesh, rows=1):
    with FakeTensorMode(allow_non_fake_inputs=True):
        example = _dtensor(torch.empty(rows, 3), mesh, (5, 3))
    seen = []

    def compile_graph(graph, inputs):
        seen.extend(inputs)
        return graph

    return cross_boundary(gm, [example], compile_graph), seen, example


def test_a_parameter_read_by_its_gather_alone_crosses(fake_group):
    gm = _graph(lambda graph, param, local: ())
    compiled, (entered,), example = _cross(gm, fake_group(4, 2))
    assert entered.shape == (2, 3) and not isinstance(entered, DTensor)
    assert compiled is not gm and entered is not example
    assert not gm.graph.find_nodes(op="call_method", target="to_local")


@pytest.mark.parametrize(
    "extra",
    [
        lambda graph, param, local: (graph.call_method("full_tensor", (param,)),),
        lambda graph, param, local: (param,),
    ],
    ids=["another method", "returned"],
)
def test_a_dtensor_used_otherwise_stays_and_its_shard_enters_for_the_gather(fake_group, extra):
    gm = _graph(extra)
    _, (entered, gathered), example = _cross(gm, fake_group(4, 2))
    assert entered is example and not isinstance(gathered, DTensor) and gathered.shape == (2, 3)
    param, own = gm.graph.find_nodes(op="placeholder")
    assert [user.target for user in own.users] == [UNSHARD] and UNSHARD not in [u.target for u in param.users]


def test_to_local_with_arguments_stays(fake_group):
    gm = _graph(lambda graph, param, local: (), grad_placements=[Shard(0)])
    compiled, (entered,), example = _cross(gm, fake_group(4, 2))
    assert entered is example and compiled is gm


def test_a_local_read_beside_its_gather_is_not_padded(fake_group):
    """The mean of the local rows is another number than the mean of the padded ones."""
    gm = _graph(lambda graph, param, local: (graph.call_function(aten.mean.default, (local,)),))
    _, (entered,), _ = _cross(gm, fake_group(4, 2))
    means = gm.graph.find_nodes(op="call_function", target=aten.mean.default)
    reads_input = means[0].args[0].op == "placeholder"
    assert not (reads_input and entered.shape == (2, 3))


def test_plain_inputs_stay(fake_group):
    fake_group(2)
    graph = fx.Graph()
    graph.output((graph.call_function(aten.relu.default, (graph.placeholder("x"),)),))
    gm = fx.GraphModule(torch.nn.Module(), graph)
    assert cross_boundary(gm, [torch.ones(2)], lambda graph, inputs: graph) is gm


def _region(num_calls, extra=lambda graph, param, local: ()):
    """A graph that hands its parameter to a checkpointed region, which gathers it, some times."""
    body = _graph(extra)
    graph = fx.Graph()
    param = graph.placeholder("p")
    root = torch.nn.Module()
    root.body = body
    run = graph.get_attr("body")
    graph.output(tuple(graph.call_function(CHECKPOINTED_REGION, (run, param)) for _ in range(num_calls)))
    return fx.GraphModule(root, graph), body


def test_a_parameter_gathered_in_a_checkpointed_region_crosses(fake_group):
    gm, body = _region(1)
    compiled, (entered,), _ = _cross(gm, fake_group(4, 2))
    assert entered.shape == (2, 3) and not isinstance(entered, DTensor) and compiled is not gm
    assert not body.graph.find_nodes(op="call_method", target="to_local")
    assert "to_local" not in body.code


@pytest.mark.parametrize(
    ("num_calls", "extra"),
    [(2, lambda graph, param, local: ()), (1, lambda graph, param, local: (param,))],
    ids=["run twice", "used otherwise"],
)
def test_a_checkpointed_region_that_keeps_the_dtensor(fake_group, num_calls, extra):
    gm, body = _region(num_calls, extra)
    compiled, (entered,), example = _cross(gm, fake_group(4, 2))
    assert entered is example and compiled is gm
    assert body.graph.find_nodes(op="call_method", target="to_local")
