"""FSDPModule has what torch's has: every method, checked arguments, reasons where it refuses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.fsdp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining._backward import stage_backward_input
from torch.distributed.tensor import DTensor

import graphshard
from graphshard.errors import GraphShardError, UnsupportedShardingError
from graphshard.fsdp.state import slots_of
from graphshard.ir.params import UnshardCall

Mesh = Callable[..., DeviceMesh]


class Comm:
    """A collective in name only."""

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, **_: Any) -> None: ...


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        """Doc of encode."""
        return 2 * self.inner(x)


def _sharded(mesh: DeviceMesh) -> Any:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    graphshard.fully_shard(model[0], mesh=mesh)
    return graphshard.fully_shard(model, mesh=mesh)


@pytest.mark.parametrize(
    "name", [name for name in dir(torch.distributed.fsdp.FSDPModule) if not name.startswith("_")]
)
def test_every_method_is_our_own(name: str) -> None:
    assert callable(vars(graphshard.FSDPModule)[name])


def test_a_unit_is_a_module_of_torchs_fsdp(fake_group: Mesh) -> None:
    model = _sharded(fake_group(2))
    assert isinstance(model, torch.distributed.fsdp.FSDPModule)
    assert not isinstance(model[1], torch.distributed.fsdp.FSDPModule)
    state = torch.distributed.fsdp.fully_shard.state(model)
    assert state.unit is model._graphshard_unit
    copied = copy.deepcopy(model)
    assert torch.distributed.fsdp.fully_shard.state(copied).unit is copied._graphshard_unit
    assert copied._graphshard_unit is not model._graphshard_unit


def test_the_state_of_fsdp2_is_refused(fake_group: Mesh) -> None:
    model = graphshard.fully_shard(Encoder(), mesh=fake_group(1))
    torch.distributed.fsdp.register_fsdp_forward_method(model, "encode")
    with pytest.raises(UnsupportedShardingError, match="import register_fsdp_forward_method"):
        model.encode(torch.ones(4))
    with pytest.raises(UnsupportedShardingError, match=r"unit root .* has no state\.lazy_init"):
        torch.distributed.fsdp.fully_shard.state(model).lazy_init()


def test_state_is_that_of_the_unit(fake_group: Mesh) -> None:
    """As `fully_shard.state` of torch: one object for each unit, also for several modules; else None."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    mesh = fake_group(1)
    graphshard.fully_shard([model[0], model[1]], mesh=mesh)
    assert graphshard.fully_shard.state(model) is None
    graphshard.fully_shard(model, mesh=mesh)
    states = [graphshard.fully_shard.state(module) for module in (model, model[0], model[1])]
    assert len(set(states)) == 2 and states[1] == states[2]
    assert graphshard.fully_shard.state(model[2]) is None


@pytest.mark.parametrize(
    "name",
    [
        "CPUOffloadPolicy",
        "FSDPModule",
        "MixedPrecisionPolicy",
        "OffloadPolicy",
        "UnshardHandle",
        "fully_shard",
        "register_fsdp_forward_method",
        "share_comm_ctx",
    ],
)
def test_what_torch_exports_is_exported(name: str) -> None:
    assert name in graphshard.__all__ and hasattr(torch.distributed.fsdp, name)
    assert hasattr(graphshard, name)


def test_every_public_name_is_listed_before_it_is_imported() -> None:
    """Some are only imported once they are asked for, which completion of names does not do."""
    assert set(graphshard.__all__) <= set(dir(graphshard))


REFUSED: list[tuple[str, tuple[Any, ...], type[Exception], str]] = [
    ("set_reduce_scatter_max_input_buffers", (0,), ValueError, "0 must be at least 1"),
    ("set_reduce_scatter_max_input_buffers", (2.5,), TypeError, "2.5 is a float; give an int"),
    ("set_reduce_scatter_max_input_buffers", (True,), TypeError, "True is a bool; give an int"),
    ("set_custom_all_gather", (print,), ValueError, "is no collective; it needs allocate"),
    ("set_custom_reduce_scatter", (object(),), ValueError, "a object is no collective"),
    ("set_all_reduce_hook", (3,), ValueError, "3 is not callable"),
    (
        "set_reduce_scatter_unused_params",
        (1,),
        ValueError,
        "reduce_scatter_unused_params=1 must be True or False",
    ),
    ("set_allocate_memory_from_process_group_for_comm", (True,), NotImplementedError, "belong to Inductor"),
    ("set_keep_unsharded_storage", (True,), NotImplementedError, "each gather has memory of its own"),
    ("set_keep_unsharded_storage", (1,), ValueError, "keep=1 must be True or False"),
    ("set_manual_backward_finalization", ("yes",), ValueError, "enabled='yes' must be True or False"),
    ("set_symm_mem_for_comm", (), NotImplementedError, "set_symm_mem_for_comm is not supported"),
    ("set_symm_mem_for_comm", ("MPI",), ValueError, "backend='MPI' must be 'NCCL'"),
    ("set_unshard_in_backward", (None,), ValueError, "unshard_in_backward=None must be True or False"),
]


