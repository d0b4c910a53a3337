"""A half of a captured graph, in the states of its units.

Imports: ``errors``, ``ir``, ``fsdp.state``; of the backend ``inductor``.

Read first: ``half_variants`` (what a state changes in a half), ``half`` (it picks the variant that runs).
"""

from .half import Half, HalfFacts
from .half_variants import (
    CompiledVariant,
    Selection,
    State,
    Variant,
    shard_ops,
    specialise,
    specialise_graph,
)

__all__ = [
    "CompiledVariant",
    "Half",
    "HalfFacts",
    "Selection",
    "State",
    "Variant",
    "shard_ops",
    "specialise",
    "specialise_graph",
]
