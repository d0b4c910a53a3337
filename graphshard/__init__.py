"""graphshard: fully sharded data parallelism as a compiler.

``fully_shard`` a plain model, then ``torch.compile(model, backend="graphshard")``.
"""

from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from .api import fully_shard
from .errors import GraphShardError
from .fsdp_module import FSDPModule

__all__ = ["FSDPModule", "GraphShardError", "MixedPrecisionPolicy", "OffloadPolicy", "fully_shard"]
__version__ = "0.1.0"
