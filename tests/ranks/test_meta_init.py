"""A model built and sharded on the meta device is materialised shard by shard and then trains."""

import pytest
import torch
from support.implementations import EVERY, UNCOMPILED, compile_if_asked, shard_units
from support.parity import Lockstep, make_adam
from support.toy_models import WORKLOADS
from torch import nn
from torch.distributed.tensor import DTensor
from torch.testing import assert_close


def shard_on_meta(implementation: str, workload_name: str) -> nn.Module:
    workload = WORKLOADS[workload_name]
    with torch.device("meta"):
        model = workload.build()
    shard_units(implementation, model, workload.list_units(model))
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor) and parameter.is_meta, name
    model.to_empty(device="cpu")
    return model


def initialise_with_constants(implementation: str) -> None:
    model = shard_on_meta(implementation, "mlp_5_rows")
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            assert isinstance(parameter, DTensor) and parameter.device.type == "cpu"
            nn.init.constant_(parameter, number + 1)
    reference = WORKLOADS["mlp_5_rows"].build()
    for number, parameter in enumerate(reference.parameters()):
        nn.init.constant_(parameter, number + 1)
    inputs = torch.ones(2, 4)
    assert_close(compile_if_asked(implementation, model)(inputs), reference(inputs))


def initialise_and_train(implementation: str, workload_name: str) -> None:
    """Every module's own reset_parameters; then training beside an unsharded model of the same values."""
    model = shard_on_meta(implementation, workload_name)
    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.constant_(parameter, float("nan"))
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    reference = WORKLOADS[workload_name].build()
    values = {name: value.full_tensor() for name, value in model.state_dict().items()}
    assert all(value.isfinite().all() for value in values.values())
    assert any(value.std() > 0 for value in values.values())
    reference.load_state_dict(values)
    Lockstep(
        workload=WORKLOADS[workload_name],
        reference=reference,
        model=model,
        forward=compile_if_asked(implementation, model),
        optimizers=[make_adam(reference.parameters()), make_adam(model.parameters())],
    ).train(2)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_constants_fill_every_shard(run_on_gloo_ranks, implementation, world_size):
    run_on_gloo_ranks(world_size, initialise_with_constants, implementation)


@pytest.mark.parametrize("implementation", EVERY)
def test_reset_parameters_then_training(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, initialise_and_train, implementation, "mlp_7_15_3")


@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_tied_model_is_initialised_on_meta(run_on_gloo_ranks, implementation):
    run_on_gloo_ranks(2, initialise_and_train, implementation, "transformer")
