"""A device mesh as a graph sees it: axes with a label, a size and the name of a process group.

A graph holds group names. They depend on the order in which groups were made, so text for people, goldens and
fingerprints uses axis labels instead. Only this file maps one to the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshAxis:
    """One axis of a mesh.

    Attributes:
        label: its name in text.
        size: number of ranks on it.
        group_name: torch's name of its process group.
        part_of: label of the axis whose ranks this one groups, ``size`` neighbours at a time; "" for an axis of its
            own. A part adds groups to a mesh, but no ranks.
    """

    label: str
    size: int
    group_name: str
    part_of: str = ""


#: Stands for an axis that a parameter does not have.
NO_AXIS = MeshAxis(label="", size=1, group_name="")


@dataclass(frozen=True, slots=True, kw_only=True)
class MeshLayout:
    """The axes of a mesh, outermost first. Ranks are numbered row-major over the axes that are not parts."""

    axes: tuple[MeshAxis, ...] = ()

    @property
    def num_ranks(self) -> int:
        """Product of the sizes of the axes that are not parts of others."""
        return math.prod(axis.size for axis in self._whole_axes())

    def find(self, group_name: str) -> MeshAxis | None:
        """The axis whose process group has this name, or None."""
        return next((axis for axis in self.axes if axis.group_name == group_name), None)

    def peers(self, rank: int, axis: MeshAxis) -> list[int]:
        """Ranks that share ``axis``'s process group with ``rank``, in group order."""
        if axis.part_of:
            whole = next(each for each in self._whole_axes() if each.label == axis.part_of)
            line = self.peers(rank, whole)
            start = line.index(rank) // axis.size * axis.size
            return line[start : start + axis.size]
        stride = 1
        for other in reversed(self._whole_axes()):
            if other == axis:
                break
            stride *= other.size
        coordinate = rank // stride % axis.size
        return [rank + (index - coordinate) * stride for index in range(axis.size)]

    def _whole_axes(self) -> tuple[MeshAxis, ...]:
        return tuple(axis for axis in self.axes if not axis.part_of)

    @staticmethod
    def of_axes(axes: Iterable[MeshAxis]) -> MeshLayout:
        """A layout of the distinct axes, in order of first appearance."""
        return MeshLayout(axes=tuple(dict.fromkeys(axes)))


def axis_of(mesh: DeviceMesh, mesh_dim: int = 0, *, default_label: str = "shard") -> MeshAxis:
    """The :class:`MeshAxis` of one dimension of a torch ``DeviceMesh``."""
    names = mesh.mesh_dim_names
    return MeshAxis(
        label=names[mesh_dim] if names else default_label,
        size=mesh.size(mesh_dim),
        group_name=mesh.get_group(mesh_dim).group_name,
    )
