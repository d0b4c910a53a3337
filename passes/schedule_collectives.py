"""schedule_collectives: start gathers early, wait late, as memory allows; compute keeps its order.

A gather starts up to ``prefetch`` gathers ahead of its first reader: right after the wait, and the copies out, of
the gather that many places earlier, or at the top of the graph. Starting it before that wait would gain nothing,
since collectives of one group queue, and would hold one more bucket. Each wait stands right before the first reader
of its result.

A reduction starts where it stands, and is waited for where its result is needed. At most ``reductions_in_flight``
reductions are open at a time, since each holds a full gradient bucket. If shards have copies (hybrid sharding), the
result of a reduction is all-reduced. The all-reduce starts right after the wait for the reduction, and is waited for
when the next one starts. So the compute of a unit overlaps with both.

With ``memory="free"`` a gather starts later, or a reduction is waited for earlier, if the memory model says that the
peak of the graph would otherwise exceed the peak without any overlap. The sequence of starts does not depend on the
sizes of activations, so it is the same on every rank.

Before (unit b after unit a)::

    %all_gather_into_tensor_0 = all_gather_into_tensor(%a)
    %wait_tensor_0 = wait_tensor(%all_gather_into_tensor_0)
    %mm_0 = mm(%x, %wait_tensor_0)
    %all_gather_into_tensor_1 = all_gather_into_tensor(%b)
    %wait_tensor_1 = wait_tensor(%all_gather_into_tensor_1)
    %mm_1 = mm(%mm_0, %wait_tensor_1)

After::

    %all_gather_into_tensor_0 = all_gather_into_tensor(%a)
    %wait_tensor_0 = wait_tensor(%all_gather_into_tensor_0)
    %all_gather_into_tensor_1 = all_gather_into_tensor(%b)
    %mm_0 = mm(%x, %wait_tensor_0)
    %wait_tensor_1 = wait_tensor(%all_gather_into_tensor_1)
    %mm_1 = mm(%mm_0, %wait_tensor_1)

Numerics: bitwise exact.

Does not handle:

- collectives other than gathers of shards and reductions of gradients: they stay, and are reported as skipped;
- ``memory="free"`` in a graph of which the user named units to prefetch: it overlaps whatever it costs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from graphshard.errors import OptionError
from graphshard.ir import apply_order, short_name
from graphshard.pipeline import Fact, PassContext, PassReport
from graphshard.planner import Decisions, Movable, Placement, fit

_MEMORY = ("free", "any")


@dataclass(frozen=True, kw_only=True)
class ScheduleCollectives:
    """Options of the pass; see the module docstring.

    Attributes:
        prefetch: how many gathers ahead of use one may start; 0 starts each right before its wait.
        reductions_in_flight: reductions that may be open at a time, at least 1.
        memory: "free" overlaps only if the predicted peak of the graph stays what it is without overlap; "any"
            overlaps whatever it costs.

    The context may override both: a unit whose user named the units to prefetch starts the gathers of those instead,
    and a user's own limit of open reductions replaces ``reductions_in_flight``.
    """

    name: ClassVar[str] = "schedule_collectives"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED, Fact.WAITED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.SCHEDULED})
    breaks: ClassVar[frozenset[Fact]] = frozenset()

    prefetch: int = 1
    reductions_in_flight: int = 2
    memory: str = "free"

    def __post_init__(self) -> None:
        if self.memory not in _MEMORY:
            raise OptionError(
                f"schedule_collectives: memory={self.memory!r} is unknown; known: {', '.join(map(repr, _MEMORY))}"
            )
        if self.prefetch < 0:
            raise OptionError(f"schedule_collectives: prefetch={self.prefetch} must be at least 0")
        if self.reductions_in_flight < 1:
            raise OptionError(
                f"schedule_collectives: reductions_in_flight={self.reductions_in_flight} must be at least 1"
            )

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        """Counts "gathers", "reductions" and "all-reduces" placed; others are reported as skipped."""
        movable = Movable(gm, ctx)
        skipped = [
            f"{node.name} ({short_name(node)}) is not a gather of shards or a reduction"
            for node in movable.others
        ]
        in_flight = ctx.max_reductions or self.reductions_in_flight
        decisions = Decisions(prefetch=self.prefetch, in_flight=in_flight)
        if self.memory == "free" and not movable.named and (movable.gathers or movable.reductions):
            decisions, declined = fit(
                gm, movable, decisions, device_type=ctx.device_type, scratch=ctx.scratch
            )
            skipped += declined
        order = Placement(movable, decisions).order()
        changed = order != list(gm.graph.nodes)
        if changed:
            apply_order(gm.graph, order)
        return PassReport(
            changed=changed,
            counts={
                "gathers": len(movable.gathers),
                "reductions": len(movable.reductions),
                "all-reduces": len(movable.all_reduces),
            },
            skipped=tuple(skipped),
        )
