"""Seconds of a collective from its bytes and the topology of its group.

A formula is latency + bytes / bandwidth of one algorithm. The cheapest algorithm and protocol counts, as in NCCL's
tuner. In the formulas ``S`` is the bytes of the larger of input and output, ``n`` the ranks, ``g`` the ranks of the
group in one node (where nodes differ: the most for latencies, the fewest for traffic between nodes), ``m`` its nodes,
``a`` the latency of a hop and ``B`` the bandwidth of a rank:

- ring: a gather or a reduce-scatter takes ``n - 1`` hops and moves ``(n - 1) / n * S`` (Thakur,
  Rabenseifner and Gropp, "Optimization of Collective Communication Operations in MPICH", IJHPCA 19(1),
  2005, section 4); an all-reduce is a reduce-scatter and then a gather. A ring through several nodes enters and leaves
  a node once per channel, each channel through another network card, so it moves at
  ``min(B_intra, g * B_inter)``; ``m - 1`` of its hops cross nodes (NCCL, src/graph/tuning.cc).
- tree: an all-reduce over two binary trees moves ``2 S`` (Sanders, Speck and Traeff, "Two-tree
  algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35, 2009) in
  ``2 (g - 1 + log2(m))`` hops, since NCCL's trees are chains inside a node (tuning.cc again).
  With one rank a node, recursive doubling and halving move ``(n - 1) / n * S`` in ``log2(n)`` hops
  (Thakur et al.; NCCL's PAT).
- hierarchical, with equally many ranks on each node: across nodes each rank moves ``1 / g`` of the data, then all of it
  moves inside a node.
- all-to-all: ``n - 1`` messages of ``S / n``; those that leave the node share its cards.
- broadcast: a pipelined ring, ``S`` in ``n - 1`` hops, or a binomial tree, ``log2(n)`` times ``S``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from torch import fx

from ..errors import OptionError, ShardingError
from ..ir import (
    ALL_REDUCE,
    ALL_REDUCE_HOOK,
    ALL_TO_ALL,
    FUNCTIONAL_FORMS,
    GATHERS,
    REDUCE_SCATTERS,
    MeshAxis,
    MeshLayout,
    c10d,
    operands,
    tensor_bytes,
)
from .cards import HardwareCard, LinkClass, Protocol

_FUNCTIONAL_KINDS = {
    **dict.fromkeys((*GATHERS, c10d.all_gather_into_tensor_coalesced.default), "all_gather"),
    **dict.fromkeys((*REDUCE_SCATTERS, c10d.reduce_scatter_tensor_coalesced.default), "reduce_scatter"),
    **dict.fromkeys((ALL_REDUCE, c10d.all_reduce_coalesced.default, ALL_REDUCE_HOOK), "all_reduce"),
    ALL_TO_ALL: "all_to_all",
    c10d.broadcast.default: "broadcast",
}

#: The kinds of collectives, by the ops that start them.
KIND_OF = _FUNCTIONAL_KINDS | {op: _FUNCTIONAL_KINDS[form] for op, form in FUNCTIONAL_FORMS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTopology:
    """How the ranks of a process group lie on nodes.

    The defaults of ``num_nodes`` and ``fewest_per_node`` hold for consecutive ranks from the start of a node.

    Attributes:
        num_ranks: ranks of the group.
        ranks_per_node: the most of its ranks on one node.
        num_nodes: nodes that the group spans.
        fewest_per_node: the fewest of its ranks on one of these nodes.

    Raises:
        ShardingError: no ranks, more ranks in a node than in the group, or an impossible number of nodes.
    """

    num_ranks: int
    ranks_per_node: int
    num_nodes: int = 0
    fewest_per_node: int = 0

    def __post_init__(self) -> None:
        ranks, most = self.num_ranks, self.ranks_per_node
        if not 1 <= most <= ranks:
            raise ShardingError(
                f"a group of {ranks} ranks cannot have {most} of them in a node: "
                "give at least 1 and at most all of them"
            )
        num_nodes = self.num_nodes or -(-ranks // most)
        fewest = self.fewest_per_node or max(1, ranks - (num_nodes - 1) * most)
        if not (
            fewest <= most and (num_nodes - 1) * fewest + most <= ranks <= (num_nodes - 1) * most + fewest
        ):
            raise ShardingError(
                f"a group of {ranks} ranks cannot lie on {num_nodes} nodes with {fewest} to {most} of them on each"
            )
        object.__setattr__(self, "num_nodes", num_nodes)
        object.__setattr__(self, "fewest_per_node", fewest)

    @staticmethod
    def of_ranks(ranks: Iterable[int], ranks_per_node: int) -> GroupTopology:
        """The topology of ranks given by their number in the job; ``ranks_per_node`` consecutive ones share a node."""
        counts = Counter(rank // ranks_per_node for rank in ranks)
        return GroupTopology(
            num_ranks=counts.total(),
            ranks_per_node=max(counts.values()),
            num_nodes=len(counts),
            fewest_per_node=min(counts.values()),
        )


def mesh_topologies(mesh: Mapping[str, int], ranks_per_node: int) -> dict[str, GroupTopology]:
    """Topology of the group along each axis of a mesh.

    Args:
        mesh: axis sizes by name, outermost first: ``{"replicate": 8, "shard": 8}``.
        ranks_per_node: consecutive ranks that share a node.

    Raises:
        ShardingError: sizes that are not positive whole numbers; lists them with their axes.
    """
    sizes = {f"axis {name!r}": size for name, size in mesh.items()} | {"ranks_per_node": ranks_per_node}
    if bad := [f"{what} is {size!r}" for what, size in sizes.items() if not _is_count(size)]:
        raise ShardingError(
            f"a mesh has at least one rank on each axis and in each node, but {', '.join(bad)}"
        )
    axes = tuple(MeshAxis(label=name, size=size, group_name=name) for name, size in mesh.items())
    return layout_topologies(MeshLayout(axes=axes), ranks_per_node)


def _is_count(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size > 0


def layout_topologies(layout: MeshLayout, ranks_per_node: int) -> dict[str, GroupTopology]:
    """Topology of the groups of each axis, by the label of the axis and by the name of its group.

    Where the groups of one axis lie differently on nodes, the group over the most nodes counts, and among those the one
    with the fewest ranks on a node.
    """
    whole = [axis for axis in layout.axes if not axis.part_of]
    strides = {
        axis.label: math.prod(inner.size for inner in whole[index + 1 :]) for index, axis in enumerate(whole)
    }
    found = {}
    for axis in layout.axes:
        stride = strides[axis.part_of or axis.label]
        topology = _widest_group(axis.size, stride, layout.num_ranks, ranks_per_node)
        found[axis.label] = found[axis.group_name] = topology
    return found


def _widest_group(size: int, stride: int, num_ranks: int, ranks_per_node: int) -> GroupTopology:
    firsts = (rank for rank in range(num_ranks) if rank // stride % size == 0)
    groups = (
        GroupTopology.of_ranks(range(first, first + size * stride, stride), ranks_per_node)
        for first in firsts
    )
    return max(groups, key=lambda group: (group.num_nodes, -group.fewest_per_node))


def collective_kind(node: fx.Node) -> str:
    """One of :data:`graphshard.cost.cards.COLLECTIVE_KINDS` for the start of a collective.

    Raises:
        OptionError: the node starts no collective; messages between two ranks have no price.
    """
    if node.target not in KIND_OF:
        raise OptionError(f"{node.name} ({node.target}) starts no collective that has a price")
    return KIND_OF[node.target]


def collective_bytes(node: fx.Node) -> int:
    """Bytes of a collective: the larger of all its inputs and all its outputs."""
    sent = sum(tensor_bytes(value.meta["val"]) for value in operands(node))
    return max(sent, tensor_bytes(node.meta["val"]))


@dataclass(frozen=True, slots=True)
class _Ways:
    """Both link classes under one protocol: latencies in seconds, bandwidths in bytes/s."""

    a_in: float
    a_out: float
    b_in: float
    b_out: float


def formula_seconds(kind: str, num_bytes: int, group: GroupTopology, card: HardwareCard) -> float:
    """Seconds of a collective by the cheapest algorithm.

    Args:
        kind: one of :data:`graphshard.cost.cards.COLLECTIVE_KINDS`.
        num_bytes: bytes of the larger of input and output.
        group: the topology of its ranks.
        card: the links and their efficiency.
    """
    if group.num_ranks == 1:
        return 0.0
    algorithms = _ALGORITHMS[kind]
    times = (
        algorithm(num_bytes, group, ways) for ways in _protocols(card, group) for algorithm in algorithms
    )
    return card.collective_start_seconds + min(times)


#: An algorithm for a collective: legs that run at the same time, each (seconds of latency, seconds of transfer).
Way = tuple[tuple[float, float], ...]


def formula_ways(kind: str, num_bytes: int, group: GroupTopology, card: HardwareCard) -> tuple[Way, ...]:
    """The ways among which :func:`formula_seconds` takes the quickest, with latency and transfer apart.

    :func:`formula_seconds` is ``card.collective_start_seconds`` plus the least, over the ways, of the longest leg
    (latency + transfer). Ways that are never the quickest are left out.
    """
    if group.num_ranks == 1:
        return (((0.0, 0.0),),)
    found: list[Way] = []
    for ways in _protocols(card, group):
        without_latency = replace(ways, a_in=0.0, a_out=0.0)
        for algorithm in _ALGORITHMS[kind]:
            legs = (_pairwise_inside, _pairwise_between) if algorithm is _pairwise else (algorithm,)
            way = tuple((leg(0, group, ways), leg(num_bytes, group, without_latency)) for leg in legs)
            if math.isfinite(way[0][0]):
                found.append(way)
    return tuple(way for way in found if not any(_beats(other, way) for other in found))


def _beats(one: Way, other: Way) -> bool:
    """Whether every leg of ``one`` is as quick in latency and in transfer, and one leg is quicker."""
    return one != other and all(
        a <= b for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)
    )


def _protocols(card: HardwareCard, group: GroupTopology) -> Iterator[_Ways]:
    """The protocols of the links that the group uses; if it uses both link classes, protocols that both have."""
    inside, between = card.intra_node, card.inter_node
    yield _Ways(inside.latency_seconds, between.latency_seconds, _rate(inside), _rate(between))
    pairs: list[tuple[Protocol | None, Protocol | None]]
    if group.num_nodes == 1:
        pairs = [(near, None) for near in inside.protocols]
    elif group.ranks_per_node == 1:
        pairs = [(None, far) for far in between.protocols]
    else:
        pairs = [
            (near, far) for near in inside.protocols for far in between.protocols if near.name == far.name
        ]
    for near, far in pairs:
        a_in, b_in = _under(inside, near)
        a_out, b_out = _under(between, far)
        yield _Ways(a_in, a_out, b_in, b_out)


def _under(link: LinkClass, protocol: Protocol | None) -> tuple[float, float]:
    """Latency and bandwidth of a link under a protocol; None for its own."""
    if protocol is None:
        return link.latency_seconds, _rate(link)
    return protocol.latency_seconds, _rate(link) * protocol.bandwidth_fraction


def _rate(link: LinkClass) -> float:
    return link.bandwidth * link.efficiency


def _ring_hops(group: GroupTopology, ways: _Ways) -> float:
    """Latency of ``n - 1`` hops around the ring."""
    crossing = group.num_nodes - 1
    return crossing * ways.a_out + (group.num_ranks - 1 - crossing) * ways.a_in


def _ring_rate(group: GroupTopology, ways: _Ways) -> float:
    if group.num_nodes == 1:
        return ways.b_in
    if group.ranks_per_node == 1:
        return ways.b_out
    return min(ways.b_in, group.fewest_per_node * ways.b_out)


def _log_hops(group: GroupTopology, ways: _Ways) -> float:
    """Latency of a tree's depth: a chain inside a node, then a binary tree over nodes."""
    return (group.ranks_per_node - 1) * ways.a_in + math.ceil(math.log2(group.num_nodes)) * ways.a_out


