"""Random graphs with collectives on two process groups, and prices for them."""

from __future__ import annotations

import operator
import random
from collections.abc import Mapping

import torch
from torch import fx

from graphshard.ir.collectives import ALL_REDUCE, WAIT, c10d, is_collective, is_wait
from graphshard.ir.mesh import MeshAxis, MeshLayout
from support.problems import LinePrices
from support.small_graphs import GraphBuilder, aten

MESH = MeshLayout(
    axes=(
        MeshAxis(label="tensor", size=2, group_name="tensor_group"),
        MeshAxis(label="shard", size=2, group_name="shard_group"),
    )
)


class NodePrices(LinePrices):
    """Every product costs its elements, every other op a little; collectives as lines."""

    def compute_seconds(self, gm: fx.GraphModule) -> Mapping[fx.Node, float]:
        return {
            node: 2e-2 * node.meta["val"].numel() if node.target is aten.mm.default else 1e-2
            for node in gm.graph.nodes
            if node.op == "call_function" and not is_collective(node) and not is_wait(node)
            if isinstance(node.meta.get("val"), torch.Tensor)
        }

    def collective_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        if group not in ("shard_group", "tensor_group"):
            raise KeyError(group)
        return super().collective_seconds(kind, num_bytes, group)


PRICES = NodePrices(latency=0.3, bandwidth=2000.0, copies=50_000.0)


def random_graph(seed: int, num_steps: int = 10, rename: str = "") -> fx.GraphModule:
    """Products with gathered shards, sums over a tensor-parallel group, reduced products.

    Args:
        seed: equal seeds give equal graphs.
        num_steps: pieces of compute.
        rename: put in front of the name of each node that is no input.
    """
    dice = random.Random(seed)
    build = GraphBuilder()
    value = build.input("primals_0", 8, 8)
    kinds = [
        dice.choice(["linear", "linear", "cast", "sum", "gradient", "hybrid", "relu"])
        for _ in range(num_steps)
    ]
    shards = {
        i: build.input(f"primals_{i + 1}", 4, 8) for i, kind in enumerate(kinds) if kind in ("linear", "cast")
    }
    results = []
    for index, kind in enumerate(kinds):
        if kind == "linear":
            value = build(aten.mm.default, value, build.gather(shards[index], 2))
        elif kind == "cast":
            half = build(torch.ops.prims.convert_element_type.default, shards[index], torch.float32)
            whole = build(torch.ops.prims.convert_element_type.default, build.gather(half, 2), torch.float64)
            value = build(aten.mm.default, value, whole)
        elif kind == "sum":
            value = build(aten.relu.default, build(WAIT, build(ALL_REDUCE, value, "sum", "tensor_group")))
        elif kind == "relu":
            value = build(aten.relu.default, value)
        else:
            grad = build(aten.mm.default, build(aten.t.default, value), value)
            reduced = build.reduction(grad, 2)
            if kind == "hybrid":
                reduced = build(WAIT, build(ALL_REDUCE, reduced, "sum", "tensor_group"))
            results.append(build(aten.mul.Tensor, reduced, 0.5))
    gm = build.finish(*results, value)
    for node in gm.graph.nodes:
        if rename and node.op == "call_function":
            node._rename(f"{rename}_{node.name}")
    return gm


def in_memory_graph(seed: int, num_steps: int = 10) -> fx.GraphModule:
    """As :func:`random_graph`, and collectives that write where they are told: in place, and to one buffer in turn."""
    dice = random.Random(seed)
    build = GraphBuilder()
    value, buffer = build.input("primals_0", 8, 8), build.input("primals_1", 8, 8)
    known = ["linear", "sum", "gradient", "gather", "reduce", "scatter", "several"]
    kinds = [dice.choice(known) for _ in range(num_steps)]
    shards = [build.input(f"primals_{i + 2}", 4, 8) for i in range(num_steps)]
    results = []
    for shard, kind in zip(shards, kinds, strict=True):
        product = build(aten.mm.default, build(aten.t.default, value), value)
        if kind == "linear":
            value = build(aten.mm.default, value, build.gather(shard, 2))
        elif kind == "sum":
            results.append(build(WAIT, build(ALL_REDUCE, value, "sum", "tensor_group")))
        elif kind == "gradient":
            results.append(build.reduction(product, 2))
        elif kind == "gather":
            whole = build(WAIT, build(c10d.all_gather_into_tensor_out.default, shard, 2, "shard_group", out=buffer))
            results.append(build(WAIT, build(ALL_REDUCE, whole, "sum", "tensor_group")))
            value = build(aten.mm.default, value, whole)
        elif kind == "reduce":
            started = build(c10d.all_reduce_.default, product, "sum", "tensor_group")
            value = build(aten.add.Tensor, value, build(WAIT, dice.choice([started, product])))
        elif kind == "scatter":
            build(WAIT, build(c10d.reduce_scatter_tensor_out.default, product, "sum", 2, "shard_group", out=shard))
            results.append(build(aten.mm.default, build.gather(shard, 2), value))
        else:
            started = build(c10d.all_reduce_coalesced_.default, [product, buffer], "sum", "shard_group")
            first, _ = (build(WAIT, build(operator.getitem, started, index)) for index in range(2))
            results += [build(aten.relu.default, first), build.reduction(buffer, 2)]
    return build.finish(*results, value)


def inputs_of(gm: fx.GraphModule, seed: int) -> list[list[torch.Tensor]]:
    """The values of the inputs on each of the four ranks."""
    generator = torch.Generator().manual_seed(seed)
    nodes = gm.graph.find_nodes(op="placeholder")
    return [
        [torch.randn(node.meta["val"].shape, generator=generator, dtype=torch.float64) / 4 for node in nodes]
        for _ in range(MESH.num_ranks)
    ]
