"""Typed graphs made by hand, and one pass run on a graph under the pipeline's checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from graphshard.ir.collectives import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, WAIT
from graphshard.ir.graph_text import graph_text
from graphshard.ir.mesh import MeshAxis, MeshLayout
from graphshard.ir.params import UnshardCall, gradient_call, padded_shape
from graphshard.ir.reshard import RESHARD, ReshardCall
from graphshard.ir.rewrite import GraphEmitter
from graphshard.ir.shard_ops import REDUCE_GRAD, UNSHARD
from graphshard.passes import LowerShards, MergeUnshards
from graphshard.pipeline.context import PassContext, context_from_shard_ops
from graphshard.pipeline.facts import Fact
from graphshard.pipeline.pipeline import PassRecord, Pipeline

aten = torch.ops.aten
GROUP = "shard_group"
REPLICATE_GROUP = "replicate_group"

#: Brings a joint graph to level 2, as a half is before it is bucketed.
LOWERING = Pipeline(MergeUnshards(), LowerShards())


def one_axis(num_ranks: int) -> MeshLayout:
    """A mesh with the one axis that the graphs below use."""
    return MeshLayout(axes=(MeshAxis(label="shard", size=num_ranks, group_name=GROUP),))


def two_axes(num_replicas: int, num_shards: int) -> MeshLayout:
    """A mesh of ``num_replicas`` copies of ``num_shards`` shards."""
    replicate = MeshAxis(label="replicate", size=num_replicas, group_name=REPLICATE_GROUP)
    return MeshLayout(axes=(replicate, *one_axis(num_shards).axes))


class GraphBuilder:
    """Appends typed nodes to a graph; call it with an op and its arguments."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self._mode = FakeTensorMode()
        self._handles: dict[str, fx.Node] = {}

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.float64) -> fx.Node:
        node = self.graph.placeholder(name)
        with self._mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def handle(self, unit: str = "root") -> fx.Node:
        """The input that stands for a unit: made at the first call, after the inputs there are."""
        if unit not in self._handles:
            inputs = self.graph.find_nodes(op="placeholder")
            with self.graph.inserting_after(inputs[-1]):
                self._handles[unit] = self.input(f"handle_{unit.replace('.', '_')}", 0, dtype=torch.int8)
        return self._handles[unit]

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return GraphEmitter(self.graph)(target, *args, **kwargs)

    def gather(self, value: fx.Node, num_ranks: int, group: str = GROUP) -> fx.Node:
        """A gather and its wait."""
        return self(WAIT, self(ALL_GATHER, value, num_ranks, group))

    def reduction(self, value: fx.Node, num_ranks: int, group: str = GROUP) -> fx.Node:
        """A reduce-scatter and its wait."""
        return self(WAIT, self(REDUCE_SCATTER, value, "sum", num_ranks, group))

    def finish(self, *outputs: fx.Node | None) -> fx.GraphModule:
        """The graph; one with tangents ends with the gradients of its handles, which are None."""
        inputs = self.graph.find_nodes(op="placeholder")
        has_gradients = any(node.name.startswith("tangents_") for node in inputs)
        self.graph.output([*outputs, *([None] * len(self._handles) if has_gradients else [])])
        return fx.GraphModule(torch.nn.Module(), self.graph)


def _as_it_is(build: GraphBuilder, product: fx.Node) -> fx.Node:
    return product


def tensor_parallel_backward(
    num_blocks: int = 3,
    extra: Callable[[GraphBuilder, fx.Node], fx.Node] = _as_it_is,
    width: int = 8,
    group: str = "tensor_group",
) -> fx.GraphModule:
    """Of layers split over a group: in each the gradient of a weight, reduced, and that of the activations, summed."""
    build = GraphBuilder()
    weight, grad = build.input("primals_0", width, width), build.input("tangents_0", width, width)
    saved = [build.input(f"saved_{place}", width, width) for place in range(num_blocks)]
    results = []
    for value in saved:
        product = extra(build, build(aten.mm.default, build(aten.t.default, grad), value))
        results.append(build.reduction(product, 2))
        summed = build(WAIT, build(ALL_REDUCE, build(aten.mm.default, grad, weight), "sum", group))
        grad = build(aten.relu.default, summed)
    return build.finish(*results, grad)


def products_and_sums(gm: fx.GraphModule) -> str:
    """The order of such a graph: g for the gradient of a weight, a of activations, s for a sum's start, r for relu."""
    text = ""
    for node in gm.graph.nodes:
        if node.target is aten.mm.default:
            text += "g" if node.args[0].target is aten.t.default else "a"
        elif node.target is ALL_REDUCE or node.target is aten.relu.default:
            text += "s" if node.target is ALL_REDUCE else "r"
    return text


