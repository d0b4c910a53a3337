"""graphshard: fully sharded data parallelism as a compiler.

``fully_shard`` a plain model, then ``torch.compile(model, backend="graphshard")``.
"""

from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from .api import fully_shard
from .errors import GraphShardError
from .fsdp_module import FSDPModule, UnshardHandle, share_comm_ctx
from .module import register_fsdp_forward_method
from .schedule import schedule_graph

if TYPE_CHECKING:
    from .graph_inspection import inspect_graph
    from .inspection import inspect

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "GraphShardError",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "fully_shard",
    "inspect",
    "inspect_graph",
    "register_fsdp_forward_method",
    "schedule_graph",
    "share_comm_ctx",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """``inspect`` and ``inspect_graph`` load Inductor, which takes seconds: only once they are asked for."""
    if name == "inspect":
        from .inspection import inspect

        return inspect
    if name == "inspect_graph":
        from .graph_inspection import inspect_graph

        return inspect_graph
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
