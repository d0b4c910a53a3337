"""The gradients of a unit that wait for a reduction, and the reduction of an uncompiled unit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..coordination import meet
from ..ir import ReduceGradCall
from .eager_collectives import reduce_together

_REDUCE_REMEDY = (
    "Parameters without a gradient on some ranks need set_reduce_scatter_unused_params(True) on their module"
)


@dataclass(eq=False, kw_only=True)
class WaitingGradients:
    """Gradients by parameter name, in the dtype of the reduction.

    Attributes:
        unreduced: full gradients of this rank, the sum over micro-batches.
        partial: this rank's padded pieces, summed over the shard axis but not over the replicate axis.
    """

    unreduced: dict[str, Tensor] = field(default_factory=dict)
    partial: dict[str, Tensor] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.unreduced or self.partial)

    def tensors(self) -> Iterator[Tensor]:
        """All gradients that wait."""
        yield from self.unreduced.values()
        yield from self.partial.values()

    def add_unreduced(self, name: str, grad: Tensor) -> None:
        """Adds a full gradient."""
        _add(self.unreduced, name, grad)

    def add_partial(self, name: str, grad: Tensor) -> None:
        """Adds a piece that was reduce-scattered and not all-reduced."""
        _add(self.partial, name, grad)

    def clear(self) -> None:
        """Drops all gradients."""
        self.unreduced.clear()
        self.partial.clear()

    def reduce(self, calls: Sequence[ReduceGradCall], *, unit: str, all_reduce: bool) -> list[Tensor | None]:
        """Reduces gradients together with those that wait, after the ranks have met.

        Args:
            calls: the gradients, on real tensors.
            unit: label of the unit, for the meeting.
            all_reduce: also sum over the replicate axis.

        Returns:
            The gradient of each shard; None for those that wait for the all-reduce from now on.
        """
        calls = [
            call._replace(
                unreduced=self.unreduced.pop(call.name, None),
                partial=self.partial.pop(call.name, None) if call.replicate_size > 1 else None,
                all_reduce=all_reduce or call.replicate_size == 1,
            )
            for call in calls
        ]
        for group_name in _groups_of(calls):
            step = f"reduce the gradients of unit {unit}: {', '.join(call.name for call in calls)}"
            meet(group_name, step, what=shortened(step), remedy=_REDUCE_REMEDY)
        result: list[Tensor | None] = []
        for call, reduced in zip(calls, reduce_together(calls), strict=True):
            if call.all_reduce:
                result.append(reduced)
            else:
                self.add_partial(call.name, reduced)
                result.append(None)
        return result


def shortened(text: str, limit: int = 300) -> str:
    """At most ``limit`` characters of a text, and dots in place of the rest."""
    return text if len(text) <= limit else text[:limit] + " ..."


def _add(grads: dict[str, Tensor], name: str, grad: Tensor) -> None:
    if name in grads:
        grads[name].add_(grad)
    else:
        grads[name] = grad


def _groups_of(calls: Sequence[ReduceGradCall]) -> list[str]:
    """The process groups that reductions run on."""
    groups = [call.group_name for call in calls if call.group_size > 1]
    groups += [call.replicate_group for call in calls if call.replicate_size > 1 and call.all_reduce]
    return list(dict.fromkeys(groups))
