"""Plans of Llama 3 on H100s, beside the unit schedule of training and Inductor's own overlap pass.

    python benchmarks/planner_llama.py                                   # 8B, 32 layers, 8 to 1,024 ranks
    python benchmarks/planner_llama.py --model 405b --layers 8 32 126 --mesh shard=1024
    python benchmarks/planner_llama.py --mesh replicate=16,shard=64 --tokens 2048
    python benchmarks/planner_llama.py --mesh shard=8,tp=8               # tensor parallelism inside a node
    python benchmarks/planner_llama.py --device cuda --no-inductor       # few, large buckets, as on GPUs

A step is captured on fake tensors and sharded by layers, bf16 with fp32 reductions; nothing runs. All
schedules are priced by one cost model and one simulation. Per half of a step, in milliseconds: "unit" is
one bucket a layer, gathered one ahead (`overlap="always"`); "in order" is the planner's where compute keeps its
order; "plan" is the planner's, with its bound and gap, and "any" what nothing beats in any order of compute;
"Inductor" its pass on the same graph and prices, with and without its bucketing (it also moves compute). Peaks are in
GiB. "plan s" is user time of planning: reading the graph, searching, putting the plan into a copy, and its memory.
"""

from __future__ import annotations

import argparse
import importlib
import resource
import sys
from dataclasses import replace
from pathlib import Path

import torch
from torch import fx
from torch.distributed.fsdp import MixedPrecisionPolicy

from graphshard import passes
from graphshard.capture.capture_step import PLAIN_PIPELINE, ShardingRules, capture_step
from graphshard.cost import CostModel, load_card
from graphshard.ir.collectives import is_collective
from graphshard.ir.mesh import MeshLayout
from graphshard.ir.rewrite import copy_graph
from graphshard.pipeline.context import PassContext
from graphshard.pipeline.pipeline import Pipeline
from graphshard.pipeline.provenance import row_places
from graphshard.planner.from_graph import problem_of_graph
from graphshard.planner.plan_graph import plan_graph
from graphshard.planner.search.plan import Plan
from graphshard.planner.search.simulate import Simulation, simulate
from inductor_overlap import inductor_schedule
from llama_tensor_parallel import capture_tensor_parallel

sys.path.append(str(Path(__file__).parents[1] / "examples"))
llama = importlib.import_module("llama_model")

LLAMA_1B = llama.LlamaConfig(num_layers=16, width=2048, hidden=8192, num_heads=32)
MODELS = {"1b": LLAMA_1B, "8b": llama.LLAMA_3_8B, "70b": llama.LLAMA_3_70B, "405b": llama.LLAMA_3_405B}
MESHES = [{"shard": 8}, {"shard": 64}, {"shard": 256}, {"shard": 1024}]
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
TO_LEVEL_2 = Pipeline(passes.LowerShards(), given=PLAIN_PIPELINE.facts_at_end)


