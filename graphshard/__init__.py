"""graphshard: fully sharded data parallelism as a compiler.

``fully_shard`` a plain model, then ``torch.compile(model, backend="graphshard")``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from .api import fully_shard
from .errors import GraphShardError
from .fsdp_module import FSDPModule, UnshardHandle, share_comm_ctx
from .module import register_fsdp_forward_method
from .schedule import schedule_graph

if TYPE_CHECKING:
    from .formula_fitting import formulas
    from .graph_inspection import inspect_graph
    from .inspection import inspect
    from .report.compare import diff_reports
    from .sweeping import sweep

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "GraphShardError",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "diff_reports",
    "formulas",
    "fully_shard",
    "inspect",
    "inspect_graph",
    "register_fsdp_forward_method",
    "schedule_graph",
    "share_comm_ctx",
    "sweep",
]
__version__ = "0.1.0"


#: Names that load Inductor, which takes seconds, and where they are: only once they are asked for.
_LATER = {
    "diff_reports": "report.compare",
    "formulas": "formula_fitting",
    "inspect": "inspection",
    "inspect_graph": "graph_inspection",
    "sweep": "sweeping",
}


def __dir__() -> list[str]:
    """What is offline, too, before it is asked for."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Imports what is offline when it is first asked for."""
    if name in _LATER:
        return getattr(import_module(f".{_LATER[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
