"""MLPs of even, uneven and empty shards train like the unsharded model and like FSDP2."""

import pytest
from support.implementations import UNCOMPILED
from support.parity import train_in_lockstep

MLPS = ["mlp_even", "mlp_one_unit", "mlp_7_15_3", "mlp_16_17_8", "mlp_16_15_8", "mlp_5_rows"]


@pytest.mark.sampled
@pytest.mark.parametrize(
    ("world_size", "reshard_after_forward"), [(2, True), (2, False), (2, None), (4, None)]
)
@pytest.mark.parametrize("workload", MLPS)
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_mlp_trains_like_unsharded(
    run_on_gloo_ranks, implementation, workload, world_size, reshard_after_forward
):
    run_on_gloo_ranks(world_size, train_in_lockstep, workload, implementation, reshard_after_forward)


@pytest.mark.parametrize(
    ("workload", "reshard_after_forward"),
    [
        ("mlp_even", True),
        pytest.param("mlp_one_unit", None, marks=pytest.mark.inductor),
        ("mlp_7_15_3", False),
        ("mlp_16_17_8", None),
        pytest.param("mlp_16_15_8", True, marks=pytest.mark.inductor),
    ],
)
def test_compiled_mlp_trains_like_unsharded(run_on_gloo_ranks, workload, reshard_after_forward):
    run_on_gloo_ranks(2, train_in_lockstep, workload, "compiled", reshard_after_forward)


def test_compiled_mlp_with_empty_shards_trains_like_unsharded(run_on_gloo_ranks):
    run_on_gloo_ranks(4, train_in_lockstep, "mlp_5_rows", "compiled", None)


@pytest.mark.slow
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@pytest.mark.parametrize("workload", MLPS)
def test_compiled_mlp_on_four_ranks_trains_like_unsharded(run_on_gloo_ranks, workload, reshard_after_forward):
    run_on_gloo_ranks(4, train_in_lockstep, workload, "compiled", reshard_after_forward)
