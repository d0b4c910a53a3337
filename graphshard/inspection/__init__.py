"""Predicts time and memory of a training step, without ranks or devices.

Imports: all rooms below.

Read first: ``inspect_model`` and ``inspect_graph`` (the public functions), ``settings``; then ``half_report``,
``step_report``, ``exposure``, ``events``, ``memory_categories``, ``persistent_bytes``, ``optimizers``,
``other_meshes``, ``step_choice``, ``placement_choice``, ``sweep``; ``formulas`` fits formulas to samples.
"""

from .inspect_graph import inspect_graph
from .inspect_model import Inspection, choose_placements, inspect
from .persistent_bytes import always_bytes, persistent_bytes
from .settings import Settings, plain_inputs, read_settings, refuse_sharded, settings_of
from .sweep import Later, resized, sweep

__all__ = [
    "Inspection",
    "Later",
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
