"""exchange_reductions: reduce-scatters as an exchange of pieces and a sum, where a backend has no better.

Gloo runs a reduce-scatter as an all-reduce of a copy, of which every rank keeps its piece. Each rank then sends ``2
(n - 1) / n`` of the bytes, twice what has to move. After this pass each rank sends every other rank the piece that
this one keeps (an all-to-all), and adds what it receives in the order of the ranks. The exchange starts and is
waited for where the reduce-scatter was. The sum follows the wait.

Before::

    %reduce_scatter_tensor_0: f32[4, 8] = reduce_scatter_tensor(%g, 'sum', 2, 'shard')
    %wait_tensor_0: f32[4, 8] = wait_tensor(%reduce_scatter_tensor_0)

After::

    %all_to_all_single_0: f32[8, 8] = all_to_all_single(%g, [4, 4], [4, 4], 'shard')
    %wait_tensor_0: f32[8, 8] = wait_tensor(%all_to_all_single_0)
    %add_rows_0: f32[4, 8] = add_rows(%wait_tensor_0, 2, False)

Numerics: the same sum of the same operands. With two ranks the result is bitwise that of gloo. With more, the
additions are in the order of the ranks, and 16-bit floats are added in 32 bits.

Does not handle:

- reduce-scatters that reduce no gradient of a sharded parameter. All ranks must make the same choice, and a user's
  own collective may look different on another rank (one rank may leave its graph before the wait);
- operations other than "sum" and "avg";
- tensors that are not on the CPU, and groups that are not named.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from graphshard.ir import (
    REDUCE_SCATTER,
    WAIT,
    GraphEmitter,
    call_arguments,
    emit_exchange,
    emit_sum_of_exchange,
    group_name,
    setting,
)
from graphshard.pipeline import Fact, PassContext, PassReport, reduced_parameters


@dataclass(frozen=True, kw_only=True)
class ExchangeReductions:
    """Options of the pass; see the module docstring.

    Attributes:
        groups: names of the process groups whose reduce-scatters become exchanges.
    """

    name: ClassVar[str] = "exchange_reductions"
    requires: ClassVar[frozenset[Fact]] = frozenset({Fact.TYPED, Fact.WAITED})
    provides: ClassVar[frozenset[Fact]] = frozenset()
    breaks: ClassVar[frozenset[Fact]] = frozenset({Fact.REDUCED, Fact.BUCKETED, Fact.SCHEDULED})

    groups: tuple[str, ...] = ()

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> PassReport:
        """Counts reduce-scatters "exchanged"; others on the CPU in these groups are reported as skipped."""
        num_exchanged, skipped = 0, []
        served = reduced_parameters(gm, ctx)
        for node in gm.graph.find_nodes(op="call_function", target=REDUCE_SCATTER):
            if group_name(node) not in self.groups or node.meta["val"].device.type != "cpu":
                continue
            if why := _obstacle(node, node in served):
                skipped.append(f"{node.name} stays a reduce-scatter: {why}")
                continue
            _exchange(gm.graph, node)
            num_exchanged += 1
        return PassReport(
            changed=num_exchanged > 0, counts={"exchanged": num_exchanged}, skipped=tuple(skipped)
        )


def _obstacle(node: fx.Node, is_gradient: bool) -> str:
    """Why a reduce-scatter stays; "" if it does not. Depends only on what is equal on all ranks."""
    if setting(node) not in ("sum", "avg"):
        return f"{setting(node)} is no sum"
    if not is_gradient:
        return "it reduces no gradient of a sharded parameter"
    return ""


def _exchange(graph: fx.Graph, node: fx.Node) -> None:
    value, operation, num_ranks, group = call_arguments(node).values()
    (wait,) = node.users
    emit = GraphEmitter(graph, origin=node)
    with graph.inserting_before(node):
        exchanged = emit_exchange(emit, value, num_ranks, group)
    with graph.inserting_before(wait):
        received = emit(WAIT, exchanged)
        result = emit_sum_of_exchange(emit, received, operation, num_ranks)
    wait.replace_all_uses_with(result)
    graph.erase_node(wait)
    graph.erase_node(node)
