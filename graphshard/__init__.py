"""graphshard: fully sharded data parallelism as a compiler.

``fully_shard`` a plain model, then ``torch.compile(model, backend="graphshard")``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import GraphShardError

if TYPE_CHECKING:
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

    from .auto_placements import parallelize
    from .fsdp import FSDPModule, UnshardHandle, fully_shard, register_fsdp_forward_method, share_comm_ctx
    from .fsdp1 import FullyShardedDataParallel
    from .inspection.formulas import formulas
    from .inspection.inspect_graph import inspect_graph
    from .inspection.inspect_model import inspect
    from .inspection.sweep import sweep
    from .planner import schedule_graph
    from .report import diff_reports
    from .torch_names import patch_torch

__all__ = [
    "CPUOffloadPolicy",
    "FSDPModule",
    "FullyShardedDataParallel",
    "GraphShardError",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "UnshardHandle",
    "diff_reports",
    "formulas",
    "fully_shard",
    "inspect",
    "inspect_graph",
    "parallelize",
    "patch_torch",
    "register_fsdp_forward_method",
    "schedule_graph",
    "share_comm_ctx",
    "sweep",
]
__version__ = "0.1.0"


#: Names and their modules, imported when they are first asked for: torch takes seconds, and the command line answers
#: most questions without it.
_LATER = {
    "CPUOffloadPolicy": "torch.distributed.fsdp",
    "FSDPModule": ".fsdp",
    "FullyShardedDataParallel": ".fsdp1",
    "MixedPrecisionPolicy": "torch.distributed.fsdp",
    "OffloadPolicy": "torch.distributed.fsdp",
    "UnshardHandle": ".fsdp",
    "diff_reports": ".report",
    "formulas": ".inspection.formulas",
    "fully_shard": ".fsdp",
    "inspect": ".inspection",
    "inspect_graph": ".inspection",
    "parallelize": ".auto_placements",
    "patch_torch": ".torch_names",
    "register_fsdp_forward_method": ".fsdp",
    "schedule_graph": ".planner",
    "share_comm_ctx": ".fsdp",
    "sweep": ".inspection",
}

#: Rooms that are attributes of the package without an import of their own.
_ROOMS = (
    "capture",
    "cost",
    "fsdp",
    "fsdp1",
    "inspection",
    "ir",
    "memory",
    "passes",
    "pipeline",
    "planner",
    "report",
    "testing",
)


def __dir__() -> list[str]:
    """All public names, those that are not imported yet too."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Imports a name of ``_LATER``, or a room, when it is first asked for."""
    if name in _ROOMS:
        return import_module(f".{name}", __name__)
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATER[name], __name__), name)
    return value