def _ring(num_bytes: float, group: GroupTopology, ways: _Ways) -> float:
    moved = num_bytes * (group.num_ranks - 1) / group.num_ranks
    return _ring_hops(group, ways) + moved / _ring_rate(group, ways)


def _recursive(num_bytes: float, group: GroupTopology, ways: _Ways) -> float:
    """Recursive doubling or halving, with one rank on each node."""
    if group.ranks_per_node > 1:
        return math.inf
    moved = num_bytes * (group.num_ranks - 1) / group.num_ranks
    return _log_hops(group, ways) + moved / _ring_rate(group, ways)


def _hierarchical(num_bytes: float, group: GroupTopology, ways: _Ways) -> float:
    """A gather or a reduce-scatter in two stages, with equally many ranks on each node."""
    if not 1 < group.fewest_per_node == group.ranks_per_node < group.num_ranks:
        return math.inf
    inside = GroupTopology(num_ranks=group.ranks_per_node, ranks_per_node=group.ranks_per_node)
    across = GroupTopology(num_ranks=group.num_nodes, ranks_per_node=1)
    part = num_bytes / group.ranks_per_node
    stage = min(_ring(part, across, ways), _recursive(part, across, ways))
    return stage + _ring(num_bytes, inside, ways)


def _twice(
    half: Callable[[float, GroupTopology, _Ways], float],
) -> Callable[[float, GroupTopology, _Ways], float]:
    """An all-reduce as a reduce-scatter and a gather."""
    return lambda num_bytes, group, ways: 2 * half(num_bytes, group, ways)


