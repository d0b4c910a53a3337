"""A plain model as the joint graph of a training step, captured on fake tensors without ranks or devices.

Imports: all rooms below; of ``backend`` the partitioner and the pipelines.

Read first: ``capture_step``, with ``rules`` (how the model is sharded) and ``fake_step`` (how it is traced). Then
``from_sharded`` (a sharded model as a plain one), ``extended_parameters`` (those with gather extensions),
``find_blocks`` and ``export_blocks`` (equal blocks are traced once), ``change_mesh`` and ``change_batch`` (another
size without another capture), ``gpu_attention``, ``gc_pauses`` (keeps the garbage collector out).
"""

from .capture_step import CapturedStep, capture_step, plain_module
from .change_batch import StepNumbers, numbers_of, step_between, step_with_numbers
from .change_mesh import can_reshard, reshard_step
from .extended_parameters import has_extended_parameters
from .from_sharded import is_sharded, plain_copy
from .gc_pauses import no_garbage_collection, spared_by_garbage_collection
from .rules import ShardingRules, refuse_patterns_without_modules

__all__ = [
    "CapturedStep",
    "ShardingRules",
    "StepNumbers",
    "can_reshard",
    "capture_step",
    "has_extended_parameters",
    "is_sharded",
    "no_garbage_collection",
    "numbers_of",
    "plain_copy",
    "plain_module",
    "refuse_patterns_without_modules",
    "reshard_step",
    "spared_by_garbage_collection",
    "step_between",
    "step_with_numbers",
]
