"""Gives the process groups of a graph names that are equal on all ranks and in all processes.

Torch numbers process groups in the order in which a process makes them. These numbers would be in the code that
Inductor generates and in the keys of its caches: ranks of a mesh with two axes, and processes that make other groups
first, would not find each other's kernels. So each group of a graph is registered under a second name, which is made of
the label of its mesh axis, and the graph calls it by that name.

Torch forgets second names with the groups. A process that makes its groups anew may run code that it has compiled
before, since Dynamo sees the same models and names. So each run looks whether the names stand for the groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import fx

from ..._compat import group_by_name
from ..._compat_groups import register_group_name
from ...coordination import has_threads_as_ranks
from ...errors import AgreementError
from ...ir import MeshLayout, group_labels, group_name, is_collective, set_group_name

#: The head of each second name.
_HEAD = "graphshard"

#: The most groups of one label that get second names.
_MOST = 1000


def name_groups_by_axis(gm: fx.GraphModule, mesh: MeshLayout) -> dict[str, str]:
    """Has the collectives of a graph call their groups by second names, in place.

    Groups of one label are numbered in the order in which graphs first use them. A group whose ranks are threads keeps
    its name, since each thread has names of its own.

    Args:
        gm: a graph at level 2, ready for Inductor.
        mesh: its mesh; groups of other axes are numbered.

    Returns:
        The second names of the groups that have one.
    """
    collectives = [node for node in gm.graph.nodes if is_collective(node)]
    names = _second_names(dict.fromkeys(map(group_name, collectives)), group_labels(gm, mesh))
    for node in collectives:
        set_group_name(node, names[group_name(node)])
    if collectives:
        gm.recompile()
    return {name: second for name, second in names.items() if second != name}


def named(run: Callable[[list[Any]], Any], names: Mapping[str, str]) -> Callable[[list[Any]], Any]:
    """``run``, with second names that stand for their groups, also where these were made anew.

    The result raises AgreementError, before anything runs, if other groups have the names by now.

    Args:
        run: compiled code in AOTAutograd's boxed convention.
        names: second names of groups, by their own.
    """
    if not names:
        return run

    def run_named(args: list[Any]) -> Any:
        for name, second in names.items():
            if not register_group_name(second, group_by_name(name)):
                raise AgreementError(
                    f"this graph was compiled for process groups that are gone, and process group {name!r} cannot be "
                    f"called {second!r} any more: call torch.compiler.reset() where process groups are made anew"
                )
        return run(args)

    run_named._boxed_call = True  # type: ignore[attr-defined]
    return run_named


def _second_names(groups: Iterable[str], labels: Mapping[str, str]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name in groups:
        group = group_by_name(name)
        names = (f"{_HEAD}.{labels[name]}.{number}" for number in range(_MOST))
        free = (each for each in names if each not in found.values() and register_group_name(each, group))
        found[name] = name if has_threads_as_ranks(name) else next(free, name)
    return found
