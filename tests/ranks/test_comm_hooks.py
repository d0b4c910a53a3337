"""A user's own collectives, hooks on the reduced gradient, and tensors that say how they are gathered."""

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils._pytree as pytree
from support.implementations import EVERY, UNCOMPILED, compile_if_asked, pick_fully_shard, world_mesh
from support.parity import check_sharded_parity
from support.torch_versions import NEEDS_MESH_PER_PARAMETER, ShardPlacementResult
from support.toy_models import build_mlp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.testing import assert_close

from graphshard.errors import ParameterStateError

from .test_refusals import expect_error


class CountingAllGather:
    """All-gather into one buffer that is handed out again and again."""

    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.buffers: dict[int, Tensor] = {}

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        (numel,) = size
        return self.buffers.setdefault(numel, torch.empty(numel, dtype=dtype, device=device))

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False
    ) -> Any:
        self.sizes.append(output_tensor.numel())
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # its name on torch 2.11
        return gather(output_tensor, input_tensor, group=group, async_op=async_op)


class CountingReduceScatter:
    """Reduce-scatter in fresh buffers."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        self.sizes.append(input_tensor.numel())
        reduce = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
        return reduce(output_tensor, input_tensor, op=op, group=group, async_op=async_op)


def _pair(implementation: str, **options: Any) -> tuple[nn.Module, nn.Module]:
    """An unsharded model of 5 and 3 rows, and the same with its first layer and the rest as units."""
    torch.manual_seed(42)
    reference = build_mlp((4, 5), (5, 3))
    model = copy.deepcopy(reference)
    fully_shard = pick_fully_shard(implementation)
    fully_shard(model[0], mesh=world_mesh(), **options)
    fully_shard(model, mesh=world_mesh(), **options)
    return reference, model


def _step(reference: nn.Module, forward: Callable[..., Tensor], step: int) -> None:
    inputs = [torch.full((3, 4), 0.5 + rank + step) for rank in range(dist.get_world_size())]
    for each in inputs:
        (reference(each).square().mean() / len(inputs)).backward()
    forward(inputs[dist.get_rank()]).square().mean().backward()


def train_with_custom_collectives(implementation: str) -> tuple[list[int], list[int]]:
    reference, model = _pair(implementation)
    gather, reduce = CountingAllGather(), CountingReduceScatter()
    model[0].set_custom_all_gather(gather)
    model[0].set_custom_reduce_scatter(reduce)
    forward = compile_if_asked(implementation, model, verify="full")
    for step in range(2):
        _step(reference, forward, step)
        check_sharded_parity(reference, model)
    return gather.sizes, reduce.sizes


@pytest.mark.inductor
@pytest.mark.parametrize("implementation", EVERY)
def test_custom_collectives_serve_their_unit(
    run_on_gloo_ranks: Callable[..., list[Any]], implementation: str
) -> None:
    """One call per unit and direction, with the padded shards of weight [6, 4] and bias [6] in one buffer."""
    numel = 6 * 4 + 6
    for gathers, reductions in run_on_gloo_ranks(2, train_with_custom_collectives, implementation):
        # Uncompiled, the first layer is gathered again for its backward, which reads none of its weights.
        assert gathers == [numel] * (2 if implementation == "compiled" else 4)
        assert reductions == [numel] * 2


class BrokenAllGather(CountingAllGather):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.no_such_attribute


def gather_with_a_mistake() -> None:
    """The error of the user's code is not taken for an attribute that the module lacks."""
    model = pick_fully_shard("sharded")(nn.Linear(4, 6), mesh=world_mesh())
    model.set_custom_all_gather(BrokenAllGather())
    complaint = r"parameter weight cannot be gathered: .* no attribute 'no_such_attribute'"
    with pytest.raises(ParameterStateError, match=complaint):
        model(torch.ones(3, 4))


def test_a_mistake_in_a_custom_gather_is_told(run_on_gloo_ranks: Callable[..., list[Any]]) -> None:
    run_on_gloo_ranks(2, gather_with_a_mistake)


