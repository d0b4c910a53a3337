"""Prices of a report's collectives on meshes of other sizes, for the sliders of the HTML page.

Only prices change. Graphs, and the bytes of collectives, are those of the inspected mesh; padding is a negligible part
of these bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..cost import CostModel
from ..ir import MeshAxis, MeshLayout
from ..report import CollectivePrice, HalfReport, World

#: How many times the outermost axis is halved and doubled.
HALVED, DOUBLED = 4, 5


def worlds_of(
    halves: Sequence[HalfReport], prices: CostModel, mesh: Mapping[str, int], layout: MeshLayout
) -> tuple[World, ...]:
    """Prices on this mesh and on meshes with another outermost axis, by rising size.

    Args:
        halves: the halves with their collectives.
        prices: the cost model of this mesh.
        mesh: axis sizes, outermost first; an empty mesh gives this mesh only.
        layout: the same mesh, parts of axes included.
    """
    if not mesh:
        num_ranks = max((topology.num_ranks for topology in prices.groups.values()), default=1)
        return (World(mesh={}, num_ranks=num_ranks, prices=_prices(halves, prices)),)
    outermost = next(iter(mesh))
    found = []
    for size in _sizes(mesh, layout, int(prices.card.ranks_per_node)):
        other = {**mesh, outermost: size}
        axes = tuple(_resized(axis, outermost, mesh[outermost], size) for axis in layout.axes)
        model = CostModel.of_mesh(prices.card, MeshLayout(axes=axes), tables=prices.tables, told=[])
        here = prices if other == mesh else model
        found.append(World(mesh=other, num_ranks=math.prod(other.values()), prices=_prices(halves, here)))
    return tuple(found)


def _resized(axis: MeshAxis, outermost: str, before: int, size: int) -> MeshAxis:
    """An axis on the other mesh: groups over all ranks of the outermost axis grow with it, smaller parts stay."""
    is_whole = axis.label == outermost or (axis.part_of == outermost and axis.size == before)
    return replace(axis, size=size) if is_whole else axis


def _sizes(mesh: Mapping[str, int], layout: MeshLayout, ranks_per_node: int) -> list[int]:
    """Sizes of the outermost axis for which ranks fill nodes; the size of the mesh is among them.

    On one rank of the axis the graphs lack the collectives of more, so there is no other size then.
    """
    (name, outermost), *inner = mesh.items()
    if outermost == 1:
        return [1]
    parts = [axis for axis in layout.axes if axis.part_of == name and axis.size < outermost]
    others = math.prod(size for _, size in inner)
    found = []
    for power in range(-HALVED, DOUBLED + 1):
        size, rest = divmod(outermost * 2 ** (power + HALVED), 2**HALVED)
        if size == outermost or (not rest and size > 1 and _is_possible(size, others, parts, ranks_per_node)):
            found.append(size)
    return found


def _is_possible(size: int, others: int, parts: Sequence[MeshAxis], ranks_per_node: int) -> bool:
    """Whether ranks fill nodes and the parts of the axis divide its size."""
    num_ranks = size * others
    fills = num_ranks <= ranks_per_node or not num_ranks % ranks_per_node
    return fills and all(size > part.size and not size % part.size for part in parts)


def _prices(halves: Sequence[HalfReport], model: CostModel) -> tuple[CollectivePrice, ...]:
    found = {}
    for half in halves:
        for one in half.collectives:
            key = (one.kind, one.group, one.num_bytes)
            if key not in found:
                overlapped = model.overlapped_seconds(one.kind, one.num_bytes, one.group)
                fixed, ways = model.collective_ways(one.kind, one.num_bytes, one.group)
                found[key] = CollectivePrice(
                    kind=one.kind,
                    group=one.group,
                    num_bytes=one.num_bytes,
                    fixed_seconds=fixed,
                    overlapped_seconds=overlapped,
                    overlapped_latency_seconds=min(overlapped, model.card.overlapped_latency_seconds),
                    spread_seconds=model.spread_seconds(one.kind, one.num_bytes, one.group),
                    ways=ways,
                )
    return tuple(found.values())
