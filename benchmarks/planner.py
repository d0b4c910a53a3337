"""How long planning takes, and how far plans are from the lower bound, on transformer-shaped problems.

    python benchmarks/planner.py            # 8, 32 and 126 layers
    python benchmarks/planner.py --layers 8

Nothing is captured or run: the problems have the parameters of an 8-billion-parameter transformer, a
matrix product for each, prices of latency + bytes / bandwidth, and one process group. "plan s" is user time.
The second table compares the beam searches with the exact solver on small random pieces of such problems.
"""

from __future__ import annotations

import argparse
import random
import resource
from dataclasses import dataclass

from graphshard.planner.search.beam import good_schedule
from graphshard.planner.search.bound import lower_bounds
from graphshard.planner.search.exact import TooLargeError, best_schedule
from graphshard.planner.search.problem import Collective, Problem, Task
from graphshard.planner.search.searches import BEAMS, WIDE_BEAMS
from graphshard.planner.search.simulate import simulate
from graphshard.planner.search.solve import plan

#: Bytes of the parameters of a layer, in bf16: norm, q, k, v, o, norm, gate, up, down.
SIZES = (8 << 10, 32 << 20, 8 << 20, 8 << 20, 32 << 20, 8 << 10, 112 << 20, 112 << 20, 112 << 20)

#: Seconds of a forward product for each byte of its parameter: 8,192 tokens at 400 TFLOP/s.
SECONDS_PER_BYTE = 8192 / 400e12

#: Group size, latency in seconds, bytes a second.
LINKS = ((8, 30e-6, 300e9), (64, 60e-6, 100e9), (256, 120e-6, 50e9), (1024, 250e-6, 45e9))


@dataclass(frozen=True)
class LinePrices:
    """Latency + bytes / bandwidth; copies at 1.5 TB/s after 5 microseconds."""

    latency: float
    bandwidth: float

    def collective_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        return self.latency + num_bytes / self.bandwidth

    def overlapped_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        return 0.0

    def spread_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        return 0.0

    def core_seconds(self, kind: str, num_bytes: int, group: str) -> float:
        return 0.0

    def copy_seconds(self, num_bytes: int) -> float:
        return 5e-6 + num_bytes / 1.5e12


def transformer(num_layers: int, half: str, prices: LinePrices, num_ranks: int) -> Problem:
    """One half of a step: a gather for each parameter, in a backward a reduction too."""
    tasks: list[Task] = []
    found: list[Collective] = []
    is_backward = half == "backward"
    num_pieces = 8 if is_backward else 4
    end = num_layers * len(SIZES) * num_pieces
    for layer in reversed(range(num_layers)) if is_backward else range(num_layers):
        for index, size in enumerate(reversed(SIZES) if is_backward else SIZES):
            found.append(
                Collective(
                    name=f"gather {layer}.{index}", kind="all_gather", queue="shard", in_bytes=size // num_ranks,
                    out_bytes=size, earliest=0, deadline=len(tasks), merge_key=("gather",), kept_bytes=size,
                    limit="gather",
                )
            )  # fmt: skip
            seconds = (2 if is_backward else 1) * size * SECONDS_PER_BYTE / num_pieces + 1e-5
            live = (layer + 1) * (200 << 20)
            tasks += [Task(seconds=seconds, live_bytes=live, before_bytes=live // 2)] * num_pieces
            if is_backward:
                found.append(
                    Collective(
                        name=f"reduction {layer}.{index}", kind="reduce_scatter", queue="shard", in_bytes=size,
                        out_bytes=size // num_ranks, earliest=len(tasks), deadline=end, merge_key=("reduction",),
                        ready_bytes=size, kept_bytes=size // num_ranks, limit="reduction", views_result=True,
                    )
                )  # fmt: skip
    return Problem(tasks=tasks, collectives=found, prices=prices)


def large(layers: list[int]) -> None:
    """Time to plan, and the gap, against layers and ranks."""
    print(f"{'ranks':>5} {'layers':>6} {'half':>8} {'tasks':>6} {'coll.':>6} {'plan s':>7} "
          f"{'alone ms':>9} {'plan ms':>9} {'bound ms':>9} {'gap %':>6} {'buckets':>7}")  # fmt: skip
    for num_ranks, latency, bandwidth in LINKS:
        for num_layers in layers:
            for half in ("forward", "backward"):
                problem = transformer(num_layers, half, LinePrices(latency, bandwidth), num_ranks)
                started = resource.getrusage(resource.RUSAGE_SELF).ru_utime
                found = plan(problem)
                seconds = resource.getrusage(resource.RUSAGE_SELF).ru_utime - started
                alone = good_schedule(problem, BEAMS[0])
                before = simulate(problem, alone).seconds if alone else float("nan")
                print(f"{num_ranks:>5} {num_layers:>6} {half:>8} {len(problem.tasks):>6} "
                      f"{len(problem.collectives):>6} {seconds:>7.2f} {1e3 * before:>9.2f} "
                      f"{1e3 * found.seconds:>9.2f} {1e3 * found.bounds.seconds:>9.2f} {100 * found.gap:>6.2f} "
                      f"{len(found.buckets):>7}", flush=True)  # fmt: skip


def small(count: int) -> None:
    """The beam searches against the exact solver, on ``count`` problems of 3 to 6 parameters."""
    dice = random.Random(0)
    ratios, bounds = [], []
    while len(ratios) < count:
        whole = transformer(1, "forward", LinePrices(1e-3, 5e10), 64)
        number = dice.randrange(3, 7)
        gathers = dice.sample(list(whole.collectives), number)
        tasks = [Task(seconds=dice.choice([2e-4, 1e-3, 3e-3])) for _ in range(number)]
        collectives = [
            Collective(name="g", kind="all_gather", queue="shard", in_bytes=one.in_bytes, out_bytes=one.out_bytes,
                       earliest=0, deadline=place, merge_key=("gather",), limit="gather")
            for place, one in enumerate(gathers)
        ]  # fmt: skip
        problem = Problem(tasks=tasks, collectives=collectives, prices=whole.prices)
        try:
            steps = best_schedule(problem)
        except TooLargeError:
            continue
        assert steps is not None
        best = simulate(problem, steps).seconds
        beams = [good_schedule(problem, beam) for beam in (*BEAMS, *WIDE_BEAMS)]
        ratios.append(
            min(simulate(problem, steps).seconds for steps in beams if steps is not None) / best - 1
        )
        bounds.append(best / lower_bounds(problem).seconds - 1)
    exact = sum(ratio < 1e-9 for ratio in ratios)
    print(f"\n{count} problems of 3 to 6 gathers: the beams find the optimum in {exact}, and are at most "
          f"{100 * max(ratios):.2f} % above it; the optimum is {100 * sum(bounds) / count:.2f} % above the bound "
          f"on average, {100 * max(bounds):.2f} % at most")  # fmt: skip


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32, 126])
    parser.add_argument("--small", type=int, default=60, help="problems for the exact solver; default 60")
    arguments = parser.parse_args()
    large(arguments.layers)
    if arguments.small:
        small(arguments.small)