def gather_on_two_meshes(implementation: str) -> list[int]:
    """One unit whose weights and biases are cut over different groups: the collective serves each of them."""
    torch.manual_seed(42)
    reference = nn.Linear(4, 6)
    model = copy.deepcopy(reference)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    other = FSDPMeshInfo(mesh["b"], shard_mesh_dim=0)
    own = FSDPMeshInfo(world_mesh(), shard_mesh_dim=0)

    def place(parameter: nn.Parameter) -> ShardPlacementResult:
        return ShardPlacementResult(placement=None, mesh_info=other if parameter.ndim == 1 else own)

    pick_fully_shard(implementation)(model, mesh=own.mesh, shard_placement_fn=place)
    gather = CountingAllGather()
    if implementation == "fsdp2":
        with pytest.raises(ValueError, match="group"):
            model.set_custom_all_gather(gather)
        return []
    model.set_custom_all_gather(gather)
    inputs = torch.ones(3, 4)
    for forward in (reference, compile_if_asked(implementation, model)):
        forward(inputs).square().mean().backward()
    for one, parameter in zip(reference.parameters(), model.parameters(), strict=True):
        assert_close(parameter.grad.full_tensor(), one.grad)
    return sorted(gather.sizes)


@NEEDS_MESH_PER_PARAMETER
@pytest.mark.parametrize("implementation", EVERY)
def test_custom_collectives_of_a_unit_on_two_meshes(
    run_on_gloo_ranks: Callable[..., list[Any]], implementation: str
) -> None:
    """FSDP2 refuses."""
    sizes = [] if implementation == "fsdp2" else [6, 8 * 4]
    assert run_on_gloo_ranks(4, gather_on_two_meshes, implementation) == [sizes] * 4


def train_with_hook(implementation: str, hybrid: bool) -> list[int]:
    """The hook triples the sum of the first layer, with a collective of its own."""
    torch.manual_seed(42)
    reference = build_mlp((4, 5), (5, 3))
    model = copy.deepcopy(reference)
    fully_shard = pick_fully_shard(implementation)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard")) if hybrid else world_mesh()
    for module in (model[0], model):
        fully_shard(module, mesh=mesh)
    sizes: list[int] = []

    def hook(flat: Tensor) -> None:
        sizes.append(flat.numel())
        factor = torch.ones(1)
        dist.all_reduce(factor)
        flat.mul_(factor + 1)

    model[0].set_all_reduce_hook(hook)
    forward = compile_if_asked(implementation, model, verify="full")
    _step(reference, forward, 0)
    for name, parameter in model.named_parameters():
        expected = dict(reference.named_parameters())[name].grad
        factor = 3.0 if name.startswith("0.") else 1.0
        assert_close(parameter.grad.full_tensor(), expected * factor, msg=lambda text, name=name: name + text)
    return sizes


@pytest.mark.inductor
@pytest.mark.parametrize("implementation", EVERY)
def test_a_hook_changes_the_sum(run_on_gloo_ranks: Callable[..., list[Any]], implementation: str) -> None:
    assert run_on_gloo_ranks(2, train_with_hook, implementation, False) == [[3 * 4 + 3]] * 2


@pytest.mark.parametrize("implementation", EVERY)
def test_a_hook_follows_the_all_reduce(
    run_on_gloo_ranks: Callable[..., list[Any]], implementation: str
) -> None:
    assert run_on_gloo_ranks(2, train_with_hook, implementation, True) == [[5 * 4 + 5]] * 2


def give_a_stream(implementation: str) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    model = pick_fully_shard(implementation)(nn.Linear(4, 4), mesh=mesh)
    with expect_error(implementation, ValueError, graphshard_says="with hybrid sharding .* leave stream out"):
        model.set_all_reduce_hook(lambda flat: None, stream=object())


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_no_stream_with_hybrid_sharding(
    run_on_gloo_ranks: Callable[..., list[Any]], implementation: str
) -> None:
    run_on_gloo_ranks(2, give_a_stream, implementation)


