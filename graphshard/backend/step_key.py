"""What kept code depends on, beside the graph and the settings that are in the key of AOTAutograd's cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import fx

from .._compat import group_by_name
from .._compat_kept import place_in_meshes
from ..cost import GroupTopology
from ..ir import text_fingerprint
from ..machine import Machine
from ..progress import LOGGER
from .dtensor_boundary import Boundary
from .dynamo_graph import DynamoGraph
from .inductor import keeps_code, records_cuda_graphs, settings_of_torch
from .pipelines import half_pipeline, joint_pipeline
from .second_start import is_kept_here, sources_of_ops


def step_key(gm: fx.GraphModule, graph: DynamoGraph, boundary: Boundary) -> str:
    """A key of all that is not in that of AOTAutograd's cache; "" if code of this graph is not kept.

    Args:
        gm: the graph, as Dynamo captured it.
        graph: what is known of it.
        boundary: its inputs and results.
    """
    options = graph.options
    if not is_kept_here():  # as the user says
        return ""
    sources = [pipeline.uuid() for pipeline in (half_pipeline(options), joint_pipeline(options))]
    of_ops = sources_of_ops(gm)
    reason = _reason_against(graph, boundary) or ("" if all(sources) else "a pass has no source file")
    reason = reason or ("" if of_ops is not None else "a custom op has no source file")
    if reason:
        LOGGER.info("graph %d: its code is not kept: %s", graph.index, reason)
        return ""
    parts = [
        torch.__version__,
        *sources,
        repr(of_ops),
        repr([(node.name, node.meta["custom"]) for node in gm.graph.nodes if node.meta.get("custom")]),
        repr(replace(options, progress=True)),
        repr(replace(graph.given, progress=True)),
        repr(sorted(graph.parameters.items())),
        repr((graph.is_broken, sorted(graph.waiting), graph.are_shards_pinned)),
        repr([_seen(name, graph) for name in graph.groups]),
        place_in_meshes(boundary.inputs),
        repr((boundary.crossings, boundary.writes, boundary.results)),
        repr(Machine.here()),
        settings_of_torch(),
    ]
    return text_fingerprint("\n".join(parts))


def _reason_against(graph: DynamoGraph, boundary: Boundary) -> str:
    """Why code of a graph is not kept; "" if nothing is against it."""
    options = graph.options
    if not keeps_code():
        return "a cache of torch is switched off"
    if options.verify == "off":
        return 'verify="off" lets each rank compile by itself'
    if options.dump is not None:
        return "graph texts are dumped while a graph is compiled"
    if records_cuda_graphs(options.inductor):
        return "CUDA graphs are recorded by the process that runs them"
    if boundary.extended:
        return "parameters have gather extensions, whose source is not known"
    if any(map(_varies, boundary.inputs)):
        return "sizes vary"
    if not boundary.crossings:
        return "nothing is sharded"
    return ""


def _varies(value: Any) -> bool:
    """Whether an input is a symbol, or a tensor whose sizes are."""
    if isinstance(value, torch.Tensor):
        return any(isinstance(size, torch.SymInt) for size in (*value.shape, *value.stride()))
    return isinstance(value, (torch.SymInt, torch.SymFloat))


def _seen(name: str, graph: DynamoGraph) -> tuple[Any, ...]:
    """What code takes from a process group. It is the same on all ranks: no pass reads which of them it runs on."""
    ranks, card = dist.get_process_group_ranks(group_by_name(name)), graph.options.card
    topology = GroupTopology.of_ranks(ranks, int(card.ranks_per_node)) if card is not None else len(ranks)
    return (name, topology, graph.is_on_gloo(name))
