"""What a graph costs on a machine: seconds of compute, collectives and copies. docs/cost-model.md explains the model.

Imports: ``ir``.

Read first: ``cards`` (a machine as data), ``card_files`` (reads it) and ``model`` (prices of a graph). Compute:
``compute``, ``kernels``, ``flops``, ``products``. Collectives: ``links``, ``tables``, ``overlaps``, ``curves``. What
the planner asks: ``prices``. Measuring a card: ``calibrate``, ``probes``, ``collective_probes``.
"""

from .calibrate import CalibrationJob, calibrate, is_launched
from .card_files import card_of, known_cards, load_card
from .cards import HardwareCard, LinkClass
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
