"""What a graph costs on a machine: seconds of compute, collectives and copies. docs/cost-model.md explains the model.

Imports: ``ir``.

Read first: ``cards`` (a machine as data), ``card_files`` (reads it) and ``model`` (prices of a graph). Compute:
``compute``, ``kernels``, ``flops``, ``products``. Collectives: ``links``, ``tables``, ``overlaps``, ``curves``. What
the planner asks: ``prices``. Measuring a card: ``calibration``, ``probes``, ``collective_probes``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .card_files import card_of, known_cards, load_card, parse_card, read_kept_card
from .cards import HardwareCard, LinkClass

if TYPE_CHECKING:
    from .calibration import CalibrationJob, calibrate, describe_machine, is_launched
    from .collective_probes import CommProbe, probe_collectives, slowest
    from .compute import compute_seconds, kernel_seconds, memory_seconds
    from .flops import executed_flops, kernel_class, model_flops, total_flops
    from .kernels import Kernel, kernels_merged_as, kernels_of
    from .links import GroupTopology, collective_bytes, collective_kind, layout_topologies, mesh_topologies
    from .model import CostModel, warn_of
    from .prices import GraphPrices, Prices, behind_wait
    from .probes import DTYPES, ComputeProbe, ProbeSizes, probe_compute
    from .tables import CollectiveTables, load_tables, tables_of

__all__ = [
    "DTYPES",
    "CalibrationJob",
    "CollectiveTables",
    "CommProbe",
    "ComputeProbe",
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
    "describe_machine",
    "executed_flops",
    "is_launched",
    "kernel_class",
    "kernel_seconds",
    "kernels_merged_as",
    "kernels_of",
    "known_cards",
    "layout_topologies",
    "load_card",
    "load_tables",
    "memory_seconds",
    "mesh_topologies",
    "missing_peaks",
    "model_flops",
    "parse_card",
    "probe_collectives",
    "probe_compute",
    "read_kept_card",
    "slowest",
    "tables_of",
    "total_flops",
    "warn_of",
]

#: Names and their files, imported when they are first asked for: they load torch, and cards are read without it.
_LATER = {
    "DTYPES": "probes",
    "CalibrationJob": "calibration",
    "CollectiveTables": "tables",
    "CommProbe": "collective_probes",
    "ComputeProbe": "probes",
    "CostModel": "model",
    "warn_of": "model",
    "GraphPrices": "prices",
    "GroupTopology": "links",
    "Kernel": "kernels",
    "Prices": "prices",
    "ProbeSizes": "probes",
    "behind_wait": "prices",
    "calibrate": "calibration",
    "collective_bytes": "links",
    "collective_kind": "links",
    "compute_seconds": "compute",
    "describe_machine": "calibration",
    "executed_flops": "flops",
    "is_launched": "calibration",
    "kernel_class": "flops",
    "kernel_seconds": "compute",
    "kernels_merged_as": "kernels",
    "kernels_of": "kernels",
    "layout_topologies": "links",
    "load_tables": "tables",
    "memory_seconds": "compute",
    "mesh_topologies": "links",
    "missing_peaks": "compute",
    "model_flops": "flops",
    "probe_collectives": "collective_probes",
    "probe_compute": "probes",
    "slowest": "collective_probes",
    "tables_of": "tables",
    "total_flops": "flops",
}


def __getattr__(name: str) -> Any:
    """Imports a name of ``_LATER`` when it is first asked for."""
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f".{_LATER[name]}", __name__), name)
    return value
