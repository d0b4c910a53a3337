"""Captures the graphs of a sharded model without compiling them: joint, forward and backward, as in the backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from functorch.compile import min_cut_rematerialization_partition
from torch import fx, nn
from torch._dynamo.backends.common import aot_autograd

from ..backend import JOINT_PIPELINE, Boundary, enter_boundary
from ..errors import CaptureError
from ..ir import RESHARD, UNSHARD, copy_graph
from ..passes import LowerShards
from ..pipeline import PassContext, Pipeline, context_from_shard_ops, pieces_of, read_shards_as_they_are


@dataclass
class CapturedGraphs:
    """The graphs of one call of a model.

    Attributes:
        captured: the joint graph at level 1, before any pass (the only graph, under no_grad).
        joint: the joint graph after the joint passes, at level 1 (the only graph, under no_grad).
        forward: the forward half, lowered to collectives; None under no_grad.
        backward: the backward half, lowered to collectives; None under no_grad.
        context: the context of passes; use ``context.for_forward()`` and ``for_backward()`` on halves.
    """

    captured: fx.GraphModule
    joint: fx.GraphModule
    context: PassContext
    forward: fx.GraphModule | None = None
    backward: fx.GraphModule | None = None


def capture_graphs(
    model: nn.Module | Callable[..., Any],
    *args: Any,
    pipeline: Pipeline = JOINT_PIPELINE,
    full_checks: bool = True,
) -> CapturedGraphs:
    """Captures ``model(*args)`` with torch.compile, runs the joint passes and partitions.

    No op runs on real data, so a fake process group suffices. The halves are lowered: a pipeline that goes on with them
    needs ``given=`` the facts that hold already.

    Args:
        model: a model given to ``fully_shard``; must trace without graph breaks.
        args: example inputs.
        pipeline: the joint passes.
        full_checks: recompute every fake value when TYPED is checked.

    Raises:
        CaptureError: the model runs no op of torch, or nothing of it is sharded.
    """
    found: list[CapturedGraphs] = []
    boundaries: list[Boundary] = []

    def take(gm: fx.GraphModule) -> None:
        read_shards_as_they_are(gm)
        extended = boundaries[-1].extended_inputs(gm.graph)
        context = context_from_shard_ops(gm, full_checks=full_checks, extended=extended)
        captured = copy_graph(gm)
        pipeline.run(gm, context)
        context = replace(context, pieces=pieces_of(gm))
        found.append(CapturedGraphs(captured=captured, joint=copy_graph(gm), context=context))

    def lower(half: fx.GraphModule, context: PassContext) -> fx.GraphModule:
        lowered = copy_graph(half)
        Pipeline(LowerShards(), given=pipeline.facts_at_end).run(lowered, context)
        return lowered

    def partition(joint: fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        take(joint)
        forward, backward = min_cut_rematerialization_partition(joint, inputs, **kwargs)
        context = found[-1].context
        found[-1].forward = lower(forward, context.for_forward())
        found[-1].backward = lower(backward, context.for_backward())
        return forward, backward

    def infer(gm: fx.GraphModule, _: Sequence[Any]) -> Any:
        take(gm)
        return gm

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Any:
        compile_aot = aot_autograd(
            fw_compiler=lambda graph, _: graph, inference_compiler=infer, partition_fn=partition
        )
        boundaries.append(enter_boundary(gm, inputs))
        compile_aot(gm, boundaries[-1].inputs)
        raise _CapturedAll

    torch._dynamo.reset()
    try:
        torch.compile(model, backend=backend, fullgraph=True)(*args)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, _CapturedAll):
            raise
    torch._dynamo.reset()
    if not found:
        raise CaptureError(
            "nothing was captured: the model runs no op of torch; it must compute with its inputs"
        )
    if not boundaries[0].crossings and not _has_shard_ops(found[0].captured):
        raise CaptureError(
            "nothing of the model is sharded, so its graphs hold no gathers to test passes on: call "
            "graphshard.fully_shard on the model first, or use graphshard.inspect for a plain model"
        )
    return found[0]


def _has_shard_ops(gm: fx.GraphModule) -> bool:
    return any(node.target in (UNSHARD, RESHARD) for node in gm.graph.nodes)


class _CapturedAll(Exception):  # noqa: N818 - control flow, not an error
    """Stops the compilation after the capture."""
