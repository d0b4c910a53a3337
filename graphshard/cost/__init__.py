"""What a graph costs on a machine: compute, collectives and copies. See docs for the cost model.

Imports: ``ir``.

Read first: ``cards`` (a machine as data) and ``model``; then ``compute``, ``kernels``, ``flops``, ``products``
(compute), ``links``, ``tables``, ``overlaps``, ``curves`` (collectives), ``prices`` (what the planner asks) and
``calibrate``, ``probes`` (measuring a card).
"""

from .calibrate import CalibrationJob, calibrate, is_launched
from .cards import HardwareCard, LinkClass, card_of, known_cards, load_card
from .compute import compute_seconds, kernel_seconds, memory_seconds
from .flops import executed_flops, kernel_class, model_flops, total_flops
from .kernels import Kernel, kernels_of
from .links import GroupTopology, collective_bytes, collective_kind, layout_topologies, mesh_topologies
from .model import CostModel
from .prices import GraphPrices, Prices, behind_wait
from .probes import ProbeSizes
from .tables import CollectiveTables, load_tables, tables_of

__all__ = [
    "CalibrationJob",
    "CollectiveTables",
    "CostModel",
    "GraphPrices",
    "GroupTopology",
    "HardwareCard",
    "Kernel",
    "LinkClass",
    "Prices",
    "ProbeSizes",
    "behind_wait",
    "calibrate",
    "card_of",
    "collective_bytes",
    "collective_kind",
    "compute_seconds",
    "executed_flops",
    "is_launched",
    "kernel_class",
    "kernel_seconds",
    "kernels_of",
    "known_cards",
    "layout_topologies",
    "load_card",
    "load_tables",
    "memory_seconds",
    "mesh_topologies",
    "model_flops",
    "tables_of",
    "total_flops",
]