@dataclass(frozen=True)
class ParameterSpec:
    """A sharded parameter of a hand-made graph; ``dtype`` is the shard's, ``param_dtype`` that of compute."""

    shape: tuple[int, ...]
    dim: int = 0
    unit: str = "root"
    dtype: torch.dtype = torch.float64
    reshard: bool = True
    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    num_replicas: int = 1
    divide_factor: float | None = None
    force_sum: bool = False
    row_offset: int = -1

    def call(self, shard: Any, handle: Any, name: str, num_ranks: int) -> UnshardCall:
        """The gather over ``num_ranks`` ranks of the axis "shard"."""
        return UnshardCall(
            shard=shard,
            handle=handle,
            name=name,
            unit=self.unit,
            shape=list(self.shape),
            dim=self.dim,
            dtype=self.param_dtype,
            reshard=num_ranks if self.reshard else 1,
            reshard_group="",
            axis="shard",
            group_size=num_ranks,
            group_name=GROUP,
            replicate_axis="replicate" if self.num_replicas > 1 else "",
            replicate_size=self.num_replicas,
            replicate_group=REPLICATE_GROUP if self.num_replicas > 1 else "",
            reduce_dtype=self.reduce_dtype,
            divide_factor=self.divide_factor,
            force_sum=self.force_sum,
            row_offset=self.row_offset,
        )


def unshard(build: GraphBuilder, shard: fx.Node, name: str, spec: ParameterSpec, num_ranks: int) -> fx.Node:
    """One `unshard` node."""
    return build(UNSHARD, *spec.call(shard, build.handle(spec.unit), name, num_ranks))


def reduce_grad(
    build: GraphBuilder, grad: fx.Node, name: str, spec: ParameterSpec, num_ranks: int, **changes: Any
) -> fx.Node:
    """One `reduce_grad` node that returns a padded shard; ``changes`` to its arguments by name."""
    call = spec.call(None, build.handle(spec.unit), name, num_ranks)
    piece = padded_shape(spec.shape, spec.dim, num_ranks)
    return build(REDUCE_GRAD, *gradient_call(call, grad, piece, spec.dtype)._replace(**changes))


def parameter_graph(specs: Sequence[ParameterSpec], num_ranks: int) -> tuple[fx.GraphModule, PassContext]:
    """A joint graph at level 1 that returns every full parameter and reduces a gradient for each."""
    build = GraphBuilder()
    shards = [
        build.input(f"primals_{i}", *padded_shape(spec.shape, spec.dim, num_ranks), dtype=spec.dtype)
        for i, spec in enumerate(specs)
    ]
    grads = [
        build.input(f"tangents_{i}", *spec.shape, dtype=spec.param_dtype or spec.dtype) for i, spec in enumerate(specs)
    ]
    full = [
        unshard(build, shard, f"p{i}", spec, num_ranks)
        for i, (shard, spec) in enumerate(zip(shards, specs, strict=True))
    ]
    reduced = [
        reduce_grad(build, grad, f"p{i}", spec, num_ranks)
        for i, (grad, spec) in enumerate(zip(grads, specs, strict=True))
    ]
    gm = build.finish(*full, *reduced)
    return gm, context_from_shard_ops(gm, full_checks=True)


def text_of(gm: fx.GraphModule, ctx: PassContext) -> str:
    """The graph text a pass is judged by."""
    return graph_text(gm, mesh=ctx.mesh, parameters=ctx.parameters)


def run_pass(step: Any, gm: fx.GraphModule, ctx: PassContext, *more: Fact) -> PassRecord:
    """Runs one pass under the checks of a pipeline: facts, signature, honest report."""
    (record,) = Pipeline(step, given=step.requires | set(more)).run(gm, ctx)
    return record


def run_twice(step: Any, gm: fx.GraphModule, ctx: PassContext, *more: Fact) -> tuple[PassRecord, PassRecord]:
    """The records of a first and a second run."""
    return run_pass(step, gm, ctx, *more), run_pass(step, gm, ctx, *more)


def open_reductions(gm: fx.GraphModule) -> int:
    """The largest number of reduce-scatters started and not yet waited for."""
    is_open: set[fx.Node] = set()
    most = 0
    for node in gm.graph.nodes:
        if node.target is REDUCE_SCATTER:
            is_open.add(node)
            most = max(most, len(is_open))
        elif node.target is WAIT:
            is_open.discard(node.args[0])
    return most


def num_targets(gm: fx.GraphModule, target: Any) -> int:
    """How many nodes call ``target``."""
    return len(gm.graph.find_nodes(op="call_function", target=target))


TENSOR_GROUP = "tensor_group"


def tensor_axis(num_ranks: int) -> MeshLayout:
    """A mesh with the one axis of :func:`reshard`."""
    return MeshLayout(axes=(MeshAxis(label="tp", size=num_ranks, group_name=TENSOR_GROUP),))


def reshard(
    build: GraphBuilder,
    value: fx.Node,
    src: str,
    dst: str,
    shape: Sequence[int],
    num_ranks: int = 2,
    rank: int = 0,
    placed: bool = False,
) -> fx.Node:
    """A reshard over the axis "tp"."""
    return build(RESHARD, *ReshardCall(value, src, dst, list(shape), "tp", num_ranks, TENSOR_GROUP, rank, placed))
