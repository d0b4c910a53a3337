"""What a user sets for a unit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy

from ...ir import NO_AXIS, MeshAxis, UserComms


@dataclass(eq=False, kw_only=True)
class UnitSettings:
    """What a user sets for a unit and its graphs are traced with.

    A compiled graph depends on these values. Dynamo guards on the policy and the devices, which a forward reads, and on
    ``ParameterSlot.arguments``, which hold the rest. After a change call ``Unit.refresh``; the next forward is then
    traced again. Switches that a graph reads when it runs are fields of ``Unit``. The class is not frozen: the setters
    of ``FSDPModule`` change it.

    Attributes:
        reshard_after_forward: as given to ``fully_shard``: True, False, a number of ranks, or None.
        mp_policy: dtypes of compute, reduction, inputs and outputs.
        divide_factor, force_sum: how gradients are averaged; see ``UnshardCall``.
        input_device: where the inputs of the outermost unit are moved to; None leaves them where they are.
        compute_device: where full parameters are if their shards are kept on the CPU; None if they are not.
        regather: the axis of ``reshard_after_forward`` neighbouring ranks, if that is a number.
        comms: the user's own collectives, which replace those of the process group.
        reduce_group: process group of the reduce-scatters; "" if it is the one of the gathers.
        max_reductions: reductions of the model that may be open at a time; 0 leaves the number to the schedule.
        forward_order, backward_order: when a half gathers the next unit, as FSDP1's outermost wrapper asks for: "pre",
            "post" (:class:`graphshard.passes.PlanCollectives`) or ""; uncompiled backwards follow "post" and "none".
    """

    reshard_after_forward: bool | int | None = None
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    divide_factor: float | None = None
    force_sum: bool = False
    input_device: torch.device | None = None
    compute_device: torch.device | None = None
    regather: MeshAxis = NO_AXIS
    comms: UserComms = field(default_factory=UserComms)
    reduce_group: str = ""
    max_reductions: int = 0
    forward_order: str = ""
    backward_order: str = ""

    def copy(self) -> UnitSettings:
        """Equal settings; a change of one object's collectives does not change the other's."""
        return replace(self, comms=UserComms(**vars(self.comms)))
