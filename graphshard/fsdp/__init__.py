"""The front end: ``fully_shard``, sharded modules, units, and training without a compiler.

Imports: ``errors``, ``_compat``, ``ir``, ``coordination``. It uses the shard ops and does not know the compiler.

Read first: ``fully_shard`` (shards a model), ``sharded_class``, ``read_parameter`` (what a forward gets), ``unit``
(its docstring has the table of states), ``fsdp_module`` (the methods of FSDP2's modules).
A unit in parts: ``parameter_slot``, ``waiting_gradients``, ``tree`` (the units of one model, and their settings).
Where shards are: ``placements``, ``shard_parameter``, ``shard_versions`` (has a shard changed).
Without a compiler: ``eager_autograd``, ``saved_parameters``, ``eager_collectives``, ``plain_gathers``,
``gather_extensions``, ``compiled_block`` (a block that is compiled by itself).
Further: ``regroup`` (copies, ties, parameters that are added).
"""

from .compiled_block import PLAIN_CLASS, runs_compiled_block, uncompiled_forward
from .eager_autograd import Writable
from .fsdp_module import FSDPModule, UnshardHandle, share_comm_ctx
from .fully_shard import fully_shard
from .gather_extensions import (
    PreArguments,
    TracedExtension,
    cut_extended,
    has_extension,
    inner_tensors,
    refuse_wrapper,
    why_untraceable,
    without_data,
)
from .parameter_slot import (
    SUMMONED,
    ParameterSlot,
    add_to_grad,
    as_complex,
    slot_of_shard,
    slots_of,
)
from .read_parameter import GatherExtended, slot_of_read
from .shard_parameter import mesh_device
from .shard_versions import LAST_SHOWN, Version, refuse_lost_data, refuse_stale_optimizers, version_of
from .sharded_class import place_of_forward_in_python, register_fsdp_forward_method
from .tree import ROOT, SLOTS, Tree, TreeUnit
from .unit import Unit, owner_of, unit_of
from .waiting_gradients import expect_no_gradient, zero_gradients

__all__ = [
    "LAST_SHOWN",
    "PLAIN_CLASS",
    "ROOT",
    "SLOTS",
    "SUMMONED",
    "FSDPModule",
    "GatherExtended",
    "ParameterSlot",
    "PreArguments",
    "TracedExtension",
    "Tree",
    "TreeUnit",
    "Unit",
    "UnshardHandle",
    "Version",
    "Writable",
    "add_to_grad",
    "as_complex",
    "cut_extended",
    "expect_no_gradient",
    "fully_shard",
    "has_extension",
    "inner_tensors",
    "mesh_device",
    "owner_of",
    "place_of_forward_in_python",
    "refuse_lost_data",
    "refuse_stale_optimizers",
    "refuse_wrapper",
    "register_fsdp_forward_method",
    "runs_compiled_block",
    "share_comm_ctx",
    "slot_of_read",
    "slot_of_shard",
    "slots_of",
    "uncompiled_forward",
    "unit_of",
    "version_of",
    "why_untraceable",
    "without_data",
    "zero_gradients",
]
