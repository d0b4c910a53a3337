"""graphshard: fully sharded data parallelism as a compiler.

``fully_shard`` a plain model, then ``torch.compile(model, backend="graphshard")``.
"""

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from .api import fully_shard
from .errors import GraphShardError
from .fsdp_module import FSDPModule, UnshardHandle, share_comm_ctx
from .module import register_fsdp_forward_method
from .schedule import schedule_graph

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "GraphShardError",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "schedule_graph",
    "share_comm_ctx",
]
__version__ = "0.1.0"
