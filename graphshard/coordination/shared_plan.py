"""One rank plans, the others of its process groups follow.

A plan depends on sizes of activations, and those may differ between ranks; its collectives must not.
So the lowest rank plans and puts the plan into the stores of its groups; the others read it there. A
plan is found again by the collectives it is for: a rank that compiles alone later (its last batch was
smaller) follows the plan that all have. No collective is used, and waiting has a limit. A plan that cannot be made or
followed leaves nothing behind: the next attempt may have another size (:mod:`graphshard.coordination.refusals`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ..errors import AgreementError
from .refusals import Refusals


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStore:
    """The plans of one process group.

    Attributes:
        store: a store all ranks of the group share, used under a prefix of its own.
        rank: this rank's place in the group, from 0.
        timeout_seconds: how long to wait for rank 0.
        refusals: where ranks that stop say so.
    """

    store: dist.Store
    rank: int
    timeout_seconds: float
    refusals: Refusals

    def read(self, key: str, *, what: str) -> dict[str, Any] | None:
        """The plan of this key; None on rank 0 if there is none yet.

        Raises:
            AgreementError: rank 0 has no plan at the time limit.
            RefusedError: a rank has stopped with an error, rank 0 because it could not plan for instance.
        """
        number = self.refusals.round()
        self.refusals.check(number)
        if not self.store.check([key]):
            if self.rank == 0:
                return None
            if not self.refusals.wait(self.store, [key], number, self.timeout_seconds):
                raise AgreementError(
                    f"rank 0 has no plan of {what} after {self.timeout_seconds:.0f} s; it may have stopped "
                    "with an error of its own: look at its output"
                )
        found: dict[str, Any] = json.loads(self.store.get(key))
        return found

    def write(self, key: str, plan: Mapping[str, Any]) -> None:
        """Puts a plan where the others of the group wait for it; rank 0's task."""
        if self.rank == 0 and not self.store.check([key]):
            self.store.set(key, json.dumps(dict(plan)))


def decide_together(
    stores: Sequence[PlanStore],
    key: str,
    decide: Callable[[Mapping[str, Any] | None], Mapping[str, Any]],
    *,
    what: str,
) -> None:
    """Calls ``decide`` with the plan of this key, or with None on the one rank that has to make it.

    Groups in which this rank is not the first come first: what it reads there it passes on.

    Args:
        stores: of all process groups of a graph; none for a rank that plans by itself.
        key: the same on all ranks for the same collectives and options.
        decide: follows a plan, or makes one; returns it as JSON can hold it.
        what: names the graph in errors.

    Raises:
        AgreementError: see :meth:`PlanStore.read`.
        Exception: what ``decide`` raises; it is for the caller to tell the others (``refusals.refusing``).
    """
    plan: Mapping[str, Any] | None = None
    for store in sorted(stores, key=lambda store: store.rank == 0):
        if (plan := store.read(key, what=what)) is not None:
            break
    made = decide(plan)
    for store in stores:
        store.write(key, plan if plan is not None else made)