def train_with_separate_group(implementation: str) -> None:
    reference, model = _pair(implementation)
    model.set_separate_reduce_scatter_group()
    groups = {unit.settings.reduce_group for unit in model._graphshard_unit.tree.units()}
    assert len(groups) == 1 and groups != {world_mesh().get_group().group_name} and groups != {""}
    forward = compile_if_asked(implementation, model, verify="full")
    _step(reference, forward, 0)
    check_sharded_parity(reference, model)
    model.set_separate_reduce_scatter_group(False)
    _step(reference, forward, 1)
    check_sharded_parity(reference, model)


@pytest.mark.parametrize("implementation", ["sharded", pytest.param("compiled", marks=pytest.mark.slow)])
def test_reductions_on_a_group_of_their_own(
    run_on_gloo_ranks: Callable[..., list[Any]], implementation: str
) -> None:
    run_on_gloo_ranks(2, train_with_separate_group, implementation)


class Halved(Tensor):
    """A weight that travels in bfloat16, whatever its own dtype."""

    _data: Tensor

    @staticmethod
    def __new__(cls, data: Tensor) -> "Halved":
        return Tensor._make_wrapper_subclass(
            cls, data.shape, data.stride(), dtype=data.dtype, device=data.device
        )

    def __init__(self, data: Tensor) -> None:
        self._data = data

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._data})"

    def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, policy: Any):
        assert mesh.ndim == 1 and len(outer_size) == 2 and isinstance(module, nn.Linear)
        rows = -(-outer_size[0] // mesh.size())
        padded = nn.functional.pad(self._data, (0, 0, 0, rows - self._data.shape[0]))
        return (padded.to(torch.bfloat16),), "metadata"

    def fsdp_post_all_gather(
        self, gathered: tuple[Tensor, ...], metadata: Any, dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        assert metadata == "metadata"
        (whole,) = gathered
        if out is not None:
            with torch.no_grad():
                out.copy_(whole[: out.shape[0]].to(dtype))
            return None
        full = whole.to(dtype)
        return full, (whole, full)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        plain = pytree.tree_map_only(cls, lambda each: each._data, (args, kwargs or {}))
        result = func(*plain[0], **plain[1])
        if func is torch.ops.aten.copy_.default or func.__name__.split(".")[0].endswith("_"):
            return args[0]
        return pytree.tree_map_only(Tensor, cls, result)


class HalvedWithMeshOnly(Halved):
    """The older form of the extension."""

    def fsdp_pre_all_gather(self, mesh: Any):
        return (self._data.to(torch.bfloat16),), "metadata"


def _extend(model: nn.Module, kind: type[Halved]) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(kind(module.weight.detach().clone()))


def train_with_extension(implementation: str, kind: type[Halved], rows: int) -> None:
    torch.manual_seed(42)
    reference = build_mlp((4, rows), (rows, rows))
    model = copy.deepcopy(reference)
    _extend(model, kind)
    fully_shard = pick_fully_shard(implementation)
    fully_shard(model[0], mesh=world_mesh())
    fully_shard(model, mesh=world_mesh())
    forward = compile_if_asked(implementation, model, fullgraph=False)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (reference, model)]
    for step in range(3):
        rounded = copy.deepcopy(reference)
        for module in rounded.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = module.weight.data.bfloat16().float()
        _step(rounded, forward, step)
        for (name, plain), (_, parameter) in zip(
            rounded.named_parameters(), model.named_parameters(), strict=True
        ):
            gradient = parameter.grad.to_local()
            expected = plain.grad.chunk(2)[dist.get_rank()]
            assert_close(gradient, expected, msg=lambda text, name=name: f"{name}: {text}")
            reference.get_parameter(name).grad = plain.grad
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    local = model[0].weight.to_local()
    assert type(local) is kind
    assert_close(local._data, reference[0].weight.detach().chunk(2)[dist.get_rank()])


@pytest.mark.parametrize("implementation", EVERY)
@pytest.mark.parametrize(("kind", "rows"), [(Halved, 5), (HalvedWithMeshOnly, 6)])
def test_tensors_say_how_they_are_gathered(
    run_on_gloo_ranks: Callable[..., list[Any]], implementation: str, kind: type[Halved], rows: int
) -> None:
    """Compiled, the layers that hold them run uncompiled."""
    run_on_gloo_ranks(2, train_with_extension, implementation, kind, rows)


class _SecondExtended(nn.Module):
    """Two layers in a unit, of which the second alone has an extension."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x)))


def train_one_unit_with_extension(disabled: bool) -> None:
    """One unit with plain and extended parameters: the compiled part and the other get the same gradients."""
    torch.manual_seed(42)
    results = []
    reference = _SecondExtended()
    for implementation in ("sharded", "compiled"):
        model = copy.deepcopy(reference)
        model.second.weight = nn.Parameter(Halved(model.second.weight.detach().clone()))
        pick_fully_shard(implementation)(model, mesh=world_mesh())
        if disabled:
            model.second.forward = torch.compiler.disable(model.second.forward)
        forward = compile_if_asked(implementation, model, fullgraph=False)
        loss = forward(torch.full((3, 4), 0.5 + dist.get_rank())).square().mean()
        loss.backward()
        results.append([loss.detach(), *(each.grad.to_local() for each in model.parameters())])
    assert_close(*results)


@pytest.mark.parametrize("disabled", [False, True])
def test_extended_and_plain_parameters_of_a_compiled_unit(
    run_on_gloo_ranks: Callable[..., list[Any]], disabled: bool
) -> None:
    run_on_gloo_ranks(2, train_one_unit_with_extension, disabled)


def compile_with_extension() -> str:
    """With `fullgraph=True`, which leaves no way to run the layer uncompiled."""
    model = nn.Sequential(nn.Linear(4, 6))
    _extend(model, Halved)
    pick_fully_shard("sharded")(model, mesh=world_mesh())
    try:
        compile_if_asked("compiled", model)(torch.ones(2, 4))
    except Exception as error:
        return str(error)
    return "no error"


def test_extensions_are_refused_in_a_whole_graph(run_on_gloo_ranks: Callable[..., list[Any]]) -> None:
    for message in run_on_gloo_ranks(2, compile_with_extension):
        assert "parameter 0.weight has an all-gather extension (fsdp_pre_all_gather)" in message, message
        assert "compile without fullgraph=True" in message, message


class Half(Halved):
    """Only one of the two methods."""

    fsdp_post_all_gather = property()


def incomplete_extension(implementation: str) -> None:
    model = nn.Linear(4, 6)
    model.weight = nn.Parameter(Half(model.weight.detach()))
    with expect_error(
        implementation, AssertionError, graphshard_says="weight: Half has fsdp_pre_all_gather only"
    ):
        pick_fully_shard(implementation)(model, mesh=world_mesh())(torch.ones(2, 4))


def wrong_padding() -> str:
    from graphshard.errors import AgreementError, ExtensionError

    model = nn.Linear(4, 5)

    class Unpadded(Halved):
        def fsdp_pre_all_gather(self, mesh: Any, size: Any, stride: Any, module: Any, policy: Any):
            return (self._data,), None

    model.weight = nn.Parameter(Unpadded(model.weight.detach()))
    mesh = pick_fully_shard("sharded")(model, mesh=world_mesh())
    if dist.get_rank() == 0:
        return "would wait for rank 1"
    try:
        mesh(torch.ones(2, 4))
    except (AgreementError, ExtensionError) as error:
        return str(error)
    return "no error"


def test_an_incomplete_extension_is_refused(run_on_gloo_ranks: Callable[..., list[Any]]) -> None:
    for implementation in UNCOMPILED:
        run_on_gloo_ranks(2, incomplete_extension, implementation)
    _, message = run_on_gloo_ranks(2, wrong_padding)
    assert "must return inputs of the padded shape (3, 4), not [(2, 4)]" in message