def user_seconds() -> float:
    """CPU time of this process in user code."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def lower(half: fx.GraphModule, ctx: PassContext) -> fx.GraphModule:
    """A copy at level 2."""
    gm = copy_graph(half)
    TO_LEVEL_2.run(gm, ctx)
    return gm


def captured(
    model: str, num_layers: int, mesh: dict[str, int], tokens: int
) -> tuple[dict[str, tuple[fx.GraphModule, PassContext]], MeshLayout]:
    """The halves of a step on a batch of one sequence, at level 2, and the mesh."""
    module, args, kwargs = llama.on_meta(replace(MODELS[model], num_layers=num_layers), 1, tokens)
    if "tp" in mesh:
        graphs, layout = capture_tensor_parallel(module, args[0], mesh, POLICY)
        forward, backward = graphs.context.for_forward(), graphs.context.for_backward()
        return {"forward": (graphs.forward, forward), "backward": (graphs.backward, backward)}, layout
    rules = ShardingRules(mesh=mesh, units=("layers.*",), mp_policy=POLICY)
    step = capture_step(module, args, kwargs, rules=rules)
    forward, backward = step.context.for_forward(), step.context.for_backward()
    halves = {
        "forward": (lower(step.forward, forward), forward),
        "backward": (lower(step.backward, backward), backward),
    }
    return halves, step.context.mesh


def unit_schedule(half: fx.GraphModule, ctx: PassContext, model: CostModel) -> Simulation:
    """One bucket a unit, each gather one bucket ahead."""
    gm = copy_graph(half)
    by_unit = passes.BucketCollectives(), passes.ScheduleCollectives(memory="any")
    Pipeline(*by_unit, given=TO_LEVEL_2.facts_at_end).run(gm, ctx)
    found = problem_of_graph(gm, model)
    return simulate(found.problem, found.unplanned)


def short(simulation: Simulation | Plan) -> str:
    """Milliseconds and peak."""
    return f"{1e3 * simulation.seconds:9.2f} {simulation.peak_bytes / 2**30:6.1f}"


def row(
    name: str, gm: fx.GraphModule, ctx: PassContext, layout: MeshLayout, device: str, with_inductor: bool
) -> str:
    """One line of the table."""
    model = CostModel.of_mesh(load_card("h100-sxm"), layout)
    places = row_places(gm, ctx)
    before = user_seconds()
    found = plan_graph(gm, model, places=places, device_type=device).plan
    seconds = user_seconds() - before
    in_order = found
    if found.num_moved:
        in_order = plan_graph(gm, model, places=places, device_type=device, move_compute=False).plan
    assert found.any_order_seconds is not None
    text = (
        f"{name} {len(gm.graph.nodes):>6} {sum(map(is_collective, gm.graph.nodes)):>5} "
        f"{short(unit_schedule(gm, ctx, model))} {1e3 * in_order.seconds:9.2f} {short(found)} "
        f"{1e3 * found.bounds.seconds:9.2f} {100 * found.gap:6.2f} {1e3 * found.any_order_seconds:9.2f} "
        f"{len(found.buckets):>7} {min(one.num_bytes for one in found.buckets) / 2**10:9.0f} {seconds:6.1f}"
    )
    if with_inductor:
        for merges in (False, True):
            moved, steps = inductor_schedule(gm, model, layout, merges=merges)
            text += " " + short(simulate(moved, steps))
    return text


def parsed_mesh(text: str) -> dict[str, int]:
    """A mesh from "replicate=16,shard=64" or "shard=8,tp=8"."""
    return {name: int(size) for name, size in (part.split("=") for part in text.split(","))}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="8b")
    parser.add_argument("--layers", type=int, nargs="+", default=[], help="default: all the model has")
    parser.add_argument("--mesh", type=parsed_mesh, nargs="+", default=MESHES)
    parser.add_argument("--tokens", type=int, default=8192, help="of the one sequence of a rank")
    parser.add_argument(
        "--device", default="cpu", help='"cuda": few, large buckets; else buckets of any size'
    )
    parser.add_argument(
        "--no-inductor", action="store_true", help="leave Inductor's pass out: it takes longest"
    )
    options = parser.parse_args()
    print(f"{'mesh':>16} {'layers':>6} {'half':>8}  nodes coll.   unit ms   peak  in order   plan ms   peak  bound ms  "
          "gap %    any ms buckets  smallest plan s  Inductor   peak   merging   peak", flush=True)  # fmt: skip
    for num_layers in options.layers or [MODELS[options.model].num_layers]:
        for mesh in options.mesh:
            halves, layout = captured(options.model, num_layers, mesh, options.tokens)
            for half, (gm, ctx) in halves.items():
                name = f"{' x '.join(map(str, mesh.values())):>16} {num_layers:>6} {half:>8}"
                print(row(name, gm, ctx, layout, options.device, not options.no_inductor), flush=True)
