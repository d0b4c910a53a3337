"""The pipelines of the backend: the passes on the joint graph, and those on its two halves.

A user's own passes (option ``passes``) run behind the pass that they name; see :class:`UserPasses`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import passes
from ..errors import OptionError
from ..pipeline import Pass, Pipeline
from .options import DEFAULT_PLACE, BackendOptions

#: The passes on a joint graph with reshards, before all others.
RESHARDING = Pipeline(
    passes.PropagateSharding(), passes.MoveReshards(), passes.MergeReshards(), passes.LowerReshards()
)

#: The passes on the joint graph. The last one tags it for the partitioner.
JOINT_PIPELINE = Pipeline(
    passes.MergeWaits(), passes.MergeUnshards(), passes.SpreadParameters(), passes.TagRecompute()
)

#: The passes on each half before its collectives are merged and placed.
LOWERING = Pipeline(
    passes.LowerShards(), passes.MergeSums(), passes.JoinPointwise(), given=JOINT_PIPELINE.facts_at_end
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HalfPipelines:
    """The passes on the forward and on the backward, in three parts that run one after the other.

    Attributes:
        before: lowers the half, and merges collectives unless the planner does; then a user's passes.
        placing: places the collectives; one pass.
        after: a user's passes on a graph whose collectives are placed.
    """

    before: Pipeline
    placing: Pipeline
    after: Pipeline

    @property
    def planned(self) -> Pipeline:
        """The passes up to the one that places the collectives."""
        return Pipeline(*self.before.passes, *self.placing.passes, given=self.before.given)


def half_pipelines(options: BackendOptions) -> HalfPipelines:
    """The passes on a half.

    Raises:
        OptionError: a user's pass names no pass that it could follow.
        PipelineError: a user's pass requires what does not hold there, or breaks what a later pass requires.
    """
    first: list[Any] = list(LOWERING.passes)
    if options.bucket == "unit":
        first.append(passes.BucketCollectives())
    place = _placing_pass(options)
    names = [step.name for step in first]
    _check_places(options.passes, [step.name for step in JOINT_PIPELINE.passes[:-1]], [*names, place.name])
    # Behind the last pass of LOWERING unless they name another: a bucket hides the collectives of single parameters.
    given = {
        (LOWERING.passes[-1].name if name == DEFAULT_PLACE else name): steps
        for name, steps in options.passes.items()
    }
    before = Pipeline(*_with_own(first, given), given=LOWERING.given)
    placing = Pipeline(place, given=before.facts_at_end)
    after = Pipeline(*given.get(place.name, ()), given=placing.facts_at_end)
    return HalfPipelines(before=before, placing=placing, after=after)


def half_pipeline(options: BackendOptions) -> Pipeline:
    """:func:`half_pipelines` as one."""
    parts = half_pipelines(options)
    steps = (*parts.before.passes, *parts.placing.passes, *parts.after.passes)
    return Pipeline(*steps, given=parts.before.given)


def joint_pipeline(options: BackendOptions) -> Pipeline:
    """The passes on the joint graph.

    Raises:
        PipelineError: a user's pass requires what does not hold there, or breaks what a later pass requires.
    """
    if not options.passes:
        return JOINT_PIPELINE
    return Pipeline(*_with_own(JOINT_PIPELINE.passes, options.passes), given=JOINT_PIPELINE.given)


def _placing_pass(options: BackendOptions) -> Any:
    if options.hardware is not None:
        return passes.PlanCollectives(
            merge=options.bucket == "auto",
            memory_budget="default" if options.memory_budget is None else options.memory_budget,
            max_gathers=options.limit_all_gathers,
            backward_prefetch=options.backward_prefetch or "",
            forward_prefetch="pre" if options.forward_prefetch else "",
            move_compute=options.move_compute,
        )
    if options.overlap is False:
        return passes.ScheduleCollectives(prefetch=0, reductions_in_flight=1)
    return passes.ScheduleCollectives(memory="any" if options.overlap == "always" else "free")


def _with_own(steps: Any, own: Mapping[str, tuple[Pass, ...]]) -> list[Pass]:
    """Passes, each with the user's behind it."""
    return [each for step in steps for each in (step, *own.get(step.name, ()))]


def _check_places(own: Mapping[str, tuple[Pass, ...]], joint: list[str], half: list[str]) -> None:
    if unknown := [name for name in own if name not in (*joint, *half, DEFAULT_PLACE)]:
        raise OptionError(
            f"graphshard backend: option passes: no pass {', '.join(map(repr, unknown))} to follow; on the joint graph "
            f"there are {', '.join(joint)}, and on its halves, with these options, {', '.join(half)}"
        )
