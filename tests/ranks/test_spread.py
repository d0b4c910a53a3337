"""`reshard_after_forward=k`: a full parameter is spread over k neighbours between forward and backward."""

import pytest
from support.parity import train_in_lockstep

slow = pytest.mark.slow


@pytest.mark.parametrize(
    ("implementation", "workload"),
    [
        ("fsdp2", "mlp_7_15_3"),
        ("sharded", "mlp_7_15_3"),
        ("compiled", "mlp_7_15_3"),
        ("sharded", "transformer"),
        pytest.param("compiled", "transformer", marks=slow),
    ],
)
def test_parity_when_spread_over_two_of_four(run_on_gloo_ranks, implementation, workload):
    run_on_gloo_ranks(4, train_in_lockstep, workload, implementation, 2)
