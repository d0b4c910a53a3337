"""What a rank holds of each parameter, and the collectives that change it.

Imports: ``errors``, ``_compat``, ``ir``, ``coordination``. It does not know the classes of modules, ``fully_shard`` or
the compiler.

Read first: ``unit`` (its docstring has the table of states).
A unit in parts: ``unit_settings``, ``parameter_slot``, ``waiting_gradients``, ``tree`` (the units of one model).
Where shards are: ``placements``. Has one changed: ``shard_versions``, ``watched_optimizers``.
What is read of them: ``stand_ins`` (while a unit stays gathered), ``saved_parameters`` (by a backward).
Collectives of an uncompiled model: ``eager_collectives``, ``plain_gathers``, ``gather_extensions``.
"""

from .eager_collectives import reduce_together
from .gather_extensions import (
    PreArguments,
    TracedExtension,
    check_gather,
    copy_extended,
    cut_extended,
    full_after,
    has_extension,
    inner_tensors,
    is_quantised,
    refuse_wrapper,
    why_untraceable,
    without_data,
)
from .parameter_slot import (
    SUMMONED,
    ParameterSlot,
    add_to_grad,
    as_complex,
    is_substitute,
    link_shard,
    local_shard,
    replaced,
    shard_data,
    slot_of_shard,
    slots_of,
    store_parameters,
    stored_parameters,
)
from .placements import DataParallelAxes, Layout, layout_of
from .saved_parameters import ForwardReads, GatheredOnce, Span, can_hook
from .shard_versions import FullParameter, FullRead, Version, note_storage, refuse_lost_data, version_of
from .tree import ROOT, SLOTS, STORED, WRAPPERS, Tree, TreeUnit, relabel
from .unit import Unit, owner_of, unit_of
from .unit_settings import UnitSettings
from .waiting_gradients import GradientReductionHandle, HookOfGradient, expect_no_gradient, zero_gradients
from .watched_optimizers import LAST_SHOWN, SUCCESSOR, refuse_stale_optimizers, watch_optimizers

__all__ = [
    "LAST_SHOWN",
    "ROOT",
    "SLOTS",
    "STORED",
    "SUCCESSOR",
    "SUMMONED",
    "WRAPPERS",
    "DataParallelAxes",
    "ForwardReads",
    "FullParameter",
    "FullRead",
    "GatheredOnce",
    "GradientReductionHandle",
    "HookOfGradient",
    "Layout",
    "ParameterSlot",
    "PreArguments",
    "Span",
    "TracedExtension",
    "Tree",
    "TreeUnit",
    "Unit",
    "UnitSettings",
    "Version",
    "add_to_grad",
    "as_complex",
    "can_hook",
    "check_gather",
    "copy_extended",
    "cut_extended",
    "expect_no_gradient",
    "full_after",
    "has_extension",
    "inner_tensors",
    "is_quantised",
    "is_substitute",
    "layout_of",
    "link_shard",
    "local_shard",
    "note_storage",
    "owner_of",
    "reduce_together",
    "refuse_lost_data",
    "refuse_stale_optimizers",
    "refuse_wrapper",
    "relabel",
    "replaced",
    "shard_data",
    "slot_of_shard",
    "slots_of",
    "store_parameters",
    "stored_parameters",
    "unit_of",
    "version_of",
    "watch_optimizers",
    "why_untraceable",
    "without_data",
    "zero_gradients",
]
