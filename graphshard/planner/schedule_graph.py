"""``schedule_graph``: plans the collectives of any captured graph, and puts the plan into the graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import fx

from .._compat import group_by_name
from ..cost import (
    CollectiveTables,
    CostModel,
    GraphPrices,
    GroupTopology,
    HardwareCard,
    card_of,
    tables_of,
    warn_of,
)
from ..errors import OptionError, OptionTypeError
from ..ir import REDUCE_GRAD, UNSHARD, call_arguments, group_name, is_collective, short_name, with_derivative
from ..memory import scratch_of_card
from .plan_graph import PlannedGraph, plan_graph
from .search import Plan
from .user_constraints import NO_WISHES, Wishes


def schedule_graph(
    gm: fx.GraphModule,
    *,
    hardware: str | Path | HardwareCard,
    tables: str | Path | CollectiveTables | None = None,
    memory_budget: int | str | None = None,
    groups: Mapping[str, int | GroupTopology] | None = None,
    shared_links: Sequence[tuple[str, ...]] = (),
    buckets: Sequence[Sequence[fx.Node]] = (),
    prefetch: Sequence[tuple[fx.Node, fx.Node]] = (),
    max_gathers: int = 0,
    max_reductions: int = 0,
    move_compute: bool = True,
) -> Plan:
    """Merges, splits and orders the collectives of any captured graph, in place; on an error nothing is changed.

    Args:
        gm: a forward, inference or backward graph with ``_c10d_functional`` collectives and ``meta["val"]`` on its
            values. Fake tensors, and groups that exist only by name, will do.
        hardware: a card: its name, its file or the card itself.
        tables: measured times of collectives (CSV), used where they have rows.
        memory_budget: the most that may be live while the graph runs, inputs that its caller keeps included: bytes,
            or a text like "60GiB" or "500MB". None for no limit.
        groups: ranks, or topology, of process groups by name. If a group is left out, its ranks are those that torch
            knows, else the number that gathers and reduce-scatters of the graph say. In that case the ranks lie side
            by side, as many to a node as the card has.
        shared_links: names of groups that share a link, ``[("replicate", "shard")]`` for instance; their collectives
            run one after the other. Groups that are not named do not slow each other down.
        buckets: groups of nodes that start collectives; each group becomes one bucket.
        prefetch: pairs of such nodes (a, b): b starts right after the wait for a.
        max_gathers: all-gathers of inputs that may be in flight at a time, a bucket counting once; 0 for any number.
        max_reductions: the same for collectives whose results compute does not read.
        move_compute: whether compute may move beside collectives that compute reads soon, those of tensor
            parallelism for instance. Results stay the same to the bit.

    Returns:
        The plan, with predicted times, bounds and reasons.

    Raises:
        CardError, TableError, OptionError, OptionTypeError: a card, table, budget, group or shared link cannot be
            read; the ranks of a group contradict its collectives; a link names unknown groups.
        InfeasibleBudgetError: no plan keeps the budget; names one that a plan keeps.
        ProblemError: buckets, prefetches or limits contradict each other, or name nodes of another graph.
        UnpricedGroupError: nothing says how many ranks a group has.
        UntypedGraphError: a collective has no ``meta["val"]``.

    Warns (UserWarning), once each, of what ``tables`` lack.
    """
    check_graph(gm)
    _check_type("max_gathers", max_gathers, int, "a number of buckets (an int)")
    _check_type("max_reductions", max_reductions, int, "a number of buckets (an int)")
    _check_type("move_compute", move_compute, bool, "True or False")
    card = card_of(hardware)
    measured = tables_of(tables)
    told: list[str] = []
    model = CostModel(card=card, tables=measured, groups=topologies(gm, card, groups or {}), told=told)
    _check_links(shared_links, model.groups)
    planned = plan_graph(
        gm,
        model,
        memory_budget=memory_budget,
        wishes=Wishes(
            shared_links=shared_links,
            fixed_buckets=_groups_of_nodes("buckets", buckets, "a list of groups of nodes, [[a, b], [c, d]]"),
            prefetch=_groups_of_nodes("prefetch", prefetch, "a list of pairs of nodes, [(a, b)]", size=2),
            max_gathers=max_gathers,
            max_reductions=max_reductions,
        ),
        device_type=card.device_type,
        scratch=scratch_of_card(card.machine, card.file, gm, card.device_type),
        move_compute=move_compute,
    )
    warn_of(told, stacklevel=2)
    return _put(gm, planned)


def check_graph(gm: Any) -> None:
    """Refuses a graph whose collectives cannot be priced.

    Raises:
        OptionTypeError: ``gm`` is no graph.
        OptionError: its shards are not lowered to collectives yet, or collectives are ops with a derivative.
    """
    if not isinstance(gm, fx.GraphModule):
        raise OptionTypeError(f"gm={gm!r} must be a captured graph, a torch.fx.GraphModule")
    ops = (UNSHARD, REDUCE_GRAD)
    if found := [node for node in gm.graph.nodes if node.op == "call_function" and node.target in ops]:
        raise OptionError(
            f"gm has shard ops ({found[0].name} and {len(found) - 1} others), which have no price: run the pass "
            "lower_shards first, which makes collectives of them"
        )
    if found := with_derivative(gm.graph):
        names = ", ".join(node.name for node in found[:3]) + (", ..." if len(found) > 3 else "")
        raise OptionError(
            f"gm has collectives with a derivative of their own ({names}: {found[0].target}): set their target to "
            "the op of that name in torch.ops._c10d_functional, which takes the same arguments"
        )


def _check_type(option: str, value: Any, wanted: type, form: str) -> None:
    if type(value) is not wanted:
        raise OptionTypeError(f"{option}={value!r} must be {form}")


def _groups_of_nodes(
    option: str, given: Any, form: str, size: int | None = None
) -> list[tuple[fx.Node, ...]]:
    """The user's lists as tuples; each is read only once, since it may be a generator."""
    try:
        found = [tuple(nodes) for nodes in given]
    except TypeError:
        raise OptionTypeError(f"{option}={given!r} must be {form}") from None
    for nodes in found:
        if not all(isinstance(node, fx.Node) for node in nodes) or (size or len(nodes)) != len(nodes):
            raise OptionTypeError(f"{option} has {nodes!r} but must be {form}")
    return found


