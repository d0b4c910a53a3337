"""What stays gathered between a forward and its backward, where it differs from FSDP2."""

import copy

import pytest
import torch
import torch.distributed as dist
from support.comm_counts import count_collectives
from support.implementations import EVERY, compile_if_asked, shard_units
from support.toy_models import build_mlp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing import assert_close

from graphshard import fully_shard
from graphshard.errors import ParameterStateError

SIZES = ((6, 7), (7, 6), (6, 3))


def batch_of(rank: int, step: int) -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + rank))


def build(implementation: str, reshard_after_forward: bool | int | None) -> tuple[nn.Module, nn.Module]:
    """The unsharded model, and the same as two units and the root."""
    torch.manual_seed(42)
    reference = build_mlp(*SIZES)
    model = copy.deepcopy(reference)
    options = {} if reshard_after_forward is None else {"reshard_after_forward": reshard_after_forward}
    return reference, shard_units(implementation, model, [model[0], model[2]], **options)


def check_gradients(reference: nn.Module, model: nn.Module, step: int) -> None:
    """Those of the mean over ranks, then zeroed."""
    world_size = dist.get_world_size()
    for rank in range(world_size):
        (reference(batch_of(rank, step)).square().sum() / world_size).backward()
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_close(
            parameter.grad.full_tensor(), expected.grad, msg=lambda text, name=name: f"{name}: {text}"
        )
    model.zero_grad()
    reference.zero_grad()


def list_parameters_after_forward(implementation: str, reshard_after_forward: bool | None) -> list[str]:
    """Names of the parameters that are full tensors between a forward and its backward."""
    reference, model = build(implementation, reshard_after_forward)
    forward = compile_if_asked(implementation, model)
    loss = forward(batch_of(dist.get_rank(), 0)).square().sum()
    full = [name for name, parameter in model.named_parameters() if not isinstance(parameter, DTensor)]
    for (name, parameter), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
        assert_close(parameter if name in full else parameter.full_tensor(), whole)
    loss.backward()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    check_gradients(reference, model, 0)
    return full


@pytest.mark.parametrize("reshard_after_forward", [False, None])
@pytest.mark.parametrize("implementation", EVERY)
def test_parameters_after_a_forward(run_on_gloo_ranks, implementation, reshard_after_forward):
    """What an uncompiled unit keeps is shown, as by FSDP2; a compiled graph keeps it to itself."""
    kept = ["0.weight", "0.bias", "2.weight", "2.bias", "4.weight", "4.bias"]
    if reshard_after_forward is None:
        kept = kept[-2:]
    expected = kept if implementation != "compiled" else []
    assert (
        run_on_gloo_ranks(2, list_parameters_after_forward, implementation, reshard_after_forward)
        == [expected] * 2
    )


def look_after_forwards(implementation: str) -> None:
    """What parameters show after forwards of several kinds, and that a look changes no gradient."""
    reference, model = build(implementation, False)
    inputs = batch_of(dist.get_rank(), 0)

    def num_full() -> int:
        return sum(not isinstance(parameter, DTensor) for parameter in model.parameters())

    model(inputs)  # its result is dropped, and no backward comes
    assert num_full() == 6
    assert_close(model[0].weight.detach(), reference[0].weight.detach())
    assert model[0].get_parameter("bias").shape == (7,)
    model[0].reshard()
    assert num_full() == 4
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    assert num_full() == 0
    model(inputs)
    with torch.no_grad():
        for shard in (module._parameters["weight"] for module in (model[0], model[2], model[4])):
            assert not isinstance(shard, DTensor)
    model.zero_grad()
    losses = [model(inputs).square().sum()]
    if dist.get_rank() == 0:  # the other rank communicates as this one
        assert num_full() == 6
    losses.append(model(inputs).square().sum())
    sum(losses).backward()
    assert num_full() == 0
    check_gradients_of_two(reference, model)
    model(inputs)
    model[0].reshard()
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert num_full() == 4
    with torch.no_grad():
        model[0].weight.div_(2)
        model[2].weight.mul_(2)
    with pytest.raises(
        ParameterStateError, match=r"2\.weight were written to between a forward and its backward"
    ):
        model[2].reshard()
    with torch.no_grad():
        model(inputs)
    assert_close(model[0].weight.full_tensor(), reference[0].weight)
    assert_close(model[2].weight.full_tensor(), reference[2].weight)


def check_gradients_of_two(reference: nn.Module, model: nn.Module) -> None:
    """Those of two equal forwards: twice those of one."""
    for parameter in model.parameters():
        parameter.grad /= 2
    check_gradients(reference, model, 0)


