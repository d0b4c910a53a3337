"""Inductor's own overlap pass on a graph, with our prices; its order as a schedule of our problem.

``torch._inductor.fx_passes.overlap_scheduling`` moves and merges collectives of a graph in place. Here it
works on a copy, is told the cost model's times, and what it made is read back as starts and waits of
buckets between the tasks of the original problem, so that :func:`simulate` prices both alike. Copies in
and out of its buckets are priced like ours.

Without a GPU it needs two things from this file: a fake process group, and a stub for its roofline, which
it computes (with triton) even where it is told the time of a node.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping
from unittest import mock

import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import init_device_mesh

from graphshard.cost import CostModel
from graphshard.cost.links import KIND_OF
from graphshard.ir.collectives import group_name, is_collective, is_wait
from graphshard.ir.mesh import MeshLayout
from graphshard.ir.rewrite import apply_order, copy_graph
from graphshard.planner.from_graph import problem_of_graph
from graphshard.planner.search.machine import Step
from graphshard.planner.search.problem import Problem


def inductor_schedule(
    gm: fx.GraphModule, model: CostModel, layout: MeshLayout, *, merges: bool = True
) -> tuple[Problem, list[Step]]:
    """What Inductor's pass makes of ``gm``: the problem, with compute in its order, and a schedule of it.

    Args:
        gm: a half; left as it is.
        model: seconds of its nodes, given to the pass as milliseconds.
        layout: the axes of its process groups.
        merges: with Inductor's bucketing, before and after scheduling.
    """
    found = problem_of_graph(gm, model)
    from torch._inductor.fx_passes import overlap_scheduling
    from torch.testing._internal.distributed.fake_pg import FakeStore

    copied = copy_graph(gm)
    twin = dict(zip(gm.graph.nodes, copied.graph.nodes, strict=True))
    tasks = {twin[node]: node for node in found.tasks}
    roots = {node: _roots(twin[node], tasks) for node in found.starts}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=layout.num_ranks)
    try:
        sizes, labels = zip(*((axis.size, axis.label) for axis in layout.axes), strict=True)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=labels)
        theirs = {axis.group_name: mesh.get_group(axis.label).group_name for axis in layout.axes}
        ours = {new: old for old, new in theirs.items()}
        for node in filter(is_collective, copied.graph.nodes):
            node.args = (*node.args[:-1], theirs[group_name(node)])
        estimate = _estimator(copied, gm, model, ours)
        with mock.patch.object(
            overlap_scheduling, "estimate_roofline_runtime_ms", lambda node: estimate(node, None)
        ):
            overlap_scheduling.schedule_overlap_bucketing(
                copied,
                collective_bucketing=merges,
                pre_bucketing_fsdp_collectives=merges,
                custom_runtime_estimation=estimate,
                compute_estimator="analytical",
                insert_overlap_deps=False,
            )
    finally:
        dist.destroy_process_group()
    reordered, origin = _with_tasks_in_order(gm, [tasks[n] for n in copied.graph.nodes if n in tasks])
    seconds = model.compute_seconds(gm)
    same = {node: seconds[origin[node]] for node in reordered.graph.nodes if origin[node] in seconds}
    again = problem_of_graph(reordered, _SamePrices(model, same))
    known = [roots[origin[node]] for node in again.starts]
    return again.problem, _steps(copied.graph, again.problem, tasks, known)


class _SamePrices:
    """The model's prices, with the seconds of compute that it gave in another order of the nodes."""

    def __init__(self, model: CostModel, seconds: Mapping[fx.Node, float]) -> None:
        self.collective_seconds, self.copy_seconds = model.collective_seconds, model.copy_seconds
        self.core_seconds, self.overlapped_seconds = model.core_seconds, model.overlapped_seconds
        self.spread_seconds = model.spread_seconds
        self._seconds = seconds

    def compute_seconds(self, gm: fx.GraphModule) -> Mapping[fx.Node, float]:
        """Whatever the graph's order."""
        return self._seconds


def _with_tasks_in_order(
    gm: fx.GraphModule, tasks: list[fx.Node]
) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """A copy whose compute stands in this order, each other node in front of its first reader."""
    copied = copy_graph(gm)
    twin = dict(zip(gm.graph.nodes, copied.graph.nodes, strict=True))
    placed: dict[fx.Node, None] = dict.fromkeys(copied.graph.find_nodes(op="placeholder"))

    def place(node: fx.Node) -> None:
        for source in node.all_input_nodes:
            if source not in placed:
                place(source)
        placed[node] = None

    for task in tasks:
        place(twin[task])
    for node in copied.graph.nodes:
        if node not in placed:
            place(node)
    apply_order(copied.graph, list(placed))
    return copied, {other: node for node, other in twin.items()}


def _estimator(
    copied: fx.GraphModule, gm: fx.GraphModule, model: CostModel, ours: Mapping[str, str]
) -> Callable[[fx.Node, int | None], float | None]:
    """Milliseconds of a node, as Inductor's pass asks for them; ``ours``: our group names by theirs."""
    seconds = model.compute_seconds(gm)
    known = {
        other: seconds.get(node, 0.0) for node, other in zip(gm.graph.nodes, copied.graph.nodes, strict=True)
    }

    def estimate(node: fx.Node, override_size: int | None) -> float | None:
        if not is_collective(node):
            return 1e3 * known.get(node, 0.0)
        values = [source.meta["val"] for source in (*node.all_input_nodes, node)]
        num_bytes = max(value.numel() * value.element_size() for value in values)
        size = num_bytes if override_size is None else override_size
        kind = KIND_OF.get(node.target, "all_gather")
        return 1e3 * model.collective_seconds(kind, size, ours[group_name(node)])

    return estimate


def _roots(node: fx.Node, tasks: Container[fx.Node]) -> frozenset[str]:
    """The tasks and inputs that a collective's operands are made of."""
    found, pending = set(), list(node.all_input_nodes)
    while pending:
        source = pending.pop()
        if source in tasks or source.op == "placeholder":
            found.add(source.name)
        else:
            pending.extend(source.all_input_nodes)
    return frozenset(found)


def _steps(
    graph: fx.Graph, problem: Problem, tasks: Container[fx.Node], roots: list[frozenset[str]]
) -> list[Step]:
    """Starts and waits of a scheduled graph, between its tasks."""
    ones = problem.collectives
    position, open_buckets, steps = 0, {}, []
    for node in graph.nodes:
        if node in tasks:
            position += 1
        elif _is_start(node):
            made_of = _roots(node, tasks)
            members = tuple(
                index
                for index, own in enumerate(roots)
                if own <= made_of and ones[index].kind == _kind(node) and index not in _members(steps)
            )
            assert members, f"{node.format_node()} merges nothing known"
            open_buckets[node] = members
            steps.append(Step(position, True, members))
        elif is_wait(node) and node.args[0] in open_buckets:
            steps.append(Step(position, False, open_buckets.pop(node.args[0])))
    return steps


def _members(steps: list[Step]) -> set[int]:
    return {index for step in steps for index in step.members}


def _is_start(node: fx.Node) -> bool:
    name = str(node.target)
    return name.startswith("_c10d_functional") and "wait_tensor" not in name


def _kind(node: fx.Node) -> str:
    name = str(node.target)
    return next(kind for kind in ("all_gather", "reduce_scatter", "all_reduce") if kind in name)
