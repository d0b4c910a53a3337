"""The second start of a training: a process finds the code that an earlier one has compiled.

AOTAutograd's cache keeps what it makes of a graph; a half in it is a name, under which the cache folder of graphshard
holds the variants of the halves, and what the ranks have said to each other when they compiled them
(docs/decisions/0014).

Imports: ``coordination``, ``ir``, ``memory``; of the backend ``inductor`` and ``halves``.

Read first: ``step_record`` (what a compilation leaves), ``half_source`` (what further variants are compiled from),
``step_files`` (where it lies), ``stored_code`` (what AOTAutograd's cache gets to see). ``half_text`` names it, and
``op_sources`` is a part of its key.
"""

from .half_source import HalfSource
from .half_text import half_text
from .op_sources import sources_of_ops
from .step_files import is_kept_here
from .step_record import KeptHalf, KeptStep, KeptVariant, StepRecord
from .stored_code import Loader, StoredCode, loading

__all__ = [
    "HalfSource",
    "KeptHalf",
    "KeptStep",
    "KeptVariant",
    "Loader",
    "StepRecord",
    "StoredCode",
    "half_text",
    "is_kept_here",
    "loading",
    "sources_of_ops",
]
