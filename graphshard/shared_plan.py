"""One rank plans, the others of its process groups follow.

A plan depends on sizes of activations, and those may differ between ranks; its collectives must not.
So the lowest rank plans and puts the plan into the stores of its groups; the others read it there. A
plan is found again by the collectives it is for: a rank that compiles alone later (its last batch was
smaller) follows the plan that all have. No collective is used, and waiting has a limit.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from .context import KnownPlan
from .errors import AgreementError, GraphShardError


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStore:
    """The plans of one process group.

    Attributes:
        store: a store all ranks of the group share, used under a prefix of its own.
        rank: this rank's place in the group, from 0.
        timeout_seconds: how long to wait for rank 0.
    """

    store: dist.Store
    rank: int
    timeout_seconds: float

    def read(self, key: str, *, what: str) -> KnownPlan | None:
        """The plan of this key; None on rank 0 if there is none yet.

        Raises:
            AgreementError: rank 0 could not plan (with its reason), or has no plan at the time limit.
        """
        if not self.store.check([key]):
            if self.rank == 0:
                return None
            try:
                self.store.wait([key], timedelta(seconds=self.timeout_seconds))
            except (dist.DistStoreError, RuntimeError) as error:
                raise AgreementError(
                    f"rank 0 has no plan of {what} after {self.timeout_seconds:.0f} s; it may have stopped "
                    "with an error of its own: look at its output"
                ) from error
        found = json.loads(self.store.get(key))
        if "error" in found:
            raise AgreementError(f"rank 0 could not plan {what}: {found['error']}")
        steps = tuple((position, is_start, tuple(members)) for position, is_start, members in found["steps"])
        return KnownPlan(num_tasks=found["num_tasks"], steps=steps)

    def write(self, key: str, plan: KnownPlan | GraphShardError) -> None:
        """Puts a plan, or why there is none, where the others of the group wait for it; rank 0's task."""
        if self.rank == 0 and not self.store.check([key]):
            if isinstance(plan, KnownPlan):
                value: dict[str, object] = {"num_tasks": plan.num_tasks, "steps": plan.steps}
            else:
                value = {"error": str(plan)}
            self.store.set(key, json.dumps(value))


def read_plan(stores: Sequence[PlanStore], key: str, *, what: str) -> KnownPlan | None:
    """The plan to follow; None for the rank that has to make it.

    Groups in which this rank is not the first come first: what it reads there it passes on.

    Raises:
        AgreementError: see :meth:`PlanStore.read`.
    """
    for store in sorted(stores, key=lambda store: store.rank == 0):
        if (plan := store.read(key, what=what)) is not None:
            return plan
    return None
