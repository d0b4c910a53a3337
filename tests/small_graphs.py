"""Typed graphs made by hand, and one pass run on a graph under the pipeline's checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from graphshard.collectives import ALL_GATHER, REDUCE_SCATTER, WAIT
from graphshard.context import PassContext, context_from_shard_ops
from graphshard.facts import Fact
from graphshard.graph_text import graph_text
from graphshard.mesh import MeshAxis, MeshLayout
from graphshard.ops import REDUCE_GRAD, UNSHARD
from graphshard.params import padded_shape
from graphshard.pipeline import PassRecord, Pipeline
from graphshard.rewrite import GraphEmitter

aten = torch.ops.aten
GROUP = "shard_group"


def one_axis(num_ranks: int) -> MeshLayout:
    """A mesh with the one axis that the graphs below use."""
    return MeshLayout(axes=(MeshAxis(label="shard", size=num_ranks, group_name=GROUP),))


class GraphBuilder:
    """Appends typed nodes to a graph; call it with an op and its arguments."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self._mode = FakeTensorMode()

    def input(self, name: str, *shape: int, dtype: torch.dtype = torch.float64) -> fx.Node:
        node = self.graph.placeholder(name)
        with self._mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype)
        return node

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return GraphEmitter(self.graph)(target, *args, **kwargs)

    def gather(self, value: fx.Node, num_ranks: int, group: str = GROUP) -> fx.Node:
        """A gather and its wait."""
        return self(WAIT, self(ALL_GATHER, value, num_ranks, group))

    def reduction(self, value: fx.Node, num_ranks: int, group: str = GROUP) -> fx.Node:
        """A reduce-scatter and its wait."""
        return self(WAIT, self(REDUCE_SCATTER, value, "sum", num_ranks, group))

    def finish(self, *outputs: fx.Node | None) -> fx.GraphModule:
        self.graph.output(list(outputs))
        return fx.GraphModule(torch.nn.Module(), self.graph)


@dataclass(frozen=True)
class ParameterSpec:
    """A sharded parameter of a hand-made graph."""

    shape: tuple[int, ...]
    dim: int = 0
    unit: str = "root"
    dtype: torch.dtype = torch.float64
    reshard: bool = True


def unshard(build: GraphBuilder, shard: fx.Node, name: str, spec: ParameterSpec, num_ranks: int) -> fx.Node:
    """One `unshard` node."""
    tail = ("shard", num_ranks, GROUP, spec.reshard, "sum", 1.0 / num_ranks)
    return build(UNSHARD, shard, name, spec.unit, list(spec.shape), spec.dim, *tail)


def reduce_grad(
    build: GraphBuilder, grad: fx.Node, name: str, spec: ParameterSpec, num_ranks: int
) -> fx.Node:
    """One `reduce_grad` node that returns a padded shard."""
    piece = padded_shape(spec.shape, spec.dim, num_ranks)
    tail = ("shard", num_ranks, GROUP, "sum", 1.0 / num_ranks)
    return build(REDUCE_GRAD, grad, name, spec.unit, piece, spec.dim, *tail)


def parameter_graph(specs: Sequence[ParameterSpec], num_ranks: int) -> tuple[fx.GraphModule, PassContext]:
    """A joint graph at level 1 that returns every full parameter and reduces a gradient for each."""
    build = GraphBuilder()
    shards = [
        build.input(f"primals_{i}", *padded_shape(spec.shape, spec.dim, num_ranks), dtype=spec.dtype)
        for i, spec in enumerate(specs)
    ]
    grads = [build.input(f"tangents_{i}", *spec.shape, dtype=spec.dtype) for i, spec in enumerate(specs)]
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


def copy_graph(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph module with nodes of its own."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(gm.graph, {}))
    return fx.GraphModule(gm, graph)


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


def num_targets(gm: fx.GraphModule, target: Any) -> int:
    """How many nodes call ``target``."""
    return len(gm.graph.find_nodes(op="call_function", target=target))
