"""Llama 3 on a mesh of shards and tensor parallelism, captured as training captures it, on rank 0 of a fake group.

Layers are split as torchtitan splits them: query, key, value, gate and up by columns, what follows them by
rows; activations between them, norms and the loss are split along the sequence or the vocabulary. So each
layer gathers activations twice over ``tp`` and scatters their sums twice, in each half. ``fully_shard`` then
shards every layer over ``shard``. Parameters are allocated and never touched.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

import graphshard
from graphshard.ir.mesh import MeshLayout, axis_of
from graphshard.testing import CapturedGraphs, capture_graphs

#: Columns of the query, the key and so on; rows of what reads them.
BY_COLUMNS = ("attention.query", "attention.key", "attention.value", "feed_forward.gate", "feed_forward.up")
BY_ROWS = ("attention.output", "feed_forward.down")


def split(model: nn.Module, tp: DeviceMesh) -> None:
    """Splits every layer in place; the model's loss then needs ``loss_parallel()`` around it."""
    whole, along_sequence = Replicate(), Shard(1)
    layer_plan = {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(
            input_layouts=(along_sequence, None, None), desired_input_layouts=(whole, None, None)
        ),
        "feed_forward_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(along_sequence,), desired_input_layouts=(whole,)),
        **{name: ColwiseParallel() for name in BY_COLUMNS},
        **{name: RowwiseParallel(output_layouts=along_sequence) for name in BY_ROWS},
    }
    for layer in model.layers:
        parallelize_module(layer, tp, layer_plan)
    ends_plan = {
        "tokens": RowwiseParallel(input_layouts=whole, output_layouts=along_sequence),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=along_sequence, use_local_output=False),
    }
    parallelize_module(model, tp, ends_plan)


def capture_tensor_parallel(
    model: nn.Module, tokens: torch.Tensor, mesh: dict[str, int], policy: MixedPrecisionPolicy
) -> tuple[CapturedGraphs, MeshLayout]:
    """The lowered halves of a step, and the axes that their process groups are of.

    Args:
        model: on the meta device; changed.
        tokens: on the meta device, (batch, sequence).
        mesh: ``{"shard": 8, "tp": 8}``.
        policy: dtypes of compute and gathers, and of reductions.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=mesh["shard"] * mesh["tp"])
    try:
        ranks = init_device_mesh("cpu", tuple(mesh.values()), mesh_dim_names=tuple(mesh))
        split(model, ranks["tp"])
        for unit in (*model.layers, model):
            graphshard.fully_shard(unit, mesh=ranks["shard"], mp_policy=policy)
        model.to_empty(device="cpu")
        batch = torch.zeros_like(tokens, device="cpu")
        with loss_parallel():
            graphs = capture_graphs(model, batch, batch, full_checks=False)
        return graphs, MeshLayout.of_axes(axis_of(ranks, dim) for dim in range(len(mesh)))
    finally:
        dist.destroy_process_group()
