"""Gives the process groups of a graph names that are equal on all ranks and in all processes.

Torch numbers process groups in the order in which a process makes them. These numbers would be in the code that
Inductor generates and in the keys of its caches: ranks of a mesh with two axes, and processes that make other groups
first, would not find each other's kernels. So each group of a graph is registered under a second name, which is made of
the label of its mesh axis, and the graph calls it by that name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from ..._compat import group_by_name
from ..._compat_groups import register_group_name
from ...coordination import has_threads_as_ranks
from ...ir import MeshLayout, group_labels, group_name, is_collective, set_group_name

#: The head of each second name.
_HEAD = "graphshard"

#: The most groups of one label that get second names.
_MOST = 1000


def name_groups_by_axis(gm: fx.GraphModule, mesh: MeshLayout) -> None:
    """Has the collectives of a graph call their groups by second names, in place.

    Groups of one label are numbered in the order in which graphs first use them. A group whose ranks are threads keeps
    its name, since each thread has names of its own.

    Args:
        gm: a graph at level 2, ready for Inductor.
        mesh: its mesh; groups of other axes are numbered.
    """
    collectives = [node for node in gm.graph.nodes if is_collective(node)]
    names = _second_names(dict.fromkeys(map(group_name, collectives)), group_labels(gm, mesh))
    for node in collectives:
        set_group_name(node, names[group_name(node)])
    if collectives:
        gm.recompile()


def _second_names(groups: Iterable[str], labels: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in groups:
        group = group_by_name(name)
        names = (f"{_HEAD}.{labels[name]}.{number}" for number in range(_MOST))
        free = (each for each in names if each not in found.values() and register_group_name(each, group))
        found[name] = name if has_threads_as_ranks(name) else next(free, name)
    return found