@pytest.mark.parametrize(("method", "arguments", "kind", "text"), REFUSED)
def test_bad_arguments_are_refused(
    fake_group: Mesh, method: str, arguments: tuple[Any, ...], kind: type[Exception], text: str
) -> None:
    model = _sharded(fake_group(2))
    with pytest.raises(kind, match=text) as caught:
        getattr(model, method)(*arguments)
    assert isinstance(caught.value, GraphShardError)


def test_a_stream_is_refused(fake_group: Mesh) -> None:
    with pytest.raises(UnsupportedShardingError, match="switch streams inside the hook"):
        _sharded(fake_group(2)).set_all_reduce_hook(print, stream=object())


def test_split_backwards_are_refused_where_torch_gets_them_wrong(fake_group: Mesh) -> None:
    """As torch 2.11 and 2.12 do."""
    model, x = _sharded(fake_group(2)), torch.ones(2, 4, requires_grad=True)
    outputs = [model(x).sum()]
    with (
        mock.patch("graphshard.fsdp.read_parameter.HALVES_ADD_UP", False),
        pytest.raises(UnsupportedShardingError, match="adds some gradients of a unit more than once"),
    ):
        stage_backward_input(outputs, None, [x], model.parameters())


@pytest.mark.parametrize(
    "method", ["set_allocate_memory_from_process_group_for_comm", "set_symm_mem_for_comm"]
)
def test_own_buffers_contradict_own_collectives(fake_group: Mesh, method: str) -> None:
    model = _sharded(fake_group(2))
    model.set_custom_all_gather(Comm())
    arguments = (True,) if method.startswith("set_alloc") else ()
    with pytest.raises(AssertionError, match="this unit has a custom collective"):
        getattr(model, method)(*arguments)


def test_switches_without_effect_are_accepted(fake_group: Mesh) -> None:
    model = _sharded(fake_group(2))
    settings = model._graphshard_unit.settings
    before = str(settings)
    model.set_allocate_memory_from_process_group_for_comm(False)
    model.set_unshard_in_backward(False)
    model._set_unshard_async_op(True)
    assert model._graphshard_unit.settings is settings and str(settings) == before


