"""A planning problem from a forward or backward graph that holds ``_c10d_functional`` collectives.

The graph may come from anywhere and use any process groups. ``movable_nodes`` says what moves and what is compute;
``task_memory`` measures what compute holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from .._compat import FakeTensor
from ..cost import GraphPrices, Prices, collective_bytes, collective_kind
from ..errors import PriceError, UnpricedGroupError, UntypedGraphError
from ..ir import (
    ALL_GATHER,
    ALL_REDUCE,
    ALL_REDUCE_HOOK,
    REDUCE_SCATTER,
    RowPlace,
    base_of,
    call_arguments,
    dtype_text,
    group_name,
    is_collective,
    is_view,
    is_wait,
    operands,
    short_name,
    tensor_bytes,
    tensors_of,
    waits_of,
    writes_of,
)
from ..memory import UNMEASURED, KernelScratch, copied_bytes, kept_inputs
from .movable_nodes import movable_collectives, moving_nodes
from .search import Collective, Problem, Step, Task
from .task_memory import with_memory
from .user_constraints import NO_WISHES, Wishes

#: Kinds that can be merged with others of their kind.
MERGEABLE = (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE)


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphProblem:
    """A problem, with the nodes that its numbers stand for.

    Attributes:
        problem: what is planned.
        starts: the node that starts each collective.
        tasks: the node of each task.
        unplanned: the schedule of the graph as it came.
        notes: collectives that stay where they are, and why.
    """

    problem: Problem
    starts: tuple[fx.Node, ...]
    tasks: tuple[fx.Node, ...]
    unplanned: tuple[Step, ...]
    notes: tuple[str, ...]


def problem_of_graph(
    gm: fx.GraphModule,
    prices: GraphPrices,
    *,
    budget_bytes: int | None = None,
    wishes: Wishes = NO_WISHES,
    places: Mapping[fx.Node, RowPlace] | None = None,
    prepared: Set[fx.Node] = frozenset(),
    device_type: str | None = None,
    scratch: KernelScratch = UNMEASURED,
    measures_memory: bool = True,
) -> GraphProblem:
    """Reads a planning problem from a graph; the graph does not change.

    Args:
        gm: a forward, inference or backward graph whose values carry ``meta["val"]``.
        prices: of its compute and its collectives.
        budget_bytes: the most that may be live, inputs that the caller keeps included.
        wishes: the user's constraints. Those on collectives that cannot move are dropped, with a note.
        places: where the shards that gathers send lie in memory (``provenance.row_places``).
        prepared: what is computed of shards for their gathers (``provenance.prepared_nodes``).
        device_type: where the graph will run; None for where its values are.
        scratch: what kernels allocate there for themselves.
        measures_memory: whether to fill in what is live at each task. Without it only time can be simulated.

    Raises:
        UntypedGraphError: lists the collectives whose sizes are not known.
        UnpricedGroupError: lists the groups without a price, with a collective of each.
        PriceError: a price is negative, infinite or not a number.
        ProblemError: buckets, prefetches or limits contradict each other, or name nodes of another graph.
    """
    _check_typed(gm)
    wishes.check_nodes_of(gm.graph)
    writes = writes_of(gm.graph)
    movable, notes = movable_collectives(gm, writes)
    priced = [node for node in filter(is_collective, gm.graph.nodes) if node.target is not ALL_REDUCE_HOOK]
    _check_groups(priced, prices)
    moving = moving_nodes(gm.graph, movable, writes.all, prepared)
    seconds = dict(prices.compute_seconds(gm))
    for node in priced:
        wait = next(iter(waits_of(node)), None)  # of coalesced ones, the first
        if node not in moving and wait is not None:
            seconds[wait] = _seconds_alone(node, prices)
    bad = [f"{node.name}: {value}" for node, value in seconds.items() if not 0.0 <= value < float("inf")]
    if bad:
        raise PriceError(
            f"prices must be finite and not negative, but these are not: {', '.join(bad[:5])}; correct them"
        )
    reader = _Reader(gm, movable, moving, seconds, places or {}, device_type)
    collectives = wishes.held_back(movable, reader.collectives(), reader.position, notes)
    tasks = [Task(seconds=seconds.get(node, 0.0)) for node in reader.tasks]
    problem = Problem(
        tasks=tasks,
        collectives=collectives if wishes.merge else [replace(one, merge_key=None) for one in collectives],
        prices=prices,
        position_names=[node.name for node in reader.tasks],
        fixed_buckets=wishes.buckets_by_index(movable, notes),
        prefetch=wishes.pairs_by_index(movable, notes),
        max_gathers=wishes.max_gathers,
        max_reductions=wishes.max_reductions,
        shared_links=wishes.shared_links,
        prefers_large=_is_on_accelerator(movable, device_type),
    )
    unplanned = reader.unplanned()
    if measures_memory:
        problem = with_memory(gm, problem, reader.tasks, unplanned, device_type, scratch)
    return GraphProblem(
        problem=replace(problem, budget_bytes=budget_bytes),
        starts=tuple(movable),
        tasks=tuple(reader.tasks),
        unplanned=tuple(unplanned),
        notes=tuple(notes),
    )


def _check_typed(gm: fx.GraphModule) -> None:
    untyped = [
        f"{node.name} ({short_name(node)})"
        for node in filter(is_collective, gm.graph.nodes)
        if not all(tensors_of(value.meta.get("val")) for value in (node, *operands(node)))
    ]
    remedy = "capture the graph on fake tensors, or run torch.fx.passes.fake_tensor_prop.FakeTensorProp on it"
    if untyped:
        raise UntypedGraphError(
            f'these collectives, or what they send, have no meta["val"], which says their bytes: {", ".join(untyped)}; '
            f"{remedy}"
        )
    if unknown := [f"{node.name} ({short_name(node)})" for node in gm.graph.nodes if _lacks_value(node)]:
        listed = ", ".join(unknown[:8]) + (f" and {len(unknown) - 8} others" if len(unknown) > 8 else "")
        raise UntypedGraphError(f'these have no meta["val"], which says what they cost: {listed}; {remedy}')
    values = (value for node in gm.graph.nodes for value in tensors_of(node.meta.get("val")))
    if len({id(value.fake_mode) for value in values if isinstance(value, FakeTensor)}) > 1:
        raise UntypedGraphError(
            'the fake tensors in meta["val"] are of several fake modes, so that nothing says what shares memory: '
            'trace with make_fx(..., tracing_mode="fake") or "symbolic"'
        )


def _lacks_value(node: fx.Node) -> bool:
    """Whether an op of torch returns tensors but has no ``meta["val"]``."""
    if not isinstance(node.target, torch._ops.OpOverload) or node.meta.get("val") is not None:
        return False
    return any(
        isinstance(one.type, (torch.TensorType, torch.ListType)) for one in node.target._schema.returns
    )


def _check_groups(collectives: list[fx.Node], prices: Prices) -> None:
    unknown: dict[str, str] = {}
    for node in collectives:
        try:
            value = _seconds_alone(node, prices)
        except LookupError:
            unknown.setdefault(group_name(node), f"{node.name}, {short_name(node)}")
            continue
        if not 0.0 <= value < float("inf"):
            raise PriceError(
                f"{node.name} ({short_name(node)}) cannot take {value} seconds; correct its price"
            )
    if unknown:
        listed = "; ".join(f"{group!r} (of {which})" for group, which in unknown.items())
        raise UnpricedGroupError(
            f"there is no price for collectives of these process groups: {listed}; say how many ranks they have, "
            "groups={name: ranks}"
        )


def _is_on_accelerator(collectives: list[fx.Node], device_type: str | None) -> bool:
    """Whether collectives run on a GPU, where each costs the host a launch that no price has."""
    found = [value.device.type for node in collectives for value in tensors_of(node.meta["val"])]
    return (device_type or next(iter(found), "cpu")) not in ("cpu", "meta")


def _sizes(node: fx.Node) -> tuple[int, int]:
    return sum(tensor_bytes(value.meta["val"]) for value in operands(node)), tensor_bytes(node.meta["val"])


def _seconds_alone(node: fx.Node, prices: Prices) -> float:
    return prices.collective_seconds(collective_kind(node), collective_bytes(node), group_name(node))


class _Reader:
    """Reads positions, sizes and times of the collectives of one graph."""

    def __init__(
        self,
        gm: fx.GraphModule,
        movable: list[fx.Node],
        moving: set[fx.Node],
        seconds: Mapping[fx.Node, float],
        places: Mapping[fx.Node, RowPlace],
        device_type: str | None,
    ) -> None:
        self._places, self._device_type = places, device_type
        self._graph, self._movable, self._moving, self._seconds = gm.graph, movable, moving, seconds
        self.tasks = [node for node in gm.graph.nodes if node.op not in _NO_TASKS and node not in moving]
        self.position = {node: position for position, node in enumerate(self.tasks)}
        self._index = {node: index for index, node in enumerate(movable)}
        self._number = {node: number for number, node in enumerate(gm.graph.nodes)}
        self._kept = set(kept_inputs(gm))
        self._staged: set[fx.Node] = set()
        self._finished: set[fx.Node] = set()
        self._earliest: list[int] = []  # of the collectives so far

    def collectives(self) -> list[Collective]:
        return [self._collective(node) for node in self._movable]

    def unplanned(self) -> list[Step]:
        """The schedule of the graph as it came."""
        steps, position = [], 0
        for node in self._graph.nodes:
            if node in self.position:
                position += 1
            elif node in self._index:
                steps.append(Step(position, True, (self._index[node],)))
            elif is_wait(node) and node.all_input_nodes[0] in self._index:
                steps.append(Step(position, False, (self._index[node.all_input_nodes[0]],)))
        return steps

    def _collective(self, node: fx.Node) -> Collective:
        in_bytes, out_bytes = _sizes(node)
        earliest, after, staging = self._behind(node)
        self._earliest.append(earliest)
        deadline, results, finishing, feeds = self._ahead(node)
        owned = sum(map(self._owned_bytes(node, earliest), operands(node)))
        is_staged = any(base_of(source) in self._moving and not after for source in operands(node))
        kept = {base_of(result) for result in results}
        kept_bytes = sum(tensor_bytes(base.meta["val"]) for base in kept)
        fresh_bytes = sum(tensor_bytes(base.meta["val"]) for base in kept if base is not node)
        is_from_inputs = earliest == 0 and not after
        kind = collective_kind(node)
        is_last = deadline == len(self.tasks) and not is_from_inputs
        return Collective(
            name=node.name,
            kind=kind,
            queue=group_name(node),
            in_bytes=in_bytes,
            out_bytes=out_bytes,
            earliest=earliest,
            deadline=deadline,
            merge_key=self._merge_key(node),
            after=tuple(sorted(after)),
            ready_bytes=in_bytes if after else owned,
            staged_bytes=in_bytes if is_staged else 0,
            copy_bytes=copied_bytes(node, self._device_type),
            kept_bytes=0 if feeds and not results else kept_bytes,
            fresh_bytes=fresh_bytes,
            before_seconds=self._seconds_of(staging, self._staged),
            after_seconds=self._seconds_of(finishing, self._finished),
            views_result=kind != "all_gather",
            # A gather of what collectives made of inputs, such as an extension's scale, is one of inputs, too.
            limit="gather" if kind == "all_gather" and not earliest else "reduction" if is_last else "",
            place=self._places.get(node),
        )

    def _seconds_of(self, nodes: list[fx.Node], counted: set[fx.Node]) -> float:
        """The time of those nodes that no earlier collective has counted."""
        fresh = [node for node in nodes if node not in counted]
        counted.update(fresh)
        return float(sum(self._seconds.get(node, 0.0) for node in fresh))

    def _merge_key(self, node: fx.Node) -> tuple[str, ...] | None:
        if node.target not in MERGEABLE:
            return None
        value = operands(node)[0].meta["val"]
        symbolic = any(not isinstance(size, int) for size in value.shape)
        _, *rest = map(str, call_arguments(node).values())
        # Gathers of several dtypes are sent as bytes.
        dtype = "" if node.target is ALL_GATHER else dtype_text(value.dtype)
        return None if symbolic else (short_name(node), *rest, dtype, str(value.device))

    def _behind(self, node: fx.Node) -> tuple[int, set[int], list[fx.Node]]:
        """The first gap with its input, the collectives it comes after, and the nodes computed at its start."""
        earliest, after = 0, set()
        staging: dict[fx.Node, None] = {}
        pending = list(node.all_input_nodes)
        while pending:
            source = pending.pop()
            if source in self.position:
                earliest = max(earliest, self.position[source] + 1)
            elif is_wait(source):
                other = self._index[source.all_input_nodes[0]]
                after.add(other)
                earliest = max(earliest, self._earliest[other])
            elif source in self._moving and source not in staging:
                staging[source] = None
                pending.extend(source.all_input_nodes)
        return earliest, after, [] if after else list(staging)

    def _ahead(self, node: fx.Node) -> tuple[int, list[fx.Node], list[fx.Node], bool]:
        """The gap of its first reader, the values read, the nodes computed for them, whether a collective reads."""
        deadline, feeds = len(self.tasks), False
        results: dict[fx.Node, None] = {}
        finishing: dict[fx.Node, None] = {}
        (wait,) = node.users
        pending = [wait]
        while pending:
            value = pending.pop()
            for reader in value.users:
                if reader in self._index:
                    feeds = True
                elif reader in self._moving:
                    if reader not in finishing:
                        finishing[reader] = None
                        pending.append(reader)
                else:
                    results[value] = None
                    deadline = min(deadline, self.position.get(reader, deadline))
        return deadline, list(results), list(finishing), feeds

    def _owned_bytes(self, collective: fx.Node, earliest: int) -> Any:
        def owned(source: fx.Node) -> int:
            base = base_of(source)
            if base in self._kept or base in self._moving:
                return 0
            others = [reader for reader in _readers(base) if reader is not collective]
            is_last = all(self.position.get(reader, len(self.tasks)) < earliest for reader in others)
            return tensor_bytes(base.meta["val"]) if is_last else 0

        return owned


_NO_TASKS = ("placeholder", "get_attr", "output")


def _readers(base: fx.Node) -> Iterator[fx.Node]:
    for user in base.users:
        if is_view(user):
            yield from _readers(user)
        else:
            yield user
