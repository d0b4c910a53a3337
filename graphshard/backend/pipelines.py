"""The pipelines of the backend: the passes on the joint graph, and those on its two halves."""

from __future__ import annotations

from typing import Any

from .. import passes
from ..pipeline import Pipeline
from .options import BackendOptions

#: The passes on the joint graph. The last one tags it for the partitioner.
JOINT_PIPELINE = Pipeline(
    passes.MergeWaits(), passes.MergeUnshards(), passes.SpreadParameters(), passes.TagRecompute()
)

#: The passes on each half before its collectives are merged and placed.
LOWERING = Pipeline(
    passes.LowerShards(), passes.MergeSums(), passes.JoinPointwise(), given=JOINT_PIPELINE.facts_at_end
)


def half_pipeline(options: BackendOptions) -> Pipeline:
    """The passes on the forward and on the backward; the last one places the collectives."""
    steps: list[Any] = []
    if options.bucket == "unit":
        steps.append(passes.BucketCollectives())
    if options.hardware is not None:
        is_free = options.bucket == "auto"
        budget = "default" if options.memory_budget is None else options.memory_budget
        place = passes.PlanCollectives(
            merge=is_free,
            memory_budget=budget,
            max_gathers=options.limit_all_gathers,
            backward_prefetch=options.backward_prefetch or "",
            move_compute=options.move_compute,
        )
        steps.append(place)
    elif options.overlap is False:
        steps.append(passes.ScheduleCollectives(prefetch=0, reductions_in_flight=1))
    else:
        steps.append(passes.ScheduleCollectives(memory="any" if options.overlap == "always" else "free"))
    return Pipeline(*LOWERING.passes, *steps, given=LOWERING.given)
