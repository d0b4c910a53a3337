"""A plain model as the joint graph of a training step, captured on fake tensors without ranks or devices.

Imports: all rooms below; of ``backend`` the partitioner and the pipelines.

Read first: ``capture_step``, with ``rules`` (how the model is sharded), ``export_model`` and ``fake_step`` (how it is
traced). Then ``from_sharded`` (a sharded model as a plain one), ``extended_parameters`` (those with gather extensions),
``find_blocks`` and ``export_blocks`` (equal blocks are traced once), ``shorten_blocks`` (fewer of them),
``change_mesh`` and ``change_batch`` (another size without another capture), ``gpu_attention``, ``gc_pauses`` (keeps
the garbage collector out).
"""

from .capture_step import CapturedStep, capture_step, plain_module
from .change_batch import StepNumbers, numbers_of, step_between, step_with_numbers
from .change_mesh import can_reshard, reshard_step
from .export_model import ExportedModel, export_model
from .extended_parameters import has_extended_parameters
from .from_sharded import is_sharded, plain_copy
from .gc_pauses import no_garbage_collection, spared_by_garbage_collection
from .placed_step import PlacedStep
from .rules import ShardingRules, refuse_patterns_without_modules
from .shorten_blocks import num_repeated_blocks, stack_paths, with_blocks

__all__ = [
    "CapturedStep",
    "ExportedModel",
    "PlacedStep",
    "ShardingRules",
    "StepNumbers",
    "can_reshard",
    "capture_step",
    "export_model",
    "has_extended_parameters",
    "is_sharded",
    "no_garbage_collection",
    "num_repeated_blocks",
    "numbers_of",
    "plain_copy",
    "plain_module",
    "refuse_patterns_without_modules",
    "reshard_step",
    "spared_by_garbage_collection",
    "stack_paths",
    "step_between",
    "step_with_numbers",
    "with_blocks",
]
