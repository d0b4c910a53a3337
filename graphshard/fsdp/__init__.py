"""The front end: ``fully_shard``, sharded modules and units, and uncompiled training.

Imports: ``ir``, ``coordination``. It knows the ops, and nothing of the compiler.

Read first: ``fully_shard``, ``sharded_class`` (what a parameter's property returns), ``unit`` (run-time state),
``fsdp_module`` (methods of FSDP2). Then: ``placements``, ``outer_dtensor``, ``row_layout`` (where shards are),
``eager_autograd``, ``eager_collectives``, ``gather_extensions`` (uncompiled), ``naming``, ``deepcopy``,
``tensor_trees``, ``shard_versions``.
"""

from .fsdp_module import FSDPModule, UnshardHandle, share_comm_ctx
from .fully_shard import fully_shard
from .parameter_slot import ParameterSlot, slots_of
from .shard_versions import Version, version_of
from .sharded_class import register_fsdp_forward_method
from .tree import ROOT, SLOTS, Tree, TreeUnit
from .unit import Unit, unit_of

__all__ = [
    "ROOT",
    "SLOTS",
    "FSDPModule",
    "ParameterSlot",
    "Tree",
    "TreeUnit",
    "Unit",
    "UnshardHandle",
    "Version",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "slots_of",
    "unit_of",
    "version_of",
]
