"""The front end: ``fully_shard``, sharded modules, and training without a compiler.

Imports: ``errors``, ``_compat``, ``ir``, ``coordination``. It uses the shard ops and does not know the compiler.

Read first: ``fully_shard`` (shards a model) and ``sharding_checks`` (what it refuses), ``sharded_class``,
``read_parameter`` (what a forward gets), ``fsdp_module`` (the methods of FSDP2's modules).
What a rank holds of each parameter, by unit: the room ``state``.
Without a compiler: ``eager_autograd``, ``compiled_block`` (a block that is compiled by itself).
Further: ``shard_parameter`` (makes and writes shards), ``regroup`` (copies, ties, parameters that are added).
"""

from .compiled_block import PLAIN_CLASS, runs_compiled_block, uncompiled_forward
from .eager_autograd import Writable
from .fsdp_module import FSDPModule, UnshardHandle, share_comm_ctx
from .fully_shard import fully_shard
from .read_parameter import GatherExtended, slot_of_read
from .shard_parameter import mesh_device
from .sharded_class import place_of_forward_in_python, register_fsdp_forward_method

__all__ = [
    "PLAIN_CLASS",
    "FSDPModule",
    "GatherExtended",
    "UnshardHandle",
    "Writable",
    "fully_shard",
    "mesh_device",
    "place_of_forward_in_python",
    "register_fsdp_forward_method",
    "runs_compiled_block",
    "share_comm_ctx",
    "slot_of_read",
    "uncompiled_forward",
]
