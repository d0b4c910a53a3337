"""`vmap`, `grad`, `jvp` and the like over a sharded model, and `functional_call` with other values for its parameters.

The numbers are those of the unsharded model, and so are the gradients that a backward around the transforms gives.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support.implementations import GRAPHSHARD, shard_units
from support.toy_models import build_mlp
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.testing import assert_close

from graphshard.errors import ParameterStateError

X = torch.linspace(-1, 1, 12).view(3, 4)
Step = Callable[..., Any]


def square_of(model: nn.Module) -> Step:
    return lambda x: model(x).square().sum()


#: What is computed of a model; the gradients of the parameters are compared too.
TRANSFORMS: dict[str, Step] = {
    "vmap": lambda model: vmap(model)(X),
    "jvp": lambda model: jvp(model, (X,), (X.cos(),))[1],
    "vjp": lambda model: vjp(model, X)[1](X[:, :3])[0],
    "grad": lambda model: grad(square_of(model))(X),
    "jacrev": lambda model: jacrev(model)(X[0]),
    "jacfwd": lambda model: jacfwd(model)(X[0]),
    "hessian": lambda model: hessian(square_of(model))(X[0]),
    "vmap of grad": lambda model: vmap(grad(square_of(model)))(X),
    "after a forward": lambda model: model(X).sum() + grad(square_of(model))(X),
}


def build() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(42)
    reference = build_mlp((4, 5), (5, 3))
    model = copy.deepcopy(reference)
    return reference, shard_units("sharded", model, [model[0]])


def check_gradients(reference: nn.Module, model: nn.Module) -> None:
    for (name, parameter), expected in zip(model.named_parameters(), reference.parameters(), strict=True):
        if expected.grad is None:
            assert parameter.grad is None or not parameter.grad.full_tensor().any(), name
        else:
            assert_close(
                parameter.grad.full_tensor(), expected.grad, msg=lambda text, name=name: f"{name}: {text}"
            )


def transform(implementation: str, name: str) -> None:
    step = TRANSFORMS[name]
    reference, model = build()
    expected = step(reference)
    compiled = torch.compile(step, backend="graphshard") if implementation == "compiled" else step
    found = compiled(model)
    assert_close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    check_gradients(reference, model)


@pytest.mark.compiles("vmap of grad", "jvp", "after a forward")
@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_like_unsharded(run_on_gloo_ranks, implementation, name):
    run_on_gloo_ranks(2, transform, implementation, name)


def transform_with_aot_eager() -> None:
    for name in ("vmap", "hessian"):
        reference, model = build()
        with pytest.warns(UserWarning, match="does not plan"):
            found = torch.compile(TRANSFORMS[name], backend="aot_eager")(model)
        expected = TRANSFORMS[name](reference)
        assert_close(found, expected)
        found.square().sum().backward()
        expected.square().sum().backward()
        check_gradients(reference, model)


def test_with_another_compiler(run_on_gloo_ranks):
    run_on_gloo_ranks(2, transform_with_aot_eager)


def linearize_model() -> None:
    reference, model = build()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, also without sharding
        expected = linearize(reference, X)[1](X.cos())
        assert_close(linearize(model, X)[1](X.cos()), expected)
        compiled = torch.compile(lambda x: linearize(model, x)[1](x.cos()), backend="graphshard")
        assert_close(compiled(X), expected)


def test_linearize(run_on_gloo_ranks):
    run_on_gloo_ranks(2, linearize_model)


def full_values(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: getattr(each, "full_tensor", lambda each=each: each)()
        for name, each in model.named_parameters()
    }


def gathered_values(model: nn.Module) -> dict[str, Tensor]:
    """What the model shows while it is gathered, and stays so."""
    for module in model.modules():
        if hasattr(module, "unshard"):
            module.unshard()
    return dict(model.named_parameters())


def per_sample(model: nn.Module, values: dict[str, Tensor]) -> Any:
    def loss_of(values: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, values, (x,)).square().sum()

    return vmap(grad(loss_of), in_dims=(None, 0))(values, X)


def ensemble(model: nn.Module, values: dict[str, Tensor]) -> Tensor:
    stacked = {name: torch.stack([value, 2 * value]) for name, value in values.items()}
    return vmap(lambda values: functional_call(model, values, (X,)))(stacked)


def substitute(implementation: str) -> None:
    for values_of, num_values, step in (
        (full_values, 4, per_sample),
        (gathered_values, 4, per_sample),
        (full_values, 1, per_sample),  # the others are gathered
        (full_values, 4, ensemble),
    ):
        reference, model = build()
        before, after = (
            {name: value.detach() for name, value in [*values_of(each).items()][-num_values:]}
            for each in (reference, model)
        )
        compiled = torch.compile(step, backend="graphshard") if implementation == "compiled" else step
        for _ in range(2):
            assert_close(compiled(model, after), step(reference, before))
        # The model itself trains as if nothing had been put in its place.
        for module in model.modules():
            if hasattr(module, "reshard"):
                module.reshard()
        square_of(model)(X).backward()
        square_of(reference)(X).backward()
        check_gradients(reference, model)


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_functional_call_with_other_values(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, substitute, implementation)


def substitute_own_shards(implementation: str) -> None:
    reference, model = build()

    def step(model: nn.Module, values: dict[str, Tensor]) -> Tensor:
        return functional_call(model, values, (X,)).square().sum()

    compiled = torch.compile(step, backend="graphshard") if implementation == "compiled" else step
    compiled(model, dict(model.named_parameters())).backward()
    step(reference, dict(reference.named_parameters())).backward()
    check_gradients(reference, model)


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_functional_call_with_the_shards(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, substitute_own_shards, implementation)


def substitute_parameters(implementation: str) -> list[str]:
    """Values that are parameters look like a model that was not sharded again after a change."""
    messages = []
    for unshards in (False, True):
        reference, model = build()
        compiled = torch.compile(model, backend="graphshard") if implementation == "compiled" else model
        if unshards:
            model.unshard()
            model[0].unshard()
        with pytest.raises((ParameterStateError, torch._dynamo.exc.InternalTorchDynamoError)) as caught:
            functional_call(
                compiled,
                {
                    f"{'_orig_mod.' * (compiled is not model)}{name}": value
                    for name, value in reference.named_parameters()
                },
                (X,),
            )
        messages.append(str(caught.value))
        with torch.no_grad():
            assert_close(model(X), reference(X))
    return messages


@pytest.mark.parametrize("implementation", GRAPHSHARD)
def test_functional_call_with_parameters_is_refused(run_on_gloo_ranks, implementation):
    for messages in run_on_gloo_ranks(2, substitute_parameters, implementation):
        for message in messages:
            assert "parameter 0.weight" in message and "functional_call" in message


def substitute_in_low_precision() -> None:
    """Values given in float32 are cast as gathered parameters are."""
    torch.manual_seed(42)
    reference = build_mlp((4, 5), (5, 3))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = shard_units("sharded", copy.deepcopy(reference), [], mp_policy=policy)
    values = {name: value.detach() for name, value in full_values(model).items()}
    found = functional_call(model, values, (X,))
    assert_close(found, reference.bfloat16()(X.bfloat16()))


def test_functional_call_casts(run_on_gloo_ranks):
    run_on_gloo_ranks(2, substitute_in_low_precision)
