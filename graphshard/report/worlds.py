"""What the collectives of a report would cost on meshes of other sizes, for a page that lets one try.

Only prices: the graphs are those of the mesh that was inspected, and so are the sizes of its
collectives, of which padding is a negligible part.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ..cost import CostModel, mesh_topologies
from .data import CollectivePrice, HalfReport, World

#: The outermost axis is halved and doubled so often.
HALVED, DOUBLED = 4, 5


def worlds_of(halves: Sequence[HalfReport], prices: CostModel, mesh: Mapping[str, int]) -> tuple[World, ...]:
    """Prices on this mesh and on others, whose outermost axis has other sizes; by rising size.

    Args:
        halves: with their collectives.
        prices: of the machine and the mesh.
        mesh: axis sizes, outermost first; where there are none, only ``prices`` as they are.
    """
    if not mesh:
        num_ranks = max((topology.num_ranks for topology in prices.groups.values()), default=1)
        return (World(mesh={}, num_ranks=num_ranks, prices=_prices(halves, prices)),)
    found = []
    for size in _sizes(mesh, int(prices.card.ranks_per_node)):
        other = {**mesh, next(iter(mesh)): size}
        groups = mesh_topologies(other, int(prices.card.ranks_per_node))
        model = CostModel(card=prices.card, tables=prices.tables, groups=groups)
        found.append(World(mesh=other, num_ranks=math.prod(other.values()), prices=_prices(halves, model)))
    return tuple(found)


def _sizes(mesh: Mapping[str, int], ranks_per_node: int) -> list[int]:
    """Sizes of the outermost axis with which the ranks fill nodes; the one of the mesh is among them."""
    outermost, *inner = mesh.values()
    found = []
    for power in range(-HALVED, DOUBLED + 1):
        size, rest = divmod(outermost * 2 ** (power + HALVED), 2**HALVED)
        num_ranks = size * math.prod(inner)
        fills = num_ranks <= ranks_per_node or not num_ranks % ranks_per_node
        if size == outermost or (not rest and size > 1 and fills):
            found.append(size)
    return found


def _prices(halves: Sequence[HalfReport], model: CostModel) -> tuple[CollectivePrice, ...]:
    found = {}
    for half in halves:
        for one in half.collectives:
            key = (one.kind, one.group, one.num_bytes)
            if key not in found:
                fixed, ways = model.collective_ways(one.kind, one.num_bytes, one.group)
                found[key] = CollectivePrice(
                    kind=one.kind, group=one.group, num_bytes=one.num_bytes, fixed_seconds=fixed, ways=ways
                )
    return tuple(found.values())
