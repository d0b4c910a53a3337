"""Models whose equal layers are compiled once (``share_code``) train like unsharded ones."""

from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist
from support.implementations import compile_if_asked
from support.parity import backward_on_all_batches, start_lockstep
from support.toy_models import WORKLOADS, Transformer
from torch.utils.checkpoint import checkpoint

from graphshard.backend import compilation


def _train(reshard_after_forward: bool | None, is_checkpointed: bool, options: dict[str, Any]) -> None:
    """Trains a decoder of five layers with accumulation, and sees that its halves were compiled in pieces."""
    numbers: list[int] = []
    compile_in_pieces = compilation.compile_in_pieces

    def compile_and_count(gm, pieces, arguments):
        numbers.append(len(pieces))
        return compile_in_pieces(gm, pieces, arguments)

    compilation.compile_in_pieces = compile_and_count
    try:
        workload = replace(WORKLOADS["transformer"], build=lambda: Transformer(num_layers=5))
        pair = start_lockstep(workload, "uncompiled", reshard_after_forward=reshard_after_forward)
        if is_checkpointed:
            for layer in pair.model.layers:
                layer.forward = _checkpointed(layer.forward)
        pair = replace(pair, forward=compile_if_asked("compiled", pair.model, share_code="always", **options))
        pair.train(2)
        pair.model.set_requires_gradient_sync(False)
        backward_on_all_batches(workload, pair.reference, 2)
        workload.loss(pair.forward, workload.batch_of(dist.get_rank(), 2)).backward()
        pair.model.set_requires_gradient_sync(True)
        pair.backward(3)
        pair.update(3)
    finally:
        compilation.compile_in_pieces = compile_in_pieces
    assert len(numbers) >= 2 and max(numbers) > 2


def _checkpointed(forward):
    return lambda x: checkpoint(forward, x, use_reentrant=False)


@pytest.mark.inductor
@pytest.mark.parametrize(
    ("reshard_after_forward", "is_checkpointed", "options"),
    [
        pytest.param(True, False, {"hardware": "cpu-ethernet-1g"}, marks=pytest.mark.slow),
        pytest.param(None, False, {"hardware": None}, marks=pytest.mark.slow),
        pytest.param(False, False, {"hardware": None}, marks=pytest.mark.slow),
        (True, True, {"hardware": None}),
        pytest.param(True, False, {"hardware": None, "overlap": "always"}, marks=pytest.mark.slow),
    ],
    ids=["planned", "by rules", "kept", "checkpointed", "all overlapped"],
)
def test_a_model_in_pieces_trains_like_unsharded(
    run_on_gloo_ranks, reshard_after_forward, is_checkpointed, options
):
    run_on_gloo_ranks(2, _train, reshard_after_forward, is_checkpointed, options)
