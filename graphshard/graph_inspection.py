"""``graphshard.inspect_graph``: what anyone's captured graph with collectives costs on a machine."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import fx

from .budgets import parse_bytes
from .collectives import is_collective
from .context import PassContext
from .cost import CollectiveTables, CostModel, GroupTopology, HardwareCard, card_of, tables_of
from .errors import BudgetError
from .graph_text import graph_text
from .memory import kept_inputs
from .mesh import MeshLayout
from .planner.from_graph import problem_of_graph
from .report.categories import categorized_memory
from .report.data import CATEGORIES, PassStep, Report
from .report.half import ScheduledHalf, half_report
from .report.step import report_of_halves
from .report.worlds import worlds_of
from .schedule import check_graph, topologies

_NOTES = (
    "The graph is priced as it stands; graphshard.schedule_graph changes it.",
    "Gathers that start from inputs alone are taken to give parameters; only the graph itself is counted, not "
    "what lives beside it.",
)


def inspect_graph(
    gm: fx.GraphModule,
    *,
    hardware: str | Path | HardwareCard,
    tables: str | Path | CollectiveTables | None = None,
    memory_budget: int | str | None = None,
    groups: Mapping[str, int | GroupTopology] | None = None,
) -> Report:
    """Predicts time and memory of one graph in its own order; changes nothing.

    Args:
        gm: a forward, inference or backward graph with ``_c10d_functional`` collectives and
            ``meta["val"]`` on its values; fake tensors and groups that exist only by name will do.
        hardware, tables, groups: as in :func:`graphshard.schedule_graph`.
        memory_budget: the most that may be live while it runs, inputs included.

    Returns:
        A report with one half, "graph", and neither a model nor throughput.

    Raises:
        CardError, TableError, OptionError, OptionTypeError: an input that cannot be read.
        UnpricedGroupError: nothing says how many ranks a group has.
        UntypedGraphError: a collective without ``meta["val"]``.
        BudgetError: it needs more than ``memory_budget``.

    Warns (UserWarning), once each, of what ``tables`` lack.
    """
    check_graph(gm)
    card = card_of(hardware)
    measured = tables_of(tables)
    budget = None if memory_budget is None else parse_bytes(memory_budget)
    told: list[str] = []
    prices = CostModel(card=card, tables=measured, groups=topologies(gm, card, groups or {}), told=told)
    ctx = PassContext(device_type=card.device_type)
    notes = problem_of_graph(gm, prices, device_type=card.device_type).notes
    memory = categorized_memory(gm, ctx, device_type=card.device_type)
    scheduled = ScheduledHalf(name="graph", gm=gm, ctx=ctx, prices=prices, made_by="graph")
    half = half_report(scheduled, memory, [0] * len(CATEGORIES))
    text = graph_text(gm)
    step = PassStep(
        graph="graph", name="captured", seconds=0.0, num_nodes=half.num_nodes,
        num_collectives=sum(map(is_collective, gm.graph.nodes)), collective_bytes=0, counts={}, skipped=(), text=text,
    )  # fmt: skip
    report = report_of_halves(
        [half],
        model=None,
        mesh={},
        card=card,
        settings={"memory_budget": budget, "inputs_kept": len(kept_inputs(gm))},
        persistent=memory.kept,
        budget_bytes=budget,
        passes=[step],
        notes=[*_NOTES, *notes],
    )
    if budget is not None and report.memory.peak_bytes > budget:
        raise BudgetError(budget, report.memory.peak_bytes, "the graph as it stands")
    for message in told:
        warnings.warn(message, UserWarning, stacklevel=2)
    sizes = [topology.num_ranks for topology in prices.groups.values()]
    return replace(
        report, num_ranks=max(sizes, default=1), worlds=worlds_of([half], prices, {}, MeshLayout())
    )
