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
from .. import Settings


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """The collectives of one kind in one half.

    Attributes:
        kind: as in :mod:`graphshard.cost.links`.
        num_bytes: bytes of all of them, each with the larger of input and output.
        count: their number.
        ranks: the mesh axis over which they run, or the size of a further axis.
    """

    kind: str
    num_bytes: sympy.Expr
    count: int
    ranks: sympy.Expr


def traffic_seconds(traffic: Traffic, ranks_in_node: sympy.Expr, card: HardwareCard) -> sympy.Expr:
    """Seconds of all collectives, one after the other, each of the average size.

    Args:
        traffic: the collectives.
        ranks_in_node: ranks of a group on one node.
        card: the links.
    """
    ranks = traffic.ranks
    num_bytes = traffic.num_bytes / traffic.count if traffic.count else sympy.Integer(0)
    num_nodes = sympy.ceiling(ranks / ranks_in_node)
    in_one, ways = ways_of(traffic.kind, num_bytes, ranks, ranks_in_node, num_nodes, card)
    start = card.collective_start_seconds
    return traffic.count * sympy.Piecewise(
        (sympy.Integer(0), sympy.Eq(ranks, 1)),
        (start + in_one, sympy.Le(ranks, ranks_in_node)),
        (start + sympy.Min(*ways.values(), evaluate=False), True),
    )


def ways_of(
    kind: str,
    num_bytes: sympy.Expr,
    ranks: sympy.Expr,
    near: sympy.Expr,
    num_nodes: sympy.Expr,
    card: HardwareCard,
) -> tuple[sympy.Expr, dict[str, sympy.Expr]]:
    """Seconds of one collective without its fixed start: in one node, and by algorithm on several nodes.

    Args:
        kind: as in :mod:`graphshard.cost.links`.
        num_bytes: the larger of its input and output.
        ranks: ranks of the group.
        near: those on one node.
        num_nodes: nodes of the group.
        card: the links.
    """
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
    if kind == "all_to_all":
        near_by = (near - 1) * (inside.latency_seconds + num_bytes / ranks / _rate(inside))
        far = (ranks - near) * (between.latency_seconds + num_bytes / ranks / _rate(between))
        return in_one, {"pairs": sympy.Max(near_by, far, evaluate=False)}
    rounds = 2 if kind == "all_reduce" else 1
    ways = {"ring": rounds * around, "two stages": rounds * in_two}
    if kind == "all_reduce":
        depth = (near - 1) * inside.latency_seconds + log_hops
        ways["trees"] = 2 * depth + 2 * num_bytes / sympy.Min(_rate(inside), near * _rate(between))
    return rounds * in_one, ways


def communication_lines(
    traffic: Mapping[tuple[str, str], Traffic],
    in_node: Mapping[sympy.Expr, sympy.Expr],
    card: HardwareCard,
    moves: Mapping[tuple[str, str], Traffic] | None = None,
) -> tuple[str, ...]:
    """The seconds of communication for people: one formula for each kind of collective, and the sums of them by half.

    Args:
        traffic: collectives of one run of each half, by half and kind.
        in_node: ranks of a group on one node, by its mesh axis.
        card: the links.
        moves: the same of the reshards over the further axis of the mesh.
    """
    moves = moves or {}
    size, ranks, near, nodes = (sympy.Symbol(name, positive=True) for name in "bnmk")
    lines = [
        "one collective: b bytes on n ranks, m of them in one node, k = ceiling(n/m) nodes; none for n = 1"
    ]
    start = f"{card.collective_start_seconds:.4g} + "
    for kind in dict.fromkeys(one.kind for one in (*traffic.values(), *moves.values())):
        in_one, ways = ways_of(kind, size, ranks, near, nodes, card)
        lines.append(f"{kind}(b, n, m) = {start}{_shown(in_one)} in one node, else the least of")
        lines += [f"  {start}{_shown(way)} ({name})" for name, way in ways.items()]
    for what, of_what in (("communication", traffic), ("reshards", moves)):
        for half in dict.fromkeys(half for half, _ in of_what):
            by_axis: dict[sympy.Expr, list[str]] = {}
            for (of_half, _), one in of_what.items():
                if of_half == half and one.count:
                    near = _shown(in_node[one.ranks])
                    call = f"{one.kind}({_shown(one.num_bytes)}/{one.count}, {one.ranks}, {near})"
                    by_axis.setdefault(one.ranks, []).append(f"{one.count} * {call}")
            queues = [" + ".join(parts) for parts in by_axis.values()]
            text = queues[0] if len(queues) == 1 else "the longest of: " + "; ".join(queues)
            lines.append(f"{half} {what} = {text if queues else '0'}")
    return tuple(lines)


def _shown(expression: sympy.Expr) -> str:
    """An expression with four digits of its fractions; whole numbers are exact."""
    fractions = {number: number.evalf(4) for number in expression.atoms(sympy.Float)}
    text = sympy.sstr(expression.xreplace(fractions), full_prec=False)
    return f"({text})" if expression.is_Add and not fractions else text


def _moved(num_bytes: sympy.Expr, ranks: sympy.Expr) -> sympy.Expr:
    return num_bytes * (ranks - 1) / ranks


def _rate(link: LinkClass) -> float:
    return link.bandwidth * link.efficiency


