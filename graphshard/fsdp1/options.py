"""The arguments of ``FullyShardedDataParallel``, and what each is for ``fully_shard``."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)

from .._compat_fsdp1 import HYBRID_SHARD_ZERO2
from ..errors import OptionTypeError, ShardingError

#: Strategies that copy shards over a second axis.
HYBRID = (ShardingStrategy.HYBRID_SHARD, HYBRID_SHARD_ZERO2)

#: Strategies that keep parameters gathered from the forward to the backward.
_KEEPING = (ShardingStrategy.SHARD_GRAD_OP, HYBRID_SHARD_ZERO2)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of ``FullyShardedDataParallel``, by FSDP1's names.

    An inner wrapper that an auto-wrap policy makes has those of the outer one, with the changes that the policy asks
    for.
    """

    process_group: Any = None
    sharding_strategy: ShardingStrategy | None = None
    cpu_offload: CPUOffload | None = None
    auto_wrap_policy: Any = None
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    mixed_precision: MixedPrecision | None = None
    ignored_modules: Iterable[torch.nn.Module] | None = None
    param_init_fn: Any = None
    device_id: int | str | torch.device | None = None
    sync_module_states: bool = False
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool = False
    ignored_states: Iterable[Any] | None = None
    device_mesh: DeviceMesh | None = None

    def __post_init__(self) -> None:
        if self.process_group is not None and self.device_mesh is not None:
            raise ShardingError(
                "FullyShardedDataParallel: process_group and device_mesh both name the ranks; pass one of them"
            )
        if self.ignored_modules is not None and self.ignored_states is not None:
            raise ShardingError(
                "FullyShardedDataParallel: pass ignored_states alone; it takes modules or parameters"
            )
        for name, kind in _KINDS.items():
            value = getattr(self, name)
            if value is not None and not isinstance(value, kind):
                raise OptionTypeError(
                    f"FullyShardedDataParallel: {name}={value!r} is a {type(value).__name__}; "
                    f"give a torch.distributed.fsdp.{kind.__name__}"
                )

    @staticmethod
    def of(given: Mapping[str, Any]) -> Options:
        """The options of an inner wrapper, from the arguments that a policy asks for.

        Raises:
            OptionTypeError: (a TypeError) an argument has no such name.
        """
        if unknown := sorted(set(given) - set(Options.__dataclass_fields__)):
            raise OptionTypeError(
                f"FullyShardedDataParallel: the auto-wrap policy asks for unknown argument(s) {', '.join(unknown)}; "
                f"known: {', '.join(Options.__dataclass_fields__)}"
            )
        return Options(**given)

    def for_world(self, num_ranks: int) -> Options:
        """The options on this many ranks: on one rank nothing can be sharded. Warns of what is deprecated."""
        if num_ranks == 1 and self.strategy is not ShardingStrategy.NO_SHARD:
            warnings.warn(
                f"FullyShardedDataParallel: {self.strategy} on one rank is NO_SHARD: there is nothing to shard over",
                stacklevel=4,
            )
            return replace(self, sharding_strategy=ShardingStrategy.NO_SHARD)
        if self.strategy is ShardingStrategy.NO_SHARD:
            warnings.warn(
                "FullyShardedDataParallel: NO_SHARD is deprecated; DistributedDataParallel, or HYBRID_SHARD with a "
                "shard axis of one rank, does the same",
                FutureWarning,
                stacklevel=4,
            )
        return self

    @property
    def strategy(self) -> ShardingStrategy:
        """The sharding strategy; FULL_SHARD if none was given."""
        return self.sharding_strategy or ShardingStrategy.FULL_SHARD

    @property
    def device(self) -> int | torch.device | None:
        """The argument ``device_id``; a string is a device, as for torch's functions."""
        return torch.device(self.device_id) if isinstance(self.device_id, str) else self.device_id

    @property
    def is_hybrid(self) -> bool:
        """Whether shards are copied over a second axis."""
        return self.strategy in HYBRID

    @property
    def keeps_gathered(self) -> bool:
        """Whether parameters stay gathered from the forward to the backward."""
        return self.strategy in _KEEPING

    @property
    def offloads(self) -> bool:
        """Whether shards and gradients are kept on the CPU."""
        return self.cpu_offload is not None and self.cpu_offload.offload_params

    @property
    def offload_policy(self) -> OffloadPolicy:
        """The argument of ``fully_shard``."""
        return CPUOffloadPolicy() if self.offloads else OffloadPolicy()

    @property
    def mp_policy(self) -> MixedPrecisionPolicy:
        """The argument of ``fully_shard``. The wrapper casts inputs, since FSDP1 casts those of the root alone."""
        given = self.mixed_precision or MixedPrecision()
        return MixedPrecisionPolicy(
            param_dtype=given.param_dtype,
            reduce_dtype=given.reduce_dtype or given.param_dtype,
            cast_forward_inputs=False,
        )

    @property
    def forward_order(self) -> str:
        """When forwards gather the next unit; "" for no matter, also with FSDP1's default."""
        return "pre" if self.forward_prefetch else ""

    @property
    def backward_order(self) -> str:
        """When backwards gather the next unit; "" for no matter, also with FSDP1's default, BACKWARD_PRE."""
        if self.backward_prefetch is None:
            return "none"
        return "post" if self.backward_prefetch is BackwardPrefetch.BACKWARD_POST else ""

    def casts_inputs(self, is_root: bool) -> bool:
        """Whether the wrapper casts floating-point inputs to the dtype of its parameters."""
        given = self.mixed_precision
        if given is None or given.param_dtype is None:
            return False
        return given.cast_forward_inputs or (is_root and given.cast_root_forward_inputs)


_KINDS: Mapping[str, type] = {
    "sharding_strategy": ShardingStrategy,
    "cpu_offload": CPUOffload,
    "mixed_precision": MixedPrecision,
    "backward_prefetch": BackwardPrefetch,
    "device_mesh": DeviceMesh,
}
