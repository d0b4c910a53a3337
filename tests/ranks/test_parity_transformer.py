"""A decoder with tied embeddings, its vocabulary uneven over the ranks, trains like the unsharded one."""

import pytest
from support.implementations import UNCOMPILED
from support.parity import train_in_lockstep


@pytest.mark.parametrize(
    ("world_size", "reshard_after_forward"), [(2, True), (2, False), (2, None), (4, None)]
)
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_transformer_trains_like_unsharded(
    run_on_gloo_ranks, implementation, world_size, reshard_after_forward
):
    run_on_gloo_ranks(world_size, train_in_lockstep, "transformer", implementation, reshard_after_forward)


@pytest.mark.inductor
def test_a_layer_through_inductor_trains_like_unsharded(run_on_gloo_ranks):
    """Two layers are compiled, and interpreted, in `test_planned.py`."""
    run_on_gloo_ranks(2, train_in_lockstep, "transformer_of_one_layer", "compiled", True)


@pytest.mark.slow
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
def test_compiled_transformer_trains_like_unsharded(run_on_gloo_ranks, reshard_after_forward):
    run_on_gloo_ranks(2, train_in_lockstep, "transformer", "compiled", reshard_after_forward)


@pytest.mark.slow
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
def test_compiled_transformer_on_four_ranks_trains_like_unsharded(run_on_gloo_ranks, reshard_after_forward):
    run_on_gloo_ranks(4, train_in_lockstep, "transformer", "compiled", reshard_after_forward)
