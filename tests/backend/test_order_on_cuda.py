"""The code that Inductor generates for CUDA keeps the planned order; tested without a GPU and without Triton.

That the kernels run is tested by ``make gpu-check``.
"""

import copy

import pytest
import torch
import torch._inductor.config as inductor_config
from support.cuda_code import code_for_cuda
from support.interpreted_halves import InterpretedHalf
from support.pinned_models import LateNorm, LateScale
from support.torch_versions import TORCH
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard.backend import compilation
from graphshard.backend.inductor import (
    config_patches,
    cut_in_pieces,
    emitted_order,
    order_difference,
    pinning_patch,
    planned_order,
)
from graphshard.backend.inductor.compile_pieces import piece_graph

#: The graphs are captured on the CPU, and planned for the GPU whose code is generated.
pytestmark = pytest.mark.filterwarnings("ignore:graphshard. option hardware=:UserWarning")


def planned_halves(kind, mesh, monkeypatch):
    """What the backend hands to Inductor: graph, inputs, and whether it is a backward."""
    halves = []

    def take(gm, example_inputs, **arguments):
        halves.append((copy.deepcopy(gm), list(example_inputs), arguments.get("is_backward", False)))
        return InterpretedHalf(gm)

    monkeypatch.setattr(compilation, "compile_fx_inner", take)
    monkeypatch.setattr(compilation, "order_difference", lambda planned, emitted: "")
    torch.compiler.reset()
    model, policy = kind(), MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        graphshard.fully_shard(block, mesh=mesh, mp_policy=policy)
    graphshard.fully_shard(model, mesh=mesh, mp_policy=policy)
    options = {"hardware": "h100-sxm", "bucket": "none", "progress": False}
    torch.compile(model, backend="graphshard", options=options)(torch.zeros(4, 8)).sum().backward()
    return halves


@pytest.mark.parametrize("kind", [pytest.param(LateScale, marks=pytest.mark.slow), LateNorm])
def test_the_code_for_cuda_keeps_the_planned_order(fake_group, monkeypatch, kind):
    halves = planned_halves(kind, fake_group(8), monkeypatch)
    assert [is_backward for *_, is_backward in halves] == [False, True]
    for gm, inputs, is_backward in halves:
        planned = planned_order(gm)
        with inductor_config.patch(config_patches({})), pinning_patch():
            source = code_for_cuda(gm, inputs, is_backward=is_backward)
        emitted = emitted_order(source)
        assert "@triton.jit" in source and "empty_strided_cuda" in source
        assert sum(step.startswith("start") for step in emitted) > 2
        assert order_difference(planned, emitted) == ""


def test_the_code_of_pieces_for_cuda_keeps_the_planned_order(fake_group, monkeypatch):
    """Also where a collective starts in one piece and is waited for in another."""
    num_checked = num_waits = 0
    for gm, _, is_backward in planned_halves(LateNorm, fake_group(8), monkeypatch):
        cut = cut_in_pieces(gm)
        assert cut is not None and len(cut) > 1
        for piece in cut:
            graph = piece_graph(gm, piece)
            planned = planned_order(graph)
            with inductor_config.patch(config_patches({})), pinning_patch():
                source = code_for_cuda(graph, [node.meta["val"] for node in piece.inputs], is_backward=is_backward)
            assert order_difference(planned, emitted_order(source)) == ""
            num_checked += 1
            num_waits += any(step.startswith("wait arg") for step in planned)
    assert num_checked > 3 and num_waits > 1


@pytest.mark.skipif(TORCH < (2, 12), reason="torch 2.11: Inductor leaves these collectives where they are")
def test_what_pins_the_order_is_needed(fake_group, monkeypatch):
    """Without it, Inductor moves a collective or a product of the same graphs, so the test above can fail."""
    halves = planned_halves(LateScale, fake_group(8), monkeypatch)
    differences = []
    for gm, inputs, is_backward in halves:
        with inductor_config.patch(config_patches({})):
            source = code_for_cuda(gm, inputs, is_backward=is_backward)
        differences.append(order_difference(planned_order(gm), emitted_order(source)))
    assert any(differences)
