"""keep_gathered: which units keep their gathered parameters for the backward, where the user left it open.

It concerns units whose ``fully_shard`` call left ``reshard_after_forward`` unset. Those named here keep their
parameters; the others free them and gather them again.

Before::

    %unshard_0: f32[8, 4] = unshard(%primals_1, %primals_2, 'w', unit='layers.1', ..., reshard=2, ...)

After, with ``units=("layers.1",)``::

    %unshard_0: f32[8, 4] = unshard(%primals_1, %primals_2, 'w', unit='layers.1', ..., reshard=1, ...)

Numerics: bitwise exact.

Does not handle:

- units whose user set ``reshard_after_forward``: they stay, and are reported as skipped if they are named.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from graphshard.ir import UNSHARD, UnshardCall
from graphshard.pipeline import Fact, PassContext, PassReport


@dataclass(frozen=True, kw_only=True)
class KeepGathered:
    """Options of the pass; see the module docstring.

    Attributes:
        units: labels of the units that keep their parameters; all others free and gather them again.
    """

    name: ClassVar[str] = "keep_gathered"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED})
    provides: ClassVar[frozenset[Fact]] = frozenset()
    breaks: ClassVar[frozenset[Fact]] = frozenset({Fact.TAGGED})

    units: tuple[str, ...] = ()

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        """Counts gathers "kept" and "freed" by this pass; units that stay as they are, are reported as skipped."""
        counts = {"kept": 0, "freed": 0}
        changed, skipped, seen = False, [], set()
        for node in gm.graph.find_nodes(op="call_function", target=UNSHARD):
            call = UnshardCall(*node.args)
            seen.add(call.unit)
            is_kept = call.unit in self.units
            if call.reshard_fixed:
                if is_kept:
                    skipped.append(f"{call.name}: reshard_after_forward of {call.unit} was given")
                continue
            counts["kept" if is_kept else "freed"] += 1
            reshard = 1 if is_kept else call.group_size
            if reshard != call.reshard:
                node.args = tuple(call._replace(reshard=reshard))
                changed = True
        skipped += [f"no unit {unit!r} in this graph" for unit in self.units if unit not in seen]
        return PassReport(changed=changed, counts=counts, skipped=tuple(skipped))