@pytest.mark.parametrize("implementation", ["sharded"])
def test_what_a_look_between_forward_and_backward_changes(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, look_after_forwards, implementation)


def differentiate_between(implementation: str, reshard_after_forward: bool | None) -> None:
    """Parameters that are read between forward and backward, where some are shown gathered, stand for the shards.

    FSDP2 gives gradients of this rank, unreduced, or none where a unit is not kept; optimizers train nothing, silently.
    """
    reference, model = build(implementation, reshard_after_forward)
    inputs = batch_of(dist.get_rank(), 0)

    def loss() -> torch.Tensor:
        return model(inputs).square().sum()

    given = loss()
    gradients = torch.autograd.grad(given, list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    check_gradients(reference, model, 0)
    seen: dict[str, list[object]] = {"hooks": [], "ends": []}
    model.zero_grad()
    given = loss()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: seen["hooks"].append(type(gradient)))
        parameter.register_post_accumulate_grad_hook(
            lambda parameter: seen["ends"].append(type(parameter.grad))
        )
    given.backward()
    assert seen == {"hooks": [DTensor] * 6, "ends": [DTensor] * 6}
    given = loss()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad = None
    assert type(copy.deepcopy(model[4]).weight) is nn.Parameter
    with pytest.raises(
        ParameterStateError, match=r"weight is gathered here, between.*would train nothing: make the"
    ):
        torch.optim.SGD(model.parameters(), lr=0.1)
    given.backward()
    check_gradients(reference, model, 0)
    torch.optim.SGD(model.parameters(), lr=0.1)
    given = loss()
    for unit in (model[0], model[2], model):
        unit.reshard()
    torch.optim.SGD(model.parameters(), lr=0.1)
    given.backward(inputs=list(model.parameters()))
    given = loss()
    shown = [parameter for parameter in model.parameters() if not isinstance(parameter, DTensor)]
    given.backward(inputs=shown)
    with pytest.raises(
        ParameterStateError, match=r"backward\(inputs=...\) was given parameter\(s\) .*no gradient"
    ):
        print(shown[0].grad)
    with pytest.raises(
        ParameterStateError, match=r"backward\(inputs=...\) was given parameter\(s\) .*4.weight, 4.b"
    ):
        loss()
    for name in (
        ("0.weight", "2.weight") if reshard_after_forward is False else ()
    ):  # each unit tells of its own
        with pytest.raises(ParameterStateError, match=rf"was given parameter\(s\) {name}"):
            loss()
    model.zero_grad()
    loss().backward()  # a refused forward leaves nothing behind
    check_gradients(reference, model, 0)


@pytest.mark.parametrize("reshard_after_forward", [False, None])
def test_gradients_of_what_is_read_between_forward_and_backward(run_on_gloo_ranks, reshard_after_forward):
    run_on_gloo_ranks(2, differentiate_between, "sharded", reshard_after_forward)


