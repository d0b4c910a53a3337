"""CPU offload: shards, gradients and optimizer state on the CPU, copies as nodes around the collectives."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.implementations import EVERY
from support.parity import start_lockstep
from support.toy_models import WORKLOADS
from torch import fx, nn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.lowering import lowerings
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from graphshard import fully_shard
from graphshard.backend import compilation
from graphshard.backend.inductor.host_copies import start_copies, waiting
from graphshard.backend.options import BackendOptions
from graphshard.errors import ParameterStateError, UnsupportedShardingError
from graphshard.ir.collectives import ALL_GATHER, REDUCE_SCATTER, WAIT
from graphshard.ir.params import UnshardCall, gradient_call
from graphshard.ir.rewrite import GraphEmitter, output_values
from graphshard.ir.shard_ops import REDUCE_GRAD, UNSHARD
from graphshard.passes import BucketCollectives, LowerShards, ScheduleCollectives
from graphshard.pipeline.context import context_from_shard_ops
from graphshard.pipeline.facts import Fact
from graphshard.pipeline.pipeline import Pipeline

aten = torch.ops.aten
prims = torch.ops.prims
GPU = torch.device("cuda", 0)
CPU = torch.device("cpu")


def train_offloaded(implementation: str, pin_memory: bool) -> None:
    lockstep = start_lockstep(
        WORKLOADS["mlp_7_15_3"], implementation, offload_policy=CPUOffloadPolicy(pin_memory=pin_memory)
    )
    lockstep.train(3)


@pytest.mark.inductor
@pytest.mark.parametrize("implementation", EVERY)
def test_a_cpu_mesh_trains_with_the_policy(
    run_on_gloo_ranks: Callable[..., list[Any]], implementation: str
) -> None:
    # FSDP2 cannot pin memory where there is no accelerator; graphshard leaves it unpinned there.
    run_on_gloo_ranks(2, train_offloaded, implementation, implementation != "fsdp2")


def _call(name: str, unit: str, shape: list[int]) -> UnshardCall:
    return UnshardCall(
        shard=None, handle=None, name=name, unit=unit, shape=shape, dim=0, dtype=torch.bfloat16, reshard=2,
        reshard_group="", axis="shard", group_size=2, group_name="group", replicate_axis="", replicate_size=1,
        replicate_group="", reduce_dtype=torch.float32, divide_factor=None, force_sum=False, device=GPU,
    )  # fmt: skip


def _offloaded_graph(is_backward: bool) -> fx.GraphModule:
    """Two units of one parameter: gathers that a product on the GPU reads, or their reductions."""
    graph = fx.Graph()
    emit = GraphEmitter(graph)
    mode = FakeTensorMode()

    def add_input(name: str, *shape: int, device: torch.device, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = graph.placeholder(name)
        with mode:
            node.meta["val"] = torch.empty(shape, device=device, dtype=dtype)
        return node

    calls = [_call("a", "first", [5, 4]), _call("b", "second", [5, 4])]
    handle = add_input("handle", 0, device=CPU, dtype=torch.int8)
    shards = [add_input(f"primals_{index}", 3, 4, device=CPU) for index in range(2)]
    x = add_input("x", 6, 4, device=GPU, dtype=torch.bfloat16)
    fulls = [
        emit(UNSHARD, *call._replace(shard=shard, handle=handle))
        for call, shard in zip(calls, shards, strict=True)
    ]
    if is_backward:
        grads = [emit(aten.mul.Tensor, full, 2.0) for full in fulls]
        results = [
            emit(REDUCE_GRAD, *gradient_call(call._replace(handle=handle), grad, [3, 4], torch.float32, CPU))
            for call, grad in zip(calls, grads, strict=True)
        ]
    else:
        results = []
        for full in fulls:
            transposed = emit(aten.permute.default, full, [1, 0])
            results.append(emit(aten.mm.default, x, transposed))
    graph.output(results)
    return fx.GraphModule(nn.Module(), graph)


def _ops(gm: fx.GraphModule) -> list[Any]:
    return [node.target for node in gm.graph.nodes if node.op == "call_function"]


def _lower(gm: fx.GraphModule) -> fx.GraphModule:
    context = context_from_shard_ops(gm, full_checks=True)
    steps = (LowerShards(), BucketCollectives(), ScheduleCollectives(memory="any"))
    Pipeline(*steps, given=frozenset({Fact.TYPED, Fact.MERGED})).run(gm, context)
    return gm


def test_shards_are_copied_to_the_device_before_the_gather() -> None:
    gm = _lower(_offloaded_graph(is_backward=False))
    unit = [prims.device_put.default, prims.convert_element_type.default, ALL_GATHER]
    kept = [target for target in _ops(gm) if target in (*unit, WAIT, aten.mm.default)]
    # The second unit's copy and gather overlap with the first unit's product.
    assert kept == [*unit, WAIT, *unit, aten.mm.default, WAIT, aten.mm.default]
    copies = gm.graph.find_nodes(op="call_function", target=prims.device_put.default)
    assert all(node.args[1:] == (GPU, True) for node in copies)
    gathers = gm.graph.find_nodes(op="call_function", target=ALL_GATHER)
    assert all(node.args[0].meta["val"].device == GPU for node in gathers)
    assert all(node.args[0].meta["val"].dtype == torch.bfloat16 for node in gathers)


def test_gradients_are_copied_to_the_cpu_after_the_reduction() -> None:
    gm = _lower(_offloaded_graph(is_backward=True))
    for value in output_values(gm.graph):
        assert value.target is prims.device_put.default
        assert value.args[1:] == (CPU, False)
        assert value.meta["val"].device == CPU and value.meta["val"].dtype == torch.float32
        assert value.args[0].meta["val"].device == GPU
    reductions = gm.graph.find_nodes(op="call_function", target=REDUCE_SCATTER)
    assert [node.meta["val"].device for node in reductions] == [GPU, GPU]


def test_gradients_are_copied_beside_compute_and_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = _lower(_offloaded_graph(is_backward=True))
    assert start_copies(gm) == GPU
    assert all(value.args[1:] == (CPU, True) for value in output_values(gm.graph))
    assert start_copies(_lower(_offloaded_graph(is_backward=False))) is None
    done: list[str] = []
    stream = SimpleNamespace(synchronize=lambda: done.append("waited"))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: stream if device == GPU else None)
    run = waiting(lambda args: done.append("ran") or args, GPU)
    assert run([1]) == [1] and done == ["ran", "waited"]


def test_a_copy_that_the_graph_reads_waits() -> None:
    gm = _lower(_offloaded_graph(is_backward=True))
    first = output_values(gm.graph)[0]
    with gm.graph.inserting_before(gm.graph.output_node()):
        read = gm.graph.call_function(aten.neg.default, (first,))
    gm.graph.output_node().args = ([*output_values(gm.graph), read],)
    start_copies(gm)
    assert [value.args[2] for value in output_values(gm.graph)[:2]] == [False, True]


@pytest.mark.parametrize(("config", "is_refused"), [("cpu:gloo,cuda:gloo", True), ("cpu:gloo,cuda:nccl", False)])
def test_gloo_does_not_gather_on_gpus(
    monkeypatch: pytest.MonkeyPatch, fake_cuda_mesh: DeviceMesh, config: str, is_refused: bool
) -> None:
    gm = _lower(_offloaded_graph(is_backward=False))
    monkeypatch.setattr(compilation, "group_by_name", lambda name: dist.group.WORLD)
    monkeypatch.setattr(dist, "get_backend_config", lambda group: config)
    if not is_refused:
        compilation.refuse_gloo_on_gpus(gm)
        return
    with pytest.raises(UnsupportedShardingError, match=r"gloo cannot gather cuda tensors .*cpu:gloo,cuda:nccl"):
        compilation.hand_over(*_handed_over(gm))


@pytest.mark.parametrize("are_shards_pinned", [False, True])
def test_copies_wait_for_nobody_where_shards_are_pinned(
    monkeypatch: pytest.MonkeyPatch, fake_cuda_mesh: DeviceMesh, are_shards_pinned: bool
) -> None:
    """Pinned memory is the user's choice, for gradients too."""
    gm = _lower(_offloaded_graph(is_backward=True))
    monkeypatch.setattr(compilation, "group_by_name", lambda name: dist.group.WORLD)
    monkeypatch.setattr(compilation, "name_groups_by_axis", lambda gm, mesh: None)
    monkeypatch.setattr(compilation, "compile_fx_inner", lambda gm, inputs, **arguments: list)
    variant = compilation.hand_over(*_handed_over(gm, are_shards_pinned=are_shards_pinned))
    assert [value.args[2] for value in output_values(gm.graph)] == [are_shards_pinned] * 2
    assert (variant.run is not list) == are_shards_pinned


