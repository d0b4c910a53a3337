"""graphshard: fully sharded data parallelism as a compiler.

``fully_shard`` a plain model, then ``torch.compile(model, backend="graphshard")``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from .errors import GraphShardError
from .fsdp import FSDPModule, UnshardHandle, fully_shard, register_fsdp_forward_method, share_comm_ctx
from .planner import schedule_graph

if TYPE_CHECKING:
    from .inspection.formulas import formulas
    from .inspection.inspect_graph import inspect_graph
    from .inspection.inspect_model import inspect
    from .inspection.sweep import sweep
    from .report import diff_reports

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


#: Names that load Inductor, which takes seconds, and their modules: imported when they are first asked for.
_LATER = {
    "diff_reports": "report",
    "formulas": "inspection.formulas",
    "inspect": "inspection",
    "inspect_graph": "inspection",
    "sweep": "inspection",
}


def __dir__() -> list[str]:
    """All public names, those that are not imported yet too."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Imports a name of ``_LATER`` when it is first asked for."""
    if name in _LATER:
        return getattr(import_module(f".{_LATER[name]}", __name__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
