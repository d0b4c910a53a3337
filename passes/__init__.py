"""The passes of graphshard, one a file, installed as ``graphshard.passes``.

Imports: ``ir``, ``memory``, ``pipeline``, ``planner``. A pass imports ``graphshard`` by absolute names, so that its
file can be copied. For a pass of your own, copy ``keep_gathered`` (small) or ``bucket_collectives`` (edits
collectives).

In reading order. The joint graph of a plain model: ``insert_reshards``, ``insert_shards``. A joint graph with reshards:
``propagate_sharding``, ``move_reshards``, ``merge_reshards``, ``lower_reshards``. The
joint graph: ``merge_waits``, ``merge_unshards``,
``spread_parameters``, ``keep_gathered``, ``tag_recompute``, ``recompute_activations``. Each half: ``lower_shards``,
``merge_sums``, ``join_pointwise``, ``bucket_collectives``, ``schedule_collectives`` or ``plan_collectives``,
``exchange_reductions``.

``KNOWN`` maps the name of each pass to its class, for ``Pipeline.parse``.
"""

if __name__ != "graphshard.passes":
    raise ImportError("import this package as graphshard.passes, not as " + repr(__name__))

from .bucket_collectives import BucketCollectives
from .exchange_reductions import ExchangeReductions
from .insert_reshards import InsertReshards
from .insert_shards import InsertShards
from .join_pointwise import JoinPointwise
from .keep_gathered import KeepGathered
from .lower_reshards import LowerReshards
from .lower_shards import LowerShards
from .merge_reshards import MergeReshards
from .merge_sums import MergeSums
from .merge_unshards import MergeUnshards
from .merge_waits import MergeWaits
from .move_reshards import MoveReshards
from .plan_collectives import PlanCollectives
from .propagate_sharding import PropagateSharding
from .recompute_activations import RecomputeActivations
from .schedule_collectives import ScheduleCollectives
from .spread_parameters import SpreadParameters
from .tag_recompute import TagRecompute

KNOWN = {
    step.name: step
    for step in (
        InsertReshards,
        InsertShards,
        PropagateSharding,
        MoveReshards,
        MergeReshards,
        LowerReshards,
        MergeWaits,
        MergeUnshards,
        SpreadParameters,
        KeepGathered,
        TagRecompute,
        RecomputeActivations,
        LowerShards,
        MergeSums,
        JoinPointwise,
        BucketCollectives,
        ScheduleCollectives,
        PlanCollectives,
        ExchangeReductions,
    )
}

__all__ = [
    "KNOWN",
    "BucketCollectives",
    "ExchangeReductions",
    "InsertReshards",
    "InsertShards",
    "JoinPointwise",
    "KeepGathered",
    "LowerReshards",
    "LowerShards",
    "MergeReshards",
    "MergeSums",
    "MergeUnshards",
    "MergeWaits",
    "MoveReshards",
    "PlanCollectives",
    "PropagateSharding",
    "RecomputeActivations",
    "ScheduleCollectives",
    "SpreadParameters",
    "TagRecompute",
]
