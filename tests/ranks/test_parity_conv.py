"""A convolutional network with odd numbers of channels trains like the unsharded one."""

import pytest
from support.implementations import UNCOMPILED
from support.parity import train_in_lockstep


@pytest.mark.parametrize(("world_size", "reshard_after_forward"), [(2, True), (2, False), (4, None)])
@pytest.mark.parametrize("implementation", UNCOMPILED)
def test_convnet_trains_like_unsharded(run_on_gloo_ranks, implementation, reshard_after_forward, world_size):
    run_on_gloo_ranks(world_size, train_in_lockstep, "convnet", implementation, reshard_after_forward)


def test_compiled_convnet_trains_like_unsharded(run_on_gloo_ranks):
    """What Inductor makes of convolutions has its gradients compared in `test_memory_model.py`."""
    run_on_gloo_ranks(2, train_in_lockstep, "convnet", "compiled", True)
