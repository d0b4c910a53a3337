"""Draws what the compiler does to a training step: two timelines of the same GPT on two ranks.

Above, every collective runs where the captured graph has it, one a parameter, and compute waits for it. Below, the
planner has merged and moved them. Both are events of the cost model on a hardware card (1 Gbit/s Ethernet between two
CPUs by default); docs/benchmarks.md compares such predictions with measured steps.

    python benchmarks/draw_timelines.py --out docs/pictures/timelines.png
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from pathlib import Path

import matplotlib
import torch.nn.functional as F
from torch import Tensor, fx, nn

from gpt import Gpt, GptConfig, random_batch
from graphshard.backend import LOWERING
from graphshard.capture import ShardingRules, capture_step
from graphshard.cost import CostModel, load_card
from graphshard.inspection.events import Walk, walk
from graphshard.ir import copy_graph
from graphshard.passes import PlanCollectives
from graphshard.pipeline import PassContext, Pipeline
from graphshard.planner import problem_of_graph

matplotlib.use("agg")
from matplotlib import pyplot as plt

#: Colours of a row's bars, by kind of event or of collective.
COLOURS = {
    "compute": "#4c72b0", "copy": "#9bb3d8", "wait": "#eeeeee",
    "all_gather": "#55a868", "reduce_scatter": "#dd8452", "all_reduce": "#c44e52",
}  # fmt: skip

NAMES = {
    "compute": "compute", "copy": "copies into and out of buckets", "wait": "compute waits",
    "all_gather": "all-gather", "reduce_scatter": "reduce-scatter",
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A stretch of time, in seconds from the start of the step, on the row of compute or of the link."""

    row: str
    kind: str
    start: float
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeline:
    """One step: its bars, its length, and how long compute waits for collectives."""

    bars: tuple[Bar, ...]
    seconds: float
    exposed_seconds: float
    num_collectives: int


class WithLoss(nn.Module):
    """The benchmark's GPT with the loss of the next token as its result."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.gpt = Gpt(config)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self.gpt(tokens).flatten(0, 1), targets.flatten())


def timelines(config: GptConfig, card_name: str, num_ranks: int) -> tuple[Timeline, Timeline]:
    """The step with its collectives in place, and as planned."""
    card = load_card(card_name)
    rules = ShardingRules(mesh={"shard": num_ranks}, units=("gpt.blocks.*",))
    batch = random_batch(config, batch=4, seed=0)
    step = capture_step(WithLoss(config), batch, rules=rules, needs_loss=True, device_type=card.device_type)
    prices = CostModel.of_mesh(card, step.context.mesh)
    halves = [(step.forward, step.context.for_forward()), (step.backward, step.context.for_backward())]
    found = []
    for is_planned in (False, True):
        walks = []
        for gm, context in halves:
            gm = copy_graph(gm)
            context = replace(context, prices=prices, device_type=card.device_type)
            steps = (*LOWERING.passes, PlanCollectives(memory_budget="default")) if is_planned else LOWERING.passes
            Pipeline(*steps, given=LOWERING.given).run(gm, context)
            walks.append(_walk(gm, context, prices))
        found.append(_timeline(walks))
    return found[0], found[1]


def _walk(gm: fx.GraphModule, context: PassContext, prices: CostModel) -> tuple[Walk, list[str]]:
    found = problem_of_graph(gm, prices, device_type=context.device_type)
    return walk(found.problem, found.unplanned), [one.kind for one in found.problem.collectives]


def _timeline(walks: list[tuple[Walk, list[str]]]) -> Timeline:
    bars, start, num_collectives = [], 0.0, 0
    for events, kinds in walks:
        bars += [
            Bar(row="compute", kind=event.kind, start=start + event.start, seconds=event.seconds)
            for event in events.stream
        ]
        bars += [
            Bar(row="link", kind=kinds[one.members[0]], start=start + one.began, seconds=one.finished - one.began)
            for one in events.flights
        ]
        start += events.seconds
        num_collectives += len(events.flights)
    exposed = sum(events.exposed_seconds for events, _ in walks)
    return Timeline(bars=tuple(bars), seconds=start, exposed_seconds=exposed, num_collectives=num_collectives)


def draw(in_place: Timeline, planned: Timeline, title: str, path: Path) -> None:
    """Two timelines on one axis of milliseconds, as PNG."""
    figure, axes = plt.subplots(2, 1, figsize=(10, 3.4), sharex=True)
    for axis, timeline, name in zip(axes, (in_place, planned), ("in place", "planned"), strict=True):
        for bar in timeline.bars:
            row = 1 if bar.row == "compute" else 0
            axis.broken_barh(
                [(1e3 * bar.start, 1e3 * bar.seconds)], (row - 0.4, 0.8), facecolor=COLOURS[bar.kind], linewidth=0
            )
        axis.set_yticks([1, 0], ["compute", "link"])
        axis.set_title(
            f"{name}: {1e3 * timeline.seconds:.0f} ms, {timeline.num_collectives} collectives, "
            f"{1e3 * timeline.exposed_seconds:.0f} ms of waiting",
            loc="left", fontsize=10,
        )  # fmt: skip
        axis.spines[["top", "right", "left"]].set_visible(False)
        axis.tick_params(axis="y", length=0)
    axes[1].set_xlabel("milliseconds")
    figure.suptitle(title, x=0.02, ha="left", fontsize=11)
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[kind]) for kind in NAMES]
    figure.legend(handles, NAMES.values(), loc="lower center", ncols=len(NAMES), frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Writes the picture, prints both totals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/pictures/timelines.png"))
    parser.add_argument("--hardware", default="cpu-ethernet-1g", help="a card's name or file")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    given = parser.parse_args()
    config = GptConfig(num_layers=given.layers, width=given.width)
    in_place, planned = timelines(config, given.hardware, given.ranks)
    size = f"{given.layers} x {given.width}, {given.ranks} ranks, {given.hardware}"
    title = f"One step (forward and backward) of a GPT, {size}, predicted"
    draw(in_place, planned, title, given.out)
    print(f"in place {1e3 * in_place.seconds:.1f} ms, planned {1e3 * planned.seconds:.1f} ms: {given.out}")


if __name__ == "__main__":
    main()
