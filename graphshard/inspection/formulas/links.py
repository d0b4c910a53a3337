"""Seconds of communication as expressions in the mesh axes, by algorithms of :mod:`graphshard.cost.links`.

Within a node the algorithm is a ring. Between nodes it is the fastest of: a ring around all ranks; two stages (a ring
or doubling across nodes, then a ring inside each); and, for an all-reduce, two trees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import sympy

from ...cost import HardwareCard, LinkClass
from ...report import Formulas


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The collectives of one kind in one half.

    Attributes:
        kind: as in :mod:`graphshard.cost.links`.
        num_bytes: bytes of all of them, each with the larger of input and output.
        count: their number.
        ranks: the mesh axis over which they run.
    """

    kind: str
    num_bytes: sympy.Expr
    count: int
    ranks: sympy.Symbol


def traffic_seconds(traffic: Traffic, ranks_in_node: sympy.Expr, card: HardwareCard) -> sympy.Expr:
    """Seconds of all collectives, one after the other, each of the average size.

    Args:
        traffic: the collectives.
        ranks_in_node: ranks of a group on one node.
        card: the links.
    """
    ranks, near = traffic.ranks, ranks_in_node
    num_bytes = traffic.num_bytes / traffic.count if traffic.count else sympy.Integer(0)
    num_nodes = sympy.ceiling(ranks / near)
    inside, between = card.intra_node, card.inter_node
    hops = (num_nodes - 1) * between.latency_seconds + (ranks - num_nodes) * inside.latency_seconds
    around = hops + _moved(num_bytes, ranks) / sympy.Min(_rate(inside), near * _rate(between))
    in_one = (ranks - 1) * inside.latency_seconds + _moved(num_bytes, ranks) / _rate(inside)
    part = num_bytes / near
    log_hops = sympy.ceiling(sympy.log(num_nodes, 2)) * between.latency_seconds
    across = _moved(part, num_nodes) / _rate(between) + sympy.Min(
        (num_nodes - 1) * between.latency_seconds, log_hops, evaluate=False
    )
    in_two = across + (near - 1) * inside.latency_seconds + _moved(num_bytes, near) / _rate(inside)
    rounds = 2 if traffic.kind == "all_reduce" else 1
    ways = [rounds * around, rounds * in_two]
    if traffic.kind == "all_reduce":
        depth = (near - 1) * inside.latency_seconds + log_hops
        ways.append(2 * depth + 2 * num_bytes / sympy.Min(_rate(inside), near * _rate(between)))
    start = card.collective_start_seconds
    return traffic.count * sympy.Piecewise(
        (sympy.Integer(0), sympy.Eq(ranks, 1)),
        (start + rounds * in_one, sympy.Le(ranks, near)),
        (start + sympy.Min(*ways, evaluate=False), True),
    )


def _moved(num_bytes: sympy.Expr, ranks: sympy.Expr) -> sympy.Expr:
    return num_bytes * (ranks - 1) / ranks


def _rate(link: LinkClass) -> float:
    return link.bandwidth * link.efficiency


def halves_seconds(
    compute: Mapping[str, sympy.Expr],
    traffic: Mapping[tuple[str, str], Traffic],
    symbols: Mapping[str, sympy.Symbol],
    card: HardwareCard,
    *,
    optimizer: sympy.Expr,
    micro_batches: int,
) -> dict[str, sympy.Expr]:
    """Seconds of each half's compute and communication, and of the step.

    Args:
        compute: seconds of compute of one run of each half.
        traffic: collectives of one run of each half, by kind.
        symbols: symbols by name; the mesh axes are "shard" and "replicate".
        card: the links.
        optimizer: seconds of the optimizer's step.
        micro_batches: number of runs of the halves.
    """
    per_node = sympy.Integer(int(card.ranks_per_node))
    shard = symbols["shard"]
    in_node = {shard: sympy.Min(shard, per_node)}
    if "replicate" in symbols:  # the outer axis: the distance of neighbours along it is the number of shards
        neighbours = sympy.Max(1, sympy.floor(per_node / shard))
        in_node[symbols["replicate"]] = sympy.Min(symbols["replicate"], neighbours)
    found: dict[str, sympy.Expr] = {}
    step = optimizer
    for half, seconds in compute.items():
        ours = (one for (name, _), one in traffic.items() if name == half)
        queues: dict[sympy.Symbol, sympy.Expr] = {}  # groups of other axes communicate at the same time
        for one in ours:
            seconds_of_one = traffic_seconds(one, in_node[one.ranks], card)
            queues[one.ranks] = queues.get(one.ranks, sympy.Integer(0)) + seconds_of_one
        communication = sympy.Max(*queues.values(), evaluate=False) if queues else sympy.Integer(0)
        found[f"{half} compute"], found[f"{half} communication"] = seconds, communication
        step = step + micro_batches * sympy.Max(seconds, communication, evaluate=False)
    return found | {"optimizer": optimizer, "step": step}


def stops_hiding(formulas: Formulas, card: HardwareCard, most: int) -> int | None:
    """The smallest shard axis (whole nodes beyond one) on which a half communicates longer than it computes."""
    symbols = formulas.symbols
    shard = symbols["shard"]
    others = {symbols[name]: size for name, size in formulas.reference.items() if name != "shard"}
    pairs = []
    for half in ("forward", "backward"):
        compute = float(formulas.seconds[f"{half} compute"].subs(others))
        communication = sympy.lambdify(shard, formulas.seconds[f"{half} communication"].subs(others), "math")
        pairs.append((compute, communication))
    per_node = int(card.ranks_per_node)
    sizes = [*range(2, per_node + 1), *range(2 * per_node, most + 1, per_node)]
    return next((size for size in sizes if any(talk(size) > compute for compute, talk in pairs)), None)