def seconds_over_shards(
    settings: Settings, shards: Mapping[str, sympy.Expr], at_reference: Mapping[str, int]
) -> tuple[sympy.Expr, sympy.Expr]:
    """Seconds of the optimizer's step, and to add the gradients of one of several micro-batches to those before.

    Args:
        settings: optimizer, card and number of micro-batches.
        shards: bytes of "trained" shards and of their "gradients".
        at_reference: the same at the reference, which give the efficiency of memory.
    """
    card, optimizer = settings.card, settings.optimizer

    def streaming(what: str, times: int) -> sympy.Expr:
        if not times * at_reference[what]:
            return sympy.Integer(0)
        rate = card.memory_bandwidth * card.efficiency["memory"].at(times * at_reference[what])
        return card.kernel_overhead_seconds + times * shards[what] / rate

    adding = streaming("gradients", 3) if settings.micro_batches > 1 else sympy.Integer(0)
    return streaming("trained", optimizer.num_reads + optimizer.num_writes), adding


def halves_seconds(
    compute: Mapping[str, sympy.Expr],
    traffic: Mapping[tuple[str, str], Traffic],
    symbols: Mapping[str, sympy.Symbol],
    card: HardwareCard,
    *,
    optimizer: sympy.Expr,
    accumulation: sympy.Expr,
    micro_batches: int,
    moves: Mapping[tuple[str, str], Traffic],
    further: int,
) -> dict[str, sympy.Expr]:
    """Seconds of each half's compute and communication, and of the step.

    Args:
        compute: seconds of compute of one run of each half.
        traffic: collectives of one run of each half, by kind.
        symbols: symbols by name; the mesh axes are "shard" and "replicate".
        card: the links.
        optimizer: seconds of the optimizer's step.
        accumulation: seconds to add the gradients of one micro-batch to those before; 0 for one alone.
        micro_batches: number of runs of the halves.
        moves: reshards of one run of each half, by kind. Compute waits for them: they move values between kernels.
        further: the ranks of their axis.
    """
    in_node = ranks_in_node(symbols, card, further)
    found: dict[str, sympy.Expr] = {}
    step = optimizer + micro_batches * accumulation
    for half, seconds in compute.items():
        ours = (one for (name, _), one in traffic.items() if name == half)
        queues: dict[sympy.Symbol, sympy.Expr] = {}  # groups of other axes communicate at the same time
        for one in ours:
            seconds_of_one = traffic_seconds(one, in_node[one.ranks], card)
            queues[one.ranks] = queues.get(one.ranks, sympy.Integer(0)) + seconds_of_one
        communication = sympy.Max(*queues.values(), evaluate=False) if queues else sympy.Integer(0)
        found[f"{half} compute"], found[f"{half} communication"] = seconds, communication
        if further > 1:
            ours = (one for (name, _), one in moves.items() if name == half)
            moving = sympy.Add(*(traffic_seconds(one, in_node[one.ranks], card) for one in ours))
            found[f"{half} reshards"], seconds = moving, seconds + moving
        step = step + micro_batches * sympy.Max(seconds, communication, evaluate=False)
    added = {"accumulation": accumulation} if accumulation else {}
    return found | added | {"optimizer": optimizer, "step": step}


def ranks_in_node(
    symbols: Mapping[str, sympy.Symbol], card: HardwareCard, further: int = 1
) -> dict[sympy.Expr, sympy.Expr]:
    """The ranks of a group that are on one node, by mesh axis; the further axis, which is innermost, by its size."""
    per_node, inner = sympy.Integer(int(card.ranks_per_node)), sympy.Integer(further)
    shard = symbols["shard"]

    def on_node(size: sympy.Expr, distance: sympy.Expr) -> sympy.Expr:
        return sympy.Min(size, sympy.Max(1, sympy.floor(per_node / distance)))

    found: dict[sympy.Expr, sympy.Expr] = {shard: on_node(shard, inner)}
    if (
        "replicate" in symbols
    ):  # the outer axis: the distance of neighbours along it is the number of ranks inside
        found[symbols["replicate"]] = on_node(symbols["replicate"], inner * shard)
    if further > 1:
        found[inner] = sympy.Min(inner, per_node)
    return found


def sizes_that_fill_nodes(per_node: int, most: int, inner: int = 1) -> list[int]:
    """Sizes from 2 to ``most`` of an axis around ``inner`` ranks: any within a node, whole nodes beyond."""
    return [size for size in range(2, most + 1) if size * inner <= per_node or not size * inner % per_node]


def stops_hiding(formulas: Formulas, card: HardwareCard, most: int, further: int) -> int | None:
    """The smallest shard axis (whole nodes beyond one) on which a half communicates longer than it computes.

    Reshards over a further axis of that many ranks count as compute.
    """
    symbols = formulas.symbols
    shard = symbols["shard"]
    others = {
        symbols[name]: sympy.Integer(size)
        for name, size in formulas.reference.items()
        if name in symbols and name != "shard"
    }
    pairs = []
    for half in ("forward", "backward"):
        compute = formulas.seconds[f"{half} compute"] + formulas.seconds.get(f"{half} reshards", 0)
        communication = sympy.lambdify(
            shard, formulas.seconds[f"{half} communication"].xreplace(others), "math"
        )
        pairs.append((float(compute.xreplace(others)), communication))
    sizes = sizes_that_fill_nodes(int(card.ranks_per_node), most, further)
    return next((size for size in sizes if any(talk(size) > compute for compute, talk in pairs)), None)
