"""What a graph costs on a machine: compute, collectives, copies; see docs/cost-model.md."""

from .cards import HardwareCard, LinkClass, card_of, known_cards, load_card
from .compute import compute_seconds
from .flops import total_flops
from .links import GroupTopology, collective_bytes, collective_kind, layout_topologies, mesh_topologies
from .model import CostModel
from .tables import CollectiveTables, load_tables, tables_of

__all__ = [
    "CollectiveTables",
    "CostModel",
    "GroupTopology",
    "HardwareCard",
    "LinkClass",
    "card_of",
    "collective_bytes",
    "collective_kind",
    "compute_seconds",
    "known_cards",
    "layout_topologies",
    "load_card",
    "load_tables",
    "mesh_topologies",
    "tables_of",
    "total_flops",
]