def test_the_largest_number_of_buffers_counts(fake_group: Mesh) -> None:
    mesh = fake_group(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    graphshard.fully_shard(model[0], mesh=mesh)
    model[0].set_reduce_scatter_max_input_buffers(3)
    graphshard.fully_shard(model, mesh=mesh)
    model.set_reduce_scatter_max_input_buffers(2, recurse=False)
    units = model._graphshard_unit.tree.units()
    assert [unit.settings.max_reductions for unit in units] == [2, 3]
    calls = [UnshardCall(None, None, *slot.arguments) for unit in units for slot in unit.slots]
    assert [call.max_reductions for call in calls] == [3] * 4


def test_post_optim_event_is_waited_for(fake_group: Mesh) -> None:
    class Event:
        waited = 0

        def wait(self) -> None:
            self.waited += 1

    event = Event()
    _sharded(fake_group(2)).set_post_optim_event(event)
    assert event.waited == 1


def test_post_optim_event_of_a_cpu(fake_group: Mesh) -> None:
    """The stream of a CPU records none."""
    _sharded(fake_group(2)).set_post_optim_event(torch.cpu.current_stream().record_event())


def test_share_comm_ctx(fake_group: Mesh) -> None:
    model = _sharded(fake_group(2))
    graphshard.share_comm_ctx([])
    graphshard.share_comm_ctx([model, model[0]])
    with pytest.raises(ValueError, match="share_comm_ctx: a Linear is not an FSDPModule") as caught:
        graphshard.share_comm_ctx([model, model[1]])
    assert isinstance(caught.value, GraphShardError)


def test_register_forward_method_checks_its_arguments(fake_group: Mesh) -> None:
    plain = Encoder()
    graphshard.register_fsdp_forward_method(plain, "nothing")
    assert "nothing" not in plain.__dict__
    model = graphshard.fully_shard(Encoder(), mesh=fake_group(2))
    with pytest.raises(ValueError, match="FSDPEncoder has no method 'nothing'") as caught:
        graphshard.register_fsdp_forward_method(model, "nothing")
    assert isinstance(caught.value, GraphShardError)
    graphshard.register_fsdp_forward_method(model, "encode")
    assert model.encode.__doc__ == "Doc of encode." and model.encode.__self__ is model


def test_only_the_outermost_forward_marks_the_tree(fake_group: Mesh, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _sharded(fake_group(1))
    marks: list[str] = []

    class Marks(list[bool]):
        def append(self, value: bool) -> None:
            marks.append("enter")
            super().append(value)

        def clear(self) -> None:
            marks.append("leave")
            super().clear()

    model._graphshard_unit.tree.forwards = Marks()
    model(torch.ones(4))
    assert marks == ["enter", "leave"] and not model._graphshard_unit.tree.in_forward


def test_reset_is_for_the_root(fake_group: Mesh) -> None:
    model = _sharded(fake_group(2))
    model.reset_iter_state()
    with pytest.raises(RuntimeError, match="called on unit 0; call it on the outermost") as caught:
        model[0].reset_iter_state()
    assert isinstance(caught.value, GraphShardError)


def test_a_slice_is_a_plain_container_of_units(fake_group: Mesh) -> None:
    model = _sharded(fake_group(2))
    part = model[:1]
    assert type(part) is nn.Sequential and part[0] is model[0]
    assert part(torch.ones(2, 4)).shape == (2, 4)
    assert type(model[0]).__name__ == "FSDPLinear" and type(model).__name__ == "FSDPSequential"


@pytest.mark.parametrize("name", ["get_cls_to_fsdp_cls", "disable_fsdp_module_new_init"])
def test_private_helpers_of_torch_are_left_out(name: str) -> None:
    assert not hasattr(graphshard, name) and name not in torch.distributed.fsdp.__all__


@pytest.mark.parametrize("is_between", [True, False])
def test_a_shard_that_is_replaced_is_told(fake_group: Mesh, is_between: bool) -> None:
    """By a tensor, in the dict of parameters: between forward and backward, and before a forward."""
    model = _sharded(fake_group(2))
    loss = model(torch.ones(2, 4)).sum()
    model[0]._parameters["weight"] = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(
        RuntimeError, match=r"0\.weight was replaced by a Parameter.*use distribute_tensor"
    ) as caught:
        loss.backward() if is_between else model(torch.ones(2, 4))
    assert isinstance(caught.value, GraphShardError)


def test_a_forward_shows_the_shards_again_though_they_changed_while_gathered(fake_group):
    model = graphshard.fully_shard(nn.Linear(8, 8), mesh=fake_group(2), reshard_after_forward=True)
    model.unshard()
    assert not any(isinstance(param, DTensor) for param in model.parameters())
    with torch.no_grad():
        for _, slot in slots_of(model):
            slot.param.add_(1.0)
    model(torch.zeros(2, 8))
    assert all(isinstance(param, DTensor) for param in model.parameters())


@pytest.mark.parametrize("shard", [graphshard.fully_shard, graphshard.FullyShardedDataParallel])
def test_without_a_mesh_a_torch_for_gpus_uses_the_cpu_where_there_is_no_gpu(monkeypatch, fake_group, shard):
    """That torch names "cuda" all the same, unless it is asked whether there is one."""
    fake_group(2)
    torch_of_gpus = {False: torch.device("cuda"), True: None}
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available=False: torch_of_gpus[check_available]
    )
    weight = next(shard(nn.Linear(4, 4)).parameters())
    assert weight.device_mesh.device_type == "cpu"


def test_a_parameter_that_is_none(fake_group):
    """It reads as None, can become a parameter, and can be deleted, as in a plain module."""
    model = graphshard.fully_shard(nn.Linear(4, 4, bias=False), mesh=fake_group(2))
    assert model.bias is None and list(dict(model.named_parameters())) == ["weight"]
    model.bias = nn.Parameter(torch.ones(4))
    assert torch.equal(model.bias, torch.ones(4)) and "bias" in dict(model.named_parameters())
    del model.bias
    with pytest.raises(AttributeError, match="no attribute 'bias'"):
        model.bias  # noqa: B018
    model.bias = "none"
    assert model.bias == "none"


@pytest.mark.filterwarnings("ignore:graphshard. this model was compiled by a backend that does not plan")
def test_a_layer_without_bias_reads_its_weight_once(fake_group):
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    graphshard.fully_shard(model, mesh=fake_group(2))
    read = []

    def backend(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        read.extend(node for node in gm.graph.nodes if "unshard" in str(node.target))
        return gm.forward

    torch.compile(model, backend=backend)(torch.ones(2, 4))
    assert len(read) == 2


def test_a_move_that_changes_nothing_is_allowed_in_a_step(fake_group: Mesh) -> None:
    """torch refuses to swap a DTensor that a graph of autograd holds."""
    model = _sharded(fake_group(2))
    shards = list(model.parameters())
    output = model(torch.ones(2, 4))
    model.to("cpu").float()
    output.sum().backward()
    assert all(
        one is other and one.grad is not None for one, other in zip(model.parameters(), shards, strict=True)
    )
    with pytest.raises(RuntimeError, match="swap"):
        kept = model(torch.ones(2, 4))
        model.double()
    kept.sum().backward()
    del output, kept
    num_calls: list[int] = []
    model._apply(lambda value: (num_calls.append(1), value.double())[1])
    assert len(num_calls) == 2 * len(shards), "each parameter and each gradient once"
    assert {param.dtype for param in model.parameters()} == {torch.float64}
    assert model(torch.ones(2, 4, dtype=torch.float64)).dtype == torch.float64
