"""The memory model: how many bytes are live at each node of a graph, and what a memory budget leaves.

Imports: ``ir``.

Read first: ``model``, with ``timeline`` (its result) and ``kept_inputs`` (what the caller holds). Then ``donations``
(inputs that generated code may overwrite), ``scratch`` (what kernels allocate for themselves; ``scratch_calls`` says
which kernels, ``scratch_measured``, ``scratch_table``, ``scratch_bound`` and ``scratch_gpu`` how many bytes) and
``budget``.
"""

from .budget import resident_bytes, step_bytes, waiting_bytes
from .donations import donated_inputs, mark_donated, outputs_with_parameters, take_back_donations
from .kept_inputs import held_tensors, kept_bytes, kept_inputs
from .model import DONATED, Buffer, MemoryModel, copied_bytes, memory_timeline
from .scratch import UNMEASURED, KernelScratch
from .scratch_measured import KernelMeasurements, scratch_of_card
from .scratch_table import TABLE_END, ScratchTable, table_beside

__all__ = [
    "DONATED",
    "TABLE_END",
    "UNMEASURED",
    "Buffer",
    "KernelMeasurements",
    "KernelScratch",
    "MemoryModel",
    "ScratchTable",
    "copied_bytes",
    "donated_inputs",
    "held_tensors",
    "kept_bytes",
    "kept_inputs",
    "mark_donated",
    "memory_timeline",
    "outputs_with_parameters",
    "resident_bytes",
    "scratch_of_card",
    "step_bytes",
    "table_beside",
    "take_back_donations",
    "waiting_bytes",
]
