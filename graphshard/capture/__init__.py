"""A plain model as a joint graph on fake tensors, for inspection without ranks or devices.

Imports: all rooms below, the backend's partition and pipelines included.

Read first: ``capture_step``; then ``from_sharded`` (a sharded model as a plain one), ``find_blocks`` and
``export_blocks`` (equal blocks are traced once), ``change_mesh`` and ``change_batch`` (another size without a
capture), ``gpu_attention``, ``gc_pauses`` (keeps the garbage collector out).
"""

from .capture_step import CapturedStep, ShardingRules, capture_step, plain_module
from .change_batch import StepNumbers, numbers_of, step_between
from .change_mesh import can_reshard, reshard_step
from .from_sharded import is_sharded, plain_copy
from .gc_pauses import no_garbage_collection, spared_by_garbage_collection

__all__ = [
    "CapturedStep",
    "ShardingRules",
    "StepNumbers",
    "can_reshard",
    "capture_step",
    "is_sharded",
    "no_garbage_collection",
    "numbers_of",
    "plain_copy",
    "plain_module",
    "reshard_step",
    "spared_by_garbage_collection",
    "step_between",
]
