"""A rank whose code is kept says again what it said when it compiled that code (:mod:`.transcript`)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from .agreed_seed import agree_on_seed
from .agreement import agree_on_group
from .group_store import can_wait_in_compilation
from .shared_plan import Decision, PlanStore, decide_together
from .transcript import Agreed, Decided, SeedCompared, Transcript


class _DecidedOtherwiseError(Exception):
    """The ranks follow another decision now."""


def say_again(said: Transcript, models: Mapping[str, str]) -> bool:
    """Takes part in the agreements and decisions of an earlier compilation.

    Args:
        said: what this rank said in it.
        models: by process group, what tells the models of the graph from others in this process.

    Returns:
        Whether the ranks have decided the same now. If not, this rank must compile, with their decision.

    Raises:
        AgreementError, RefusedError: as in a compilation.
    """
    for line in said:
        if isinstance(line, Agreed):
            label = models.get(line.group, "") if line.is_of_models else None
            agree_on_group(line.group, line.sequence, what=line.what, models=label)
            continue
        if isinstance(line, SeedCompared):
            agree_on_seed(line.group, torch.initial_seed(), line.graph, what=line.what)
            continue
        groups = filter(can_wait_in_compilation, line.groups)
        stores = [PlanStore.of_group(name, models.get(name, "")) for name in groups]
        try:
            decide_together(stores, line.key, _Follower(line), what=line.what, groups=line.groups)
        except _DecidedOtherwiseError:
            return False
    return True


class _Follower:
    """Decides what was decided earlier; it follows nothing else."""

    def __init__(self, line: Decided) -> None:
        self._line = line

    def __call__(self, plan: Mapping[str, Any] | None) -> Decision[None]:
        if plan is not None and json.dumps(dict(plan), sort_keys=True) != self._line.plan:
            raise _DecidedOtherwiseError
        return Decision(plan=json.loads(self._line.plan), result=None)
