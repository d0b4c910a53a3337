"""One rank plans, the others of its process groups follow.

A plan depends on the sizes of activations, which may differ between ranks; its collectives must not. So the lowest rank
plans and writes the plan into the stores of its groups, and the others read it there. The key of a plan is made of the
collectives that it is for: a rank that compiles alone later (its last batch was smaller) follows the plan that all
have. No collective is used, and waiting has a time limit. A plan that cannot be made or followed leaves nothing in the
stores, because the next attempt may have another size (:mod:`graphshard.coordination.refusals`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from .._compat import group_by_name, group_timeout_seconds
from ..errors import AgreementError
from .group_store import group_store
from .refusals import Refusals
from .transcript import Decided, note

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision(Generic[Result]):
    """What a rank decided.

    Attributes:
        plan: for the other ranks, as JSON can hold it.
        result: for the caller.
    """

    plan: Mapping[str, Any]
    result: Result


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStore:
    """The plans of one process group.

    Attributes:
        store: a store all ranks of the group share, used under a prefix of its own.
        rank: this rank's place in the group, from 0.
        timeout_seconds: how long to wait for rank 0.
        refusals: where ranks that stop write why.
    """

    store: dist.Store
    rank: int
    timeout_seconds: float
    refusals: Refusals

    @staticmethod
    def of_group(name: str, models: str) -> PlanStore:
        """That of a process group, which is no fake one; ``models`` tells plans of some models from those of others."""
        return PlanStore.of_use(name, "plans", models)

    @staticmethod
    def of_use(name: str, *uses: str) -> PlanStore:
        """That of a process group for decisions of another kind, under a prefix of its own."""
        group = group_by_name(name)
        return PlanStore(
            store=group_store(name, *uses),
            rank=group.rank(),
            timeout_seconds=group_timeout_seconds(group),
            refusals=Refusals.of_group(name),
        )

    def read(self, key: str, *, what: str, compiles: str = "") -> dict[str, Any] | None:
        """The plan of this key; None on rank 0 if there is none yet.

        Args:
            key: of the plan.
            what: names the graph in errors.
            compiles: as for :meth:`~graphshard.coordination.refusals.Refusals.wait_until`.

        Raises:
            AgreementError: rank 0 has no plan at the time limit.
            RefusedError: a rank has stopped with an error; rank 0 because it could not plan, for instance.
        """
        number = self.refusals.round()
        self.refusals.check(number)
        if not self.store.check([key]):
            if self.rank == 0:
                return None
            if not self.refusals.wait(self.store, [key], number, self.timeout_seconds, compiles=compiles):
                raise AgreementError(
                    f"rank 0 has no plan of {what} after {self.timeout_seconds:.0f} s; it may have stopped "
                    "with an error of its own: look at its output"
                )
        found: dict[str, Any] = json.loads(self.store.get(key))
        return found

    def write(self, key: str, plan: Mapping[str, Any]) -> None:
        """Writes a plan for the others of the group, unless there is one; only rank 0 writes."""
        if self.rank == 0 and not self.store.check([key]):
            self.store.set(key, json.dumps(dict(plan)))


def decide_together(
    stores: Sequence[PlanStore],
    key: str,
    decide: Callable[[Mapping[str, Any] | None], Decision[Result]],
    *,
    what: str,
    compiles: str = "",
    groups: Sequence[str] = (),
) -> Result:
    """Calls ``decide`` with the plan of this key, or with None on the one rank that has to make it.

    Groups where this rank is not rank 0 are read first; a plan that is found there is forwarded to the other groups.

    Args:
        stores: of all process groups of a graph; none for a rank that plans by itself.
        key: equal on all ranks for equal collectives and options.
        decide: follows a plan, or makes one.
        what: names the graph in errors.
        compiles: the graph, where the ranks have not yet agreed that all compile it.
        groups: the names of all process groups of the graph, those without a store too.

    Returns:
        The result of this rank's decision.

    Raises:
        AgreementError: see :meth:`PlanStore.read`.
        Exception: whatever ``decide`` raises; the caller tells the other ranks (``refusals.refusing``).
    """
    plan: Mapping[str, Any] | None = None
    for store in sorted(stores, key=lambda store: store.rank == 0):
        if (plan := store.read(key, what=what, compiles=compiles)) is not None:
            break
    decision = decide(plan)
    decided = plan if plan is not None else decision.plan
    for store in stores:
        store.write(key, decided)
    note(Decided.of(groups, key, decided, what))
    return decision.result
