"""How passes run: what they know, the facts that hold between them, and the pipeline that checks these.

Imports: ``ir``, ``cost``.

Read first: ``context`` (what a pass may know; ``joint_outputs`` tells the outputs of a joint graph apart,
``known_plan`` is another rank's plan), ``facts`` (what is checked),
``pipeline``, then ``provenance`` (which values of a graph belong to which parameter).
"""

from .context import PassContext, binding_of, context_from_shard_ops, pieces_of, read_shards_as_they_are
from .facts import Fact
from .joint_outputs import JointOutputs, joint_outputs
from .known_plan import KnownPlan
from .pipeline import Pass, PassRecord, PassReport, PassResult, Pipeline
from .provenance import (
    KINDS,
    bucket_keys,
    gathered_shard,
    is_accumulation,
    is_layout,
    parts_behind,
    prepared_nodes,
    reduced_parameters,
    row_places,
    shards_behind,
    ungathered_readers,
)

__all__ = [
    "KINDS",
    "Fact",
    "JointOutputs",
    "KnownPlan",
    "Pass",
    "PassContext",
    "PassRecord",
    "PassReport",
    "PassResult",
    "Pipeline",
    "binding_of",
    "bucket_keys",
    "context_from_shard_ops",
    "gathered_shard",
    "is_accumulation",
    "is_layout",
    "joint_outputs",
    "parts_behind",
    "pieces_of",
    "prepared_nodes",
    "read_shards_as_they_are",
    "reduced_parameters",
    "row_places",
    "shards_behind",
    "ungathered_readers",
]