def _handed_over(gm: fx.GraphModule, *, are_shards_pinned: bool = False) -> tuple[Any, Any]:
    """A task and its half, as far as the last step reads them."""
    options = BackendOptions(hardware=None, bucket="unit")
    graph = SimpleNamespace(
        options=options,
        are_shards_pinned=are_shards_pinned,
        are_ranks_compared=False,
        is_ahead=False,
        is_on_gloo=lambda name: False,
    )
    observer = SimpleNamespace(inductor=lambda stage: nullcontext())
    task = SimpleNamespace(graph=graph, kind="backward", observer=observer, compiler_arguments={})
    return task, SimpleNamespace(
        gm=gm, example_inputs=[], stage="backward", context=SimpleNamespace(mesh=None)
    )


@pytest.mark.parametrize("is_backward", [False, True])
def test_inductor_generates_code_for_the_copies(is_backward: bool) -> None:
    """It refuses ops that it has a decomposition but no lowering for: passes run behind its decompositions."""
    targets = {target for target in _ops(_lower(_offloaded_graph(is_backward))) if target in select_decomp_table()}
    assert prims.device_put.default in lowerings and targets <= lowerings.keys()


def test_shards_stay_on_the_cpu_of_a_gpu_mesh(
    monkeypatch: pytest.MonkeyPatch, fake_cuda_mesh: DeviceMesh
) -> None:
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    model = fully_shard(
        nn.Linear(4, 5),
        mesh=fake_cuda_mesh,
        offload_policy=CPUOffloadPolicy(),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    )
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor) and parameter.device_mesh.device_type == "cuda"
        assert parameter.to_local().device == CPU and parameter.device == CPU
    call = UnshardCall(None, None, *model._graphshard_slots["weight"].arguments)
    assert call.device == GPU