def differentiate_distributed() -> None:
    """The same of parameters that are DTensors in a forward."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tp"))
    torch.manual_seed(0)
    plain = build_mlp((4, 6), (6, 2))
    model = copy.deepcopy(plain)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["shard"])
    inputs = torch.ones(3, 4)
    expected = torch.autograd.grad(plain(inputs).square().sum(), list(plain.parameters()))
    given = model(inputs).square().sum()
    assert [parameter.device_mesh.ndim for parameter in model.parameters()] == [1] * 4  # those of the forward
    with pytest.raises(
        ParameterStateError, match=r"0.weight is gathered here, between.*would train nothing: make the"
    ):
        torch.optim.SGD(model.parameters(), lr=0.1)
    gradients = torch.autograd.grad(given, list(model.parameters()))
    assert_close([gradient.full_tensor() for gradient in gradients], list(expected))
    given = model(inputs).square().sum()
    given.backward(inputs=list(model.parameters()))
    with pytest.raises(
        ParameterStateError, match=r"backward\(inputs=...\) was given parameter\(s\) 0.weight, 0.bias, 2."
    ):
        model(inputs)
    model(inputs).square().sum().backward()
    assert_close([parameter.grad.full_tensor() for parameter in model.parameters()], list(expected))


def test_gradients_of_what_tensor_parallelism_shows(run_on_gloo_ranks):
    run_on_gloo_ranks(4, differentiate_distributed)


def reshard_before_backward(implementation: str) -> int:
    """`reshard()` on every unit between forward and backward; the gathers of the backward."""
    reference, model = build(implementation, False)
    forward = compile_if_asked(implementation, model)
    for step in range(2):  # the first one compiles
        loss = forward(batch_of(dist.get_rank(), step).requires_grad_()).square().sum()
        for unit in (model[0], model[2], model):
            unit.reshard()
        with count_collectives() as counts:
            loss.backward()
        check_gradients(reference, model, step)
    assert counts["reductions"] == 3
    return counts.get("gathers", 0)


@pytest.mark.parametrize("implementation", EVERY)
def test_reshard_between_forward_and_backward(run_on_gloo_ranks, implementation):
    """Uncompiled, the backward gathers again. Compiled, autograd has what it needs. The gradients are right in both."""
    expected = 0 if implementation == "compiled" else 3
    assert run_on_gloo_ranks(2, reshard_before_backward, implementation) == [expected] * 2


def keep_after_backward(implementation: str) -> tuple[int, int]:
    """Units that free after the forward are told to keep after the backward; the gathers of the next step."""
    reference, model = build(implementation, True)
    model.set_reshard_after_backward(False)
    forward = compile_if_asked(implementation, model)
    for step in range(3):
        inputs = batch_of(dist.get_rank(), step).requires_grad_()
        with count_collectives() as in_forward:
            loss = forward(inputs).square().sum()
        with count_collectives() as in_backward:
            loss.backward()
        if implementation == "fsdp2":  # its parameters are the full ones now, which have no gradients
            assert not any(isinstance(parameter, DTensor) for parameter in model.parameters())
        else:
            check_gradients(reference, model, step)
    return in_forward.get("gathers", 0), in_backward.get("gathers", 0)


@pytest.mark.parametrize(
    ("implementation", "gathers"), [("fsdp2", (0, 3)), ("sharded", (0, 3)), ("compiled", (3, 3))]
)
def test_keeping_after_backward_what_the_forward_frees(run_on_gloo_ranks, implementation, gathers):
    """The next forward finds it, and frees it. Compiled without effect: only what a forward keeps stays gathered."""
    assert run_on_gloo_ranks(2, keep_after_backward, implementation) == [gathers] * 2


def count_of_step(implementation: str, reshard_after_forward: bool | int | None) -> tuple[int, int, int]:
    """The gathers of forward and backward, and the reductions."""
    reference, model = build(implementation, reshard_after_forward)
    with count_collectives() as in_forward:
        loss = model(batch_of(dist.get_rank(), 0).requires_grad_()).square().sum()
    with count_collectives() as in_backward:
        loss.backward()
    check_gradients(reference, model, 0)
    return in_forward["gathers"], in_backward.get("gathers", 0), in_backward["reductions"]


@pytest.mark.parametrize("implementation", ["fsdp2", "sharded"])
@pytest.mark.parametrize(
    ("world_size", "reshard_after_forward", "expected"),
    [(2, True, (3, 3)), (4, 2, (3, 3)), (2, False, (3, 0)), (2, None, (3, 2))],
)
def test_uncompiled_backward_gathers_as_fsdp2(
    run_on_gloo_ranks, implementation, world_size, reshard_after_forward, expected
):
    counts = run_on_gloo_ranks(world_size, count_of_step, implementation, reshard_after_forward)
    assert counts == [(*expected, 3)] * world_size


class Cubes(nn.Module):
    """Its backward makes a tensor of the weight's size of the weight alone: Inductor would write it over the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.weight.pow(3).sum()


def accumulate_cubes(reshard_after_forward: bool | int, dtype: torch.dtype | None) -> None:
    torch.manual_seed(0)
    reference = nn.Sequential(Cubes(), Cubes())
    model = copy.deepcopy(reference)
    policy = MixedPrecisionPolicy(param_dtype=dtype)
    shard_units("compiled", model, [*model], reshard_after_forward=reshard_after_forward, mp_policy=policy)
    forward = compile_if_asked("compiled", model)
    for _ in range(2):
        for micro_batch in range(3):
            model.set_requires_gradient_sync(micro_batch == 2)
            model.set_reshard_after_backward(micro_batch == 2)
            batch = torch.randn(4, 8, generator=torch.Generator().manual_seed(micro_batch))
            forward(batch).mean().backward()
            reference(batch).mean().backward()
        for parameter, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert_close(parameter.full_tensor(), expected, rtol=0, atol=0)
            assert_close(parameter.grad.full_tensor(), expected.grad)
        model.zero_grad()
        reference.zero_grad()


@pytest.mark.compiles("2-False-None", "2-True")
@pytest.mark.inductor
@pytest.mark.parametrize(
    ("num_ranks", "reshard_after_forward", "dtype"),
    [(2, False, None), (2, False, torch.float32), (2, True, None), (1, True, torch.float32), (4, 2, None)],
)
def test_a_backward_writes_over_no_parameter(run_on_gloo_ranks, num_ranks, reshard_after_forward, dtype):
    run_on_gloo_ranks(num_ranks, accumulate_cubes, reshard_after_forward, dtype)