def _check_links(shared_links: Any, groups: Mapping[str, GroupTopology]) -> None:
    is_list = isinstance(shared_links, Sequence) and not isinstance(shared_links, str)
    if not is_list or any(
        isinstance(names, str)
        or not isinstance(names, Collection)
        or not all(isinstance(name, str) for name in names)
        for names in shared_links
    ):
        raise OptionTypeError(
            f"shared_links={shared_links!r} must be a list with the names of the groups on each link, "
            '[("replicate", "shard")] for instance'
        )
    if unknown := [name for names in shared_links for name in names if name not in groups]:
        raise OptionError(
            f"shared_links names {', '.join(map(repr, unknown))}, but the graph and groups= have "
            f"{', '.join(map(repr, groups)) or 'no group'}"
        )


def topologies(
    gm: fx.GraphModule, card: HardwareCard, given: Mapping[str, int | GroupTopology]
) -> dict[str, GroupTopology]:
    """The topology of each group of a graph's collectives: as given, as torch knows, or as the collectives say.

    Ranks of groups that torch does not know lie side by side, as many to a node as the card has.

    Raises:
        OptionTypeError: ``given`` is no mapping to numbers or topologies.
        OptionError: a number is below 1, or differs from what a collective of the group says.
    """
    per_node = int(card.ranks_per_node)
    found = _given_topologies(given, per_node)
    collectives = list(filter(is_collective, gm.graph.nodes))
    _check_sizes(collectives, found)
    for name in dict.fromkeys(map(group_name, collectives)):
        if name not in found and (ranks := _ranks_of(name)):
            found[name] = GroupTopology.of_ranks(ranks, per_node)
    for node in collectives:
        name = group_name(node)
        group_size = call_arguments(node).get("group_size")
        if name not in found and group_size is not None:
            found[name] = _side_by_side(group_size, per_node)
    return found


def _given_topologies(given: object, per_node: int) -> dict[str, GroupTopology]:
    if not isinstance(given, Mapping):
        raise OptionTypeError(
            f"groups={given!r} must be ranks, or topologies, by the names of process groups"
        )
    found = {}
    for name, value in given.items():
        if not isinstance(name, str):
            raise OptionTypeError(f"groups has {name!r}, but the names of process groups are texts")
        if isinstance(value, GroupTopology):
            found[name] = value
        elif isinstance(value, bool) or not isinstance(value, int):
            raise OptionTypeError(
                f"groups[{name!r}]={value!r} must be a number of ranks (an int) or a GroupTopology"
            )
        elif value < 1:
            raise OptionError(f"groups[{name!r}]={value} must be the number of ranks, 1 or more")
        else:
            found[name] = _side_by_side(value, per_node)
    return found


def _check_sizes(collectives: Sequence[fx.Node], given: Mapping[str, GroupTopology]) -> None:
    wrong: dict[str, str] = {}
    for node in collectives:
        name, size = group_name(node), call_arguments(node).get("group_size")
        if name in given and isinstance(size, int) and size != given[name].num_ranks:
            ranks = given[name].num_ranks
            wrong.setdefault(
                name,
                f"groups[{name!r}] has {ranks} ranks, but {node.name} ({short_name(node)}) has group_size={size}",
            )
    if wrong:
        raise OptionError(
            f"{'; '.join(wrong.values())}: give as many as the graph says, or leave the group out"
        )


def _side_by_side(num_ranks: int, per_node: int) -> GroupTopology:
    return GroupTopology(num_ranks=num_ranks, ranks_per_node=min(num_ranks, per_node))


def _ranks_of(name: str) -> list[int]:
    """The ranks of a process group that exists here; [] if it does not."""
    if not dist.is_initialized():
        return []
    try:
        return dist.get_process_group_ranks(group_by_name(name))
    except (RuntimeError, KeyError, ValueError):
        return []


def schedule_with_prices(
    gm: fx.GraphModule,
    prices: GraphPrices,
    *,
    memory_budget: int | str | None = None,
    wishes: Wishes = NO_WISHES,
    device_type: str | None = None,
    move_compute: bool = True,
) -> Plan:
    """Plans and changes a graph in place; on an error nothing is changed.

    Args and errors are those of :func:`plan_graph`.
    """
    planned = plan_graph(
        gm,
        prices,
        memory_budget=memory_budget,
        wishes=wishes,
        device_type=device_type,
        move_compute=move_compute,
    )
    return _put(gm, planned)


def _put(gm: fx.GraphModule, planned: PlannedGraph) -> Plan:
    """Replaces the graph by the planned one; its calling convention stays."""
    planned.gm.graph.set_codegen(gm.graph._codegen)
    gm.graph = planned.gm.graph
    gm.recompile()
    return planned.plan