def _double_tree(num_bytes: float, group: GroupTopology, ways: _Ways) -> float:
    return 2 * _log_hops(group, ways) + 2 * num_bytes / _ring_rate(group, ways)


def _pairwise(num_bytes: float, group: GroupTopology, ways: _Ways) -> float:
    """All-to-all; messages inside and between nodes move at the same time."""
    return max(_pairwise_inside(num_bytes, group, ways), _pairwise_between(num_bytes, group, ways))


def _pairwise_inside(num_bytes: float, group: GroupTopology, ways: _Ways) -> float:
    others = group.ranks_per_node - 1
    return others * ways.a_in + num_bytes * others / group.num_ranks / ways.b_in


def _pairwise_between(num_bytes: float, group: GroupTopology, ways: _Ways) -> float:
    others = group.num_ranks - group.fewest_per_node
    return others * ways.a_out + num_bytes * others / group.num_ranks / ways.b_out


def _chain(num_bytes: float, group: GroupTopology, ways: _Ways) -> float:
    return _ring_hops(group, ways) + num_bytes / _ring_rate(group, ways)


def _binomial(num_bytes: float, group: GroupTopology, ways: _Ways) -> float:
    inside, between = math.ceil(math.log2(group.ranks_per_node)), math.ceil(math.log2(group.num_nodes))
    near = inside * (ways.a_in + num_bytes / ways.b_in)
    return near + between * (ways.a_out + num_bytes / ways.b_out)


_HALVES = (_ring, _recursive, _hierarchical)
_ALGORITHMS: dict[str, tuple[Callable[[float, GroupTopology, _Ways], float], ...]] = {
    "all_gather": _HALVES,
    "reduce_scatter": _HALVES,
    "all_reduce": (*map(_twice, _HALVES), _double_tree),
    "all_to_all": (_pairwise,),
    "broadcast": (_chain, _binomial),
}
