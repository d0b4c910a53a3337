"""Predicts time and memory of a training step, without ranks or devices.

Imports: all rooms below.

Read first: ``inspect_model`` and ``inspect_graph`` (the public functions), ``settings``, ``step_inspection``; then
``half_report``, ``step_report``, ``exposure``, ``events``, ``memory_categories``, ``persistent_bytes``, ``optimizers``,
``other_meshes``, ``step_choice``, ``placement_choice``, ``sweep``; ``formulas`` fits formulas to samples.
"""

from .half_report import ScheduledHalf
from .inspect_graph import inspect_graph
from .inspect_model import choose_placements, inspect
from .memory_categories import CategorizedMemory
from .persistent_bytes import always_bytes, persistent_bytes
from .placement_choice import PlacementChooser
from .settings import (
    Later,
    Settings,
    plain_inputs,
    read_settings,
    refuse_sharded,
    resized,
    settings_of,
)
from .step_inspection import Inspection
from .sweep import sweep

__all__ = [
    "CategorizedMemory",
    "Inspection",
    "Later",
    "PlacementChooser",
    "ScheduledHalf",
    "Settings",
    "always_bytes",
    "choose_placements",
    "inspect",
    "inspect_graph",
    "persistent_bytes",
    "plain_inputs",
    "read_settings",
    "refuse_sharded",
    "resized",
    "settings_of",
    "sweep",
]
