"""The cost model: seconds of compute, of collectives and of copies, from a hardware card.

Prices depend on the arguments alone, so ranks with the same card, tables and groups have the same prices.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import fx

from ..errors import OptionError, OptionTypeError, UnknownGroupError
from ..ir import MeshLayout, group_name
from .cards import COLLECTIVE_KINDS, HardwareCard, MeasuredCollective
from .compute import compute_seconds, copy_seconds
from .links import (
    GroupTopology,
    Way,
    collective_bytes,
    collective_kind,
    formula_seconds,
    formula_ways,
    layout_topologies,
)
from .overlaps import OverlapRows
from .tables import CollectiveTables, TableRows


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Prices of one machine and one mesh.

    Attributes:
        card: the hardware.
        tables: measured collectives; they take precedence over the card's own rows and its formulas.
        groups: the topology of each process group, by its name or its mesh axis.
        told: if given, collects the model's warnings, each once, instead of issuing them.

    Raises:
        OptionTypeError: a value of ``groups`` is not a topology.
    """

    card: HardwareCard
    tables: CollectiveTables | None = None
    groups: Mapping[str, GroupTopology] = field(default_factory=dict)
    told: list[str] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        wrong = {name: value for name, value in self.groups.items() if not isinstance(value, GroupTopology)}
        if wrong:
            listed = ", ".join(f"groups[{name!r}]={value!r}" for name, value in wrong.items())
            raise OptionTypeError(
                f"{listed}: give each a GroupTopology(num_ranks=..., ranks_per_node=...), or take those of "
                "mesh_topologies"
            )

    @staticmethod
    def of_mesh(
        card: HardwareCard,
        layout: MeshLayout,
        *,
        tables: CollectiveTables | None = None,
        told: list[str] | None = None,
    ) -> CostModel:
        """The model of a mesh whose consecutive ranks fill the nodes of the card."""
        groups = layout_topologies(layout, int(card.ranks_per_node))
        return CostModel(card=card, tables=tables, groups=groups, told=told)

    def compute_seconds(self, gm: fx.GraphModule) -> dict[fx.Node, float]:
        """Seconds of compute of each node; see :func:`graphshard.cost.compute.compute_seconds`."""
        return compute_seconds(gm, self.card)

    def collective_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        """Seconds from the start of a collective to its end, alone on its links.

        Args:
            kind: "all_gather", "reduce_scatter", "all_reduce", "all_to_all" or "broadcast".
            num_bytes: bytes of the larger of input and output tensor.
            group: a key of ``groups``.

        Returns:
            0.0 for a group of one rank.

        Raises:
            OptionError: unknown kind, or fewer than 0 bytes.
            UnknownGroupError: unknown group.
        """
        _check_collective(kind, num_bytes)
        topology = self.topology(group)
        if topology.num_ranks == 1:
            return 0.0
        if self.tables is not None:
            rows = self.tables.find(kind, group, topology.num_ranks)
            if rows is not None:
                self._tell(self.tables.outside(kind, num_bytes, group, topology.num_ranks))
                return rows.seconds(num_bytes)
            self._tell(
                f"{self.tables.source} has no {kind} over {group} nor over {topology.num_ranks} ranks; "
                f"the times of card {self.card.name!r} are used"
            )
        measured = self._rows_of_card(kind, topology)
        if measured is not None:
            return measured.seconds(num_bytes)
        return formula_seconds(kind, num_bytes, topology, self.card)

    def collective_ways(self, kind: str, num_bytes: int, group: str) -> tuple[float, tuple[Way, ...]]:
        """The parts of :meth:`collective_seconds`: fixed seconds, and the ways of which the quickest counts.

        A measured time has one way, whose latency is the time of the smallest measured size. No warnings. Args and
        errors are those of :meth:`collective_seconds`.
        """
        _check_collective(kind, num_bytes)
        topology = self.topology(group)
        if topology.num_ranks == 1:
            return 0.0, (((0.0, 0.0),),)
        rows = self._rows_of_table(kind, group) or self._rows_of_card(kind, topology)
        if rows is not None:
            seconds = rows.seconds(num_bytes)
            latency = min(seconds, rows.rows[0][1])
            return 0.0, (((latency, seconds - latency),),)
        return self.card.collective_start_seconds, formula_ways(kind, num_bytes, topology, self.card)

    def node_seconds(self, collective: fx.Node) -> float:
        """:meth:`collective_seconds` of the node that starts a collective."""
        kind, num_bytes = collective_kind(collective), collective_bytes(collective)
        return self.collective_seconds(kind, num_bytes, group_name(collective))

    def core_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        """Seconds that one collective takes from the core that computes: gloo starts, copies and adds on it.

        0.0 on accelerators, whose host does this. Args and errors are those of :meth:`collective_seconds`.
        """
        _check_collective(kind, num_bytes)
        if self.topology(group).num_ranks == 1 or self.card.device_type != "cpu":
            return 0.0
        return self.card.collective_start_seconds + self.card.comm_compute_seconds_per_byte * num_bytes

    def overlapped_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        """Seconds of one collective that pass while the previous one of its group still moves.

        Args and errors are those of :meth:`collective_seconds`.
        """
        _check_collective(kind, num_bytes)
        rows = self._measured(kind, self.topology(group)) if self._rows_of_table(kind, group) is None else ()
        overlaps = [
            (row.num_bytes, row.seconds, row.overlapped_seconds)
            for row in rows
            if row.overlapped_seconds is not None
        ]
        if not overlaps and not self.card.overlapped_latency_seconds:
            return 0.0
        seconds = self.collective_seconds(kind, num_bytes, group)
        if overlaps:
            return OverlapRows.of(overlaps).overlapped(seconds)
        return min(self.card.overlapped_latency_seconds, seconds)

    def spread_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        """Seconds by which one collective may end before or after :meth:`collective_seconds`.

        Args and errors are those of :meth:`collective_seconds`.
        """
        _check_collective(kind, num_bytes)
        return self.card.collective_spread_seconds if self.topology(group).num_ranks > 1 else 0.0

    def copy_seconds(self, num_bytes: int) -> float:
        """Seconds of a copy that reads and writes ``num_bytes``."""
        return copy_seconds(num_bytes, self.card)

    def topology(self, group: str) -> GroupTopology:
        """The topology of a group.

        Raises:
            UnknownGroupError: the group is not among ``groups``.
        """
        if group not in self.groups:
            known = ", ".join(sorted(self.groups)) or "none"
            raise UnknownGroupError(
                f"the cost model does not know the group {group!r}, but {known}: "
                "pass its topology in CostModel(groups=...)"
            )
        return self.groups[group]

    def _tell(self, message: str) -> None:
        """Issues a warning at the caller of the public method; none for an empty message."""
        if self.told is None:
            if message:
                warnings.warn(message, UserWarning, stacklevel=3)
        elif message and message not in self.told:
            self.told.append(message)

    def _rows_of_table(self, kind: str, group: str) -> TableRows | None:
        return None if self.tables is None else self.tables.find(kind, group, self.topology(group).num_ranks)

    def _rows_of_card(self, kind: str, topology: GroupTopology) -> TableRows | None:
        rows = [(row.num_bytes, row.seconds) for row in self._measured(kind, topology)]
        return TableRows.of(rows) if rows else None

    def _measured(self, kind: str, topology: GroupTopology) -> Sequence[MeasuredCollective]:
        """The measured rows of the card for a group that one link class joins."""
        if topology.num_nodes == 1:
            link = self.card.intra_node
        elif topology.ranks_per_node == 1:
            link = self.card.inter_node
        else:
            return ()
        return [row for row in link.measured if row.op == kind and row.num_ranks == topology.num_ranks]


def _check_collective(kind: str, num_bytes: int) -> None:
    if kind not in COLLECTIVE_KINDS:
        raise OptionError(f"no collective {kind!r}: it is one of {', '.join(COLLECTIVE_KINDS)}")
    if num_bytes < 0:
        raise OptionError(f"{kind} of {num_bytes} bytes: give the bytes of its larger tensor, 0 or more")


def warn_of(told: Sequence[str], *, stacklevel: int) -> None:
    """Issues what a model collected in ``told`` as one warning (UserWarning), at the caller ``stacklevel`` frames up.

    One table can lack many groups and sizes. The warning names the first three.
    """
    if not told:
        return
    distinct = list(dict.fromkeys(told))
    more = f"; and {len(distinct) - 3} more such cases" if len(distinct) > 3 else ""
    warnings.warn("; ".join(distinct[:3]) + more, UserWarning, stacklevel=stacklevel + 1)
