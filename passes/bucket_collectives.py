"""bucket_collectives: one gather per unit and group, one reduction per unit, dtype and group in each graph.

Gathers of a unit are merged where the first of them stands; reductions where the last gradient of the unit is ready.
All-reduces over copies of the shards are merged on the reduce-scattered bucket itself. A bucket of one stays as it
is: its collective reads and writes the parameter's own layout, with no copy. In a larger bucket of gathers, the
copies are ops of their own: ``pack`` into the bucket and ``unpack`` out of it. A bucket of gathers of several dtypes
holds bytes. After a reduction the pieces are views of the bucket.

Before (two parameters of one unit)::

    %all_gather_into_tensor_0: f32[8, 4] = all_gather_into_tensor(%primals_1, 2, axis=shard)
    %wait_tensor_0: f32[8, 4] = wait_tensor(%all_gather_into_tensor_0)
    %all_gather_into_tensor_1: f32[8] = all_gather_into_tensor(%primals_2, 2, axis=shard)
    %wait_tensor_1: f32[8] = wait_tensor(%all_gather_into_tensor_1)

After::

    %pack_0: f32[20] = pack([%primals_1, %primals_2], 1)
    %all_gather_into_tensor_0: f32[40] = all_gather_into_tensor(%pack_0, 2, axis=shard)
    %wait_tensor_0: f32[40] = wait_tensor(%all_gather_into_tensor_0)
    %unpack_0: (f32[32], f32[8]) = unpack(%wait_tensor_0, 2, [16, 4])
    %getitem_0: f32[32] = getitem(%unpack_0, 0)
    %view_0: f32[8, 4] = view(%getitem_0, [8, 4])
    %getitem_1: f32[8] = getitem(%unpack_0, 1)

Numerics: bitwise exact for gathers. A reduction keeps the operands of each element, and their order as far as the
algorithm of the process group does not depend on the size or the position in the buffer.

Does not handle:

- collectives that serve no single unit, such as those of tensor parallelism: they stay, and are reported as skipped;
- buckets of more than one unit: ``plan_collectives`` makes these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from graphshard.errors import OptionError
from graphshard.ir import is_collective, short_name
from graphshard.pipeline import Fact, PassContext, PassReport, bucket_keys, row_places
from graphshard.planner import merge_by_unit


@dataclass(frozen=True, kw_only=True)
class BucketCollectives:
    """Options of the pass; see the module docstring.

    Attributes:
        by: "unit" merges the collectives of one ``fully_shard`` unit.
    """

    name: ClassVar[str] = "bucket_collectives"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED, Fact.WAITED})
    provides: ClassVar[frozenset[Fact]] = frozenset({Fact.BUCKETED})
    breaks: ClassVar[frozenset[Fact]] = frozenset({Fact.SCHEDULED})

    by: str = "unit"

    def __post_init__(self) -> None:
        if self.by != "unit":
            raise OptionError(f"bucket_collectives: by={self.by!r} is unknown; known: 'unit'")

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        """Counts "gather buckets", "reduction buckets", "all-reduce buckets" and, if any, "hook buckets"."""
        keys = bucket_keys(gm, ctx)
        skipped = [
            f"{node.name} ({short_name(node)}) serves no single unit"
            for node in gm.graph.nodes
            if is_collective(node) and node not in keys
        ]
        counts = merge_by_unit(gm, keys, row_places(gm, ctx))
        return PassReport(changed=any(counts.values()), counts=counts, skipped=tuple(skipped))
