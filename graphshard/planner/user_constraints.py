"""The user's constraints on a plan, in terms of the nodes of a graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

from torch import fx

from ..errors import ProblemError
from ..ir import is_collective
from .search import Collective


@dataclass(frozen=True, slots=True, kw_only=True)
class Wishes:
    """Constraints that a plan must keep; without any, it is free.

    Attributes:
        fixed_buckets: collectives that must form one bucket each; of one group and settings, reductions of one dtype.
        prefetch: pairs of collectives (a, b): b starts right after the wait for a.
        behind: pairs of a node and a collective (a, b): b does not start before the value of a exists, or, if a is a
            collective, its input; unless b is read sooner.
        max_gathers, max_reductions: buckets that may be in flight; 0 for any number.
        shared_links: names of process groups that share a link, so that their collectives run one after the other.
            They may name groups that the graph does not use.
        merge: whether collectives may be merged, or split.
    """

    fixed_buckets: Sequence[Sequence[fx.Node]] = ()
    prefetch: Sequence[tuple[fx.Node, fx.Node]] = ()
    behind: Sequence[tuple[fx.Node, fx.Node]] = ()
    max_gathers: int = 0
    max_reductions: int = 0
    shared_links: Sequence[tuple[str, ...]] = ()
    merge: bool = True

    def named(self) -> Set[fx.Node]:
        """The collectives that buckets and pairs name."""
        return {node for nodes in (*self.fixed_buckets, *self.prefetch, *self.behind) for node in nodes}

    def check_nodes_of(self, graph: fx.Graph) -> None:
        """Refuses constraints on nodes that the graph does not have.

        Raises:
            ProblemError: lists the nodes that are of another graph, or were erased.
        """
        here = set(graph.nodes)
        nodes = (*self.fixed_buckets, *self.prefetch, *self.behind)
        named = dict.fromkeys(node for members in nodes for node in members)
        if strange := [str(node) for node in named if node not in here]:
            raise ProblemError(
                "buckets and prefetches must name nodes of the graph that is planned; these are of another one, "
                f"or were erased: {', '.join(strange)}; look them up in gm.graph"
            )

    def on(self, twin: Mapping[fx.Node, fx.Node]) -> Wishes:
        """The same for the nodes of a copy of the graph; nodes without a twin stay."""
        return replace(
            self,
            fixed_buckets=[tuple(twin.get(node, node) for node in nodes) for nodes in self.fixed_buckets],
            prefetch=[(twin.get(first, first), twin.get(then, then)) for first, then in self.prefetch],
            behind=[(twin.get(first, first), twin.get(then, then)) for first, then in self.behind],
        )

    def buckets_by_index(self, movable: list[fx.Node], notes: list[str]) -> list[tuple[int, ...]]:
        """The buckets by position in ``movable``; adds a note for those of which a part cannot move.

        Raises:
            ProblemError: a node starts no collective.
        """
        index = _indices(movable, [node for members in self.fixed_buckets for node in members])
        found = []
        for members in self.fixed_buckets:
            if left := [node.name for node in members if node not in index]:
                notes.append(f"{', '.join(left)} is not in the bucket asked for: it stays in its place")
            found.append(tuple(sorted(index[node] for node in members if node in index)))
        return [bucket for bucket in found if bucket]

    def pairs_by_index(self, movable: list[fx.Node], notes: list[str]) -> list[tuple[int, int]]:
        """The prefetches by position in ``movable``; adds a note for those of which a part cannot move.

        Raises:
            ProblemError: a node starts no collective.
        """
        return _pairs(movable, self.prefetch, "is not prefetched after", notes)

    def held_back(
        self,
        movable: list[fx.Node],
        collectives: Sequence[Collective],
        position: Mapping[fx.Node, int],
        notes: list[str],
    ) -> list[Collective]:
        """The collectives of ``movable``, some of which start later; adds a note for pairs of which a part cannot move.

        Args:
            movable: the nodes that start them.
            collectives: what is planned of each.
            position: of each task.
            notes: gets the notes.

        Raises:
            ProblemError: the second node of a pair starts no collective.
        """
        found = list(collectives)
        deadlines = [one.deadline for one in collectives]
        for bucket in self.buckets_by_index(movable, []):
            for member in bucket:
                deadlines[member] = min(collectives[other].deadline for other in bucket)
        index = _indices(movable, [then for _, then in self.behind])
        exists = {node: place + 1 for node, place in position.items() if not is_collective(node)}
        exists |= {node: one.earliest for node, one in zip(movable, collectives, strict=True)}
        for first, then in self.behind:
            if first not in exists or then not in index:
                notes.append(_left_out(first, "is not held back behind", then))
                continue
            place = index[then]
            one = found[place]
            earliest = min(max(one.earliest, exists[first]), deadlines[place])
            if earliest > one.earliest:
                ready = one.earliest if one.ready is None else one.ready
                found[place] = replace(one, earliest=earliest, ready=ready)
        return found


NO_WISHES = Wishes()


def _pairs(
    movable: list[fx.Node], pairs: Sequence[tuple[fx.Node, fx.Node]], what_fails: str, notes: list[str]
) -> list[tuple[int, int]]:
    index = _indices(movable, [node for pair in pairs for node in pair])
    found = []
    for first, then in pairs:
        if first in index and then in index:
            found.append((index[first], index[then]))
        else:
            notes.append(_left_out(first, what_fails, then))
    return found


def _left_out(first: fx.Node, what_fails: str, then: fx.Node) -> str:
    return f"{then.name} {what_fails} {first.name}: one of them stays in its place"


def _indices(movable: list[fx.Node], named: list[fx.Node]) -> dict[fx.Node, int]:
    if strange := [str(node) for node in named if not is_collective(node)]:
        raise ProblemError(
            f"buckets and prefetches must name nodes that start collectives; these do not: {', '.join(strange)}"
        )
    return {node: number for number, node in enumerate(movable)}
