"""A plain model as a joint graph on fake tensors, for inspection without ranks or devices.

Imports: all rooms below, the backend's partition and pipelines included.

Read first: ``capture_step``; then ``from_sharded`` (a sharded model as a plain one), ``find_blocks`` and
``export_blocks`` (equal blocks are traced once), ``change_mesh`` and ``change_batch`` (another size without a
capture), ``gpu_attention``.
"""

from .capture_step import CapturedStep, ShardingRules, capture_step, plain_module
from .change_batch import StepNumbers, numbers_of, step_between
from .change_mesh import can_reshard, reshard_step
from .from_sharded import is_sharded, plain_copy

__all__ = [
    "CapturedStep",
    "ShardingRules",
    "StepNumbers",
    "can_reshard",
    "capture_step",
    "is_sharded",
    "numbers_of",
    "plain_copy",
    "plain_module",
    "reshard_step",
    "step_between",
]
