"""The arguments that calls of ``fully_shard`` would have, as data, for a model that is captured without them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from ..errors import OptionTypeError, ShardingError
from ..ir import MeshAxis, UnshardCall
from ..parallel import Stated
from ..setting_checks import check_axes


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardingRules:
    """How to shard a plain model.

    Attributes:
        mesh: sizes of the axes by name, outermost first: {"shard": 64} or {"replicate": 4, "shard": 16}; with
            placements, one further axis of any name at the end.
        units: patterns of module paths, such as "layers.*"; "*" stands for one part of a path. Each module that matches
            is a unit. All other parameters belong to the root.
        reshard_after_forward: as in ``fully_shard``: None frees all units but the root.
        mp_policy: dtypes of compute and gathers, and of reductions.
        placements: as in ``parallelize``, on the further axis of the mesh: placements by name, or a ready plan; or what
            they state.

    Raises:
        OptionTypeError: an attribute has the wrong type.
        ShardingError: axes have other names, sizes are not numbers of ranks, ``reshard_after_forward`` is a number, the
            mesh has no axis for the placements, or no placements for an axis.
    """

    mesh: Mapping[str, int]
    units: Sequence[str] = ()
    reshard_after_forward: bool | None = None
    mp_policy: MixedPrecisionPolicy = field(default_factory=MixedPrecisionPolicy)
    placements: Mapping[str, Any] | str | Stated | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.mesh, Mapping):
            raise OptionTypeError(
                f"mesh={self.mesh!r} must be sizes of axes by name, {{'shard': 64}} for instance"
            )
        if isinstance(self.units, str) or not all(isinstance(pattern, str) for pattern in self.units):
            raise OptionTypeError(
                f"units={self.units!r} must be a list of patterns of module paths, ['layers.*']"
            )
        if not isinstance(self.mp_policy, MixedPrecisionPolicy):
            raise OptionTypeError(f"mp_policy={self.mp_policy!r} must be a MixedPrecisionPolicy")
        if self.placements is not None and not isinstance(self.placements, (str, Mapping, Stated)):
            raise OptionTypeError(
                f"placements={self.placements!r} must be the name of a ready plan, or placements by name"
            )
        check_axes(self.mesh, is_placed=self.placements is not None)
        if self.reshard_after_forward is not None and type(self.reshard_after_forward) is not bool:
            raise ShardingError(
                f"reshard_after_forward={self.reshard_after_forward!r} must be True, False or None here: "
                "parameters spread over a number of ranks are not captured"
            )

    @property
    def placed_axis(self) -> MeshAxis | None:
        """The axis that ``placements`` are for; None without, or if it has one rank."""
        if self.placements is None or not self.mesh:
            return None
        label, size = list(self.mesh.items())[-1]
        return MeshAxis(label=label, size=size, group_name=label) if size > 1 else None

    def unit_of(self, path: str) -> str:
        """The unit of a parameter: the innermost module around it that matches, else "root"."""
        parts = path.split(".")[:-1]
        for end in range(len(parts), 0, -1):
            if self.is_unit(module := ".".join(parts[:end])):
                return module
        return "root"

    def is_unit(self, path: str) -> bool:
        """Whether the module of this path is a unit."""
        return any(re.fullmatch(as_regex(pattern), path) for pattern in self.units)

    def casts_at(self, path: str) -> bool:
        """Whether the module of this path casts what it takes and returns by ``mp_policy``; "" is the root."""
        return not path or self.is_unit(path)

    def call_of(self, path: str, shape: torch.Size, is_float: bool) -> UnshardCall:
        """The ``unshard`` call of the parameter with this path, without its tensors."""
        unit = self.unit_of(path)
        reshard = self.reshard_after_forward
        is_freed = unit != "root" if reshard is None else reshard
        num_shards, num_replicas = self.mesh["shard"], self.mesh.get("replicate", 1)
        replicate = "replicate" if num_replicas > 1 else ""
        return UnshardCall(
            shard=None,
            handle=None,
            name=path,
            unit=unit,
            shape=list(shape),
            dim=0,
            dtype=self.mp_policy.param_dtype if is_float else None,
            reshard=num_shards if is_freed else 1,
            reshard_group="",
            axis="shard",
            group_size=num_shards,
            group_name="shard",
            replicate_axis=replicate,
            replicate_size=num_replicas,
            replicate_group=replicate,
            reduce_dtype=self.mp_policy.reduce_dtype,
            divide_factor=None,
            force_sum=False,
            reshard_fixed=reshard is not None,
        )


def as_regex(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*", r"[^.]+")


def refuse_patterns_without_modules(model: nn.Module, option: str, patterns: Sequence[str]) -> None:
    paths = [path for path, _ in model.named_modules() if path]
    idle = [
        repr(pattern)
        for pattern in patterns
        if not any(re.fullmatch(as_regex(pattern), path) for path in paths)
    ]
    if idle:
        some = ", ".join(paths[:8])
        raise ShardingError(f"{option}: no module matches {', '.join(idle)}; modules are {some}, ...")