def test_parameters_elsewhere_are_listed(monkeypatch: pytest.MonkeyPatch, fake_cuda_mesh: DeviceMesh) -> None:
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    model = fully_shard(nn.Linear(4, 5), mesh=fake_cuda_mesh, offload_policy=CPUOffloadPolicy())
    with FakeTensorMode():
        elsewhere = torch.empty(3, 4, device="cuda")
    weight = model._parameters["weight"]
    model._parameters["weight"] = nn.Parameter(DTensor(elsewhere, weight._spec, requires_grad=False))
    message = r"these do not: \(weight, cuda:0\); load them there"
    # Without a GPU there is no autograd for its tensors.
    with torch.no_grad(), pytest.raises(ParameterStateError, match=message) as error:
        model._graphshard_unit.start_unshard()
    assert isinstance(error.value, RuntimeError)


@pytest.fixture
def fake_cuda_mesh() -> Iterator[DeviceMesh]:
    """A mesh of two GPUs that are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cuda", (2,))
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU")
@pytest.mark.parametrize("is_compiled", [False, True])
@pytest.mark.parametrize("pin_memory", [False, True])
def test_a_gpu_trains_what_the_cpu_holds(is_compiled: bool, pin_memory: bool) -> None:
    """One GPU: five Adam steps against the unsharded model on the same GPU."""
    store = dist.HashStore()
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    try:
        torch.manual_seed(42)
        reference = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        model.load_state_dict(reference.state_dict())
        reference.to("cuda")
        policy = CPUOffloadPolicy(pin_memory=pin_memory)
        mesh = init_device_mesh("cuda", (1,))
        fully_shard(model[0], mesh=mesh, offload_policy=policy)
        fully_shard(model, mesh=mesh, offload_policy=policy)
        assert all(parameter.to_local().is_pinned() == pin_memory for parameter in model.parameters())
        forward = torch.compile(model, backend="graphshard") if is_compiled else model
        optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (reference, model)]
        for step in range(5):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
            expected, found = reference(x.cuda()).square().mean(), forward(x).square().mean()
            torch.testing.assert_close(found, expected)
            expected.backward()
            found.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        for name, parameter in model.named_parameters():
            assert parameter.to_local().device == CPU
            torch.testing.assert_close(parameter.to_local(), reference.get_parameter(name).detach().cpu())
    finally:
        dist.destroy_process_group()
