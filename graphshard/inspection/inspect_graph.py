"""``graphshard.inspect_graph``: predicts time and memory of any captured graph with collectives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import fx

from ..budget_text import parse_bytes
from ..cost import CollectiveTables, CostModel, GroupTopology, HardwareCard, card_of, tables_of, warn_of
from ..errors import BudgetError
from ..ir import MeshLayout, graph_text, is_collective
from ..memory import kept_inputs, scratch_of_card
from ..pipeline import PassContext
from ..planner import check_graph, problem_of_graph, topologies
from ..report import CATEGORIES, PassStep, Report
from .half_report import ScheduledHalf, half_report
from .memory_categories import categorized_memory
from .other_meshes import worlds_of
from .step_report import report_of_halves

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
    """Predicts time and memory of one graph in its own order. The graph is not changed.

    Args:
        gm: a forward, inference or backward graph with ``_c10d_functional`` collectives and ``meta["val"]`` on its
            values. Fake tensors, and groups that exist only by name, suffice.
        hardware, tables, groups: as in :func:`graphshard.schedule_graph`.
        memory_budget: the most bytes that may be live while it runs, inputs included.

    Returns:
        A report with one half, "graph", without a model and throughput.

    Raises:
        CardError, TableError, OptionError, OptionTypeError: an input cannot be read.
        UnpricedGroupError: the number of ranks of a group is not known.
        UntypedGraphError: a collective has no ``meta["val"]``.
        BudgetError: the graph needs more than ``memory_budget``.

    Warns (UserWarning), once each, of sizes outside of ``tables``.
    """
    check_graph(gm)
    card = card_of(hardware)
    measured = tables_of(tables)
    budget = None if memory_budget is None else parse_bytes(memory_budget)
    told: list[str] = []
    prices = CostModel(card=card, tables=measured, groups=topologies(gm, card, groups or {}), told=told)
    scratch = scratch_of_card(card.machine, card.file, gm, card.device_type)
    ctx = PassContext(device_type=card.device_type, scratch=scratch)
    notes = problem_of_graph(gm, prices, device_type=card.device_type, scratch=scratch).notes
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
    warn_of(told, stacklevel=2)
    sizes = [topology.num_ranks for topology in prices.groups.values()]
    return replace(
        report, num_ranks=max(sizes, default=1), worlds=worlds_of([half], prices, {}, MeshLayout())
    )
