"""The cost model against the clock: predicted and measured compute of the unsharded, compiled GPT.

    python benchmarks/predicted_compute.py --profile

In each round the compute of this machine is measured as `graphshard calibrate` does, the graphs that Inductor
was given are priced with it, and the compiled forward and backward is timed: the speed of a shared machine
changes within minutes. One thread is timed by the seconds of its core, so that other work does not count.
With `--profile` the clock also looks inside, and a table has a row per kind of kernel.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._inductor.compile_fx import compile_fx, compile_fx_inner
from torch.profiler import ProfilerActivity, profile

from gpt import Gpt, GptConfig, next_token_loss, random_batch
from graphshard.cost import HardwareCard, compute_seconds, load_card, total_flops
from graphshard.cost.flops import kernel_class
from graphshard.cost.probes import ProbeSizes, probe_compute, typical
from graphshard.ir.op_traits import is_fusible

#: What the profiler calls the kernels of each class.
PROFILED = {
    "matmul": ("aten::mm", "aten::addmm", "aten::bmm"),
    "attention": ("aten::_scaled_dot_product_flash_attention_for_cpu",),
    "attention_backward": ("aten::_scaled_dot_product_flash_attention_for_cpu_backward",),
}


def compile_step(config: GptConfig, batch: int) -> tuple[Callable[[], None], list[fx.GraphModule]]:
    """A compiled forward and backward, and the graphs it consists of once it ran."""
    graphs: list[fx.GraphModule] = []

    def keep(gm: fx.GraphModule, inputs: list[Any], **kwargs: Any) -> Any:
        graphs.append(gm)
        return compile_fx_inner(gm, inputs, **kwargs)

    def backend(gm: fx.GraphModule, inputs: list[Any]) -> Any:
        return compile_fx(gm, inputs, inner_compile=keep)

    torch.manual_seed(0)
    model = Gpt(config)
    tokens, targets = random_batch(config, batch=batch, seed=1)
    loss = torch.compile(lambda: next_token_loss(model(tokens), targets), backend=backend)

    def step() -> None:
        loss().backward()
        for parameter in model.parameters():
            parameter.grad = None

    return step, graphs


def time_steps(step: Callable[[], None], rounds: int) -> list[float]:
    """Seconds of each step, shortest first."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    seconds = []
    for _ in range(rounds):
        start = clock()
        step()
        seconds.append(clock() - start)
    return sorted(seconds)


def measure_card() -> HardwareCard:
    """The compute of this machine; links as in a shipped card, which compute does not use."""
    probe = probe_compute(torch.device("cpu"), ProbeSizes.for_device("cpu"))
    return replace(
        load_card("cpu-loopback"), **{each.name: getattr(probe, each.name) for each in fields(probe)}
    )


def predicted_by_class(graphs: list[fx.GraphModule], card: HardwareCard) -> Counter[str]:
    """Predicted seconds by class of kernel."""
    found: Counter[str] = Counter()
    for gm in graphs:
        for node, seconds in compute_seconds(gm, card).items():
            found[kernel_class(node) or ("fused" if is_fusible(node) else "other")] += seconds
    return found


def profiled_by_class(step: Callable[[], None], rounds: int) -> Counter[str]:
    """Seconds of a step by class of kernel, as the profiler sees them; what is in no op counts as fused."""
    with profile(activities=[ProfilerActivity.CPU]) as record:
        for _ in range(rounds):
            step()
    found: Counter[str] = Counter()
    total = 0.0
    for event in record.key_averages():
        total += event.self_cpu_time_total
        names = [kind for kind, ops in PROFILED.items() if event.key in ops]
        if names:
            found[names[0]] += event.cpu_time_total
        elif "CompiledFxGraph" in event.key:
            found["fused"] += event.self_cpu_time_total
    found["other"] = total - sum(found.values())
    return Counter({kind: microseconds * 1e-6 / rounds for kind, microseconds in found.items()})


def main() -> None:
    """Prints predicted and measured seconds and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--card", help="price with this card (name or file) instead of measuring")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=20, help="timed steps in a round")
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    config = GptConfig(num_layers=options.layers, width=options.width)
    step, graphs = compile_step(config, options.batch)
    with functorch_config.patch(enable_autograd_cache=False):  # a cached step has no graphs to price
        step()
    step()
    print(f"{sum(total_flops(gm) for gm in graphs) / 1e9:.2f} GFLOP a step; ms: predicted, measured, ratio")
    ratios = []
    for _ in range(options.rounds):
        card = load_card(options.card) if options.card else measure_card()
        by_class = predicted_by_class(graphs, card)
        predicted = sum(by_class.values())
        seconds = typical(time_steps(step, options.steps))
        ratios.append(predicted / seconds)
        print(f"{predicted * 1e3:8.1f} {seconds * 1e3:8.1f} {ratios[-1]:8.3f}", flush=True)
    print(f"median ratio {statistics.median(ratios):.3f}, from {min(ratios):.3f} to {max(ratios):.3f}")
    if options.profile:
        measured = profiled_by_class(step, options.steps)
        print(f"{'class':20} {'predicted ms':>13} {'measured ms':>12}")
        for kind in sorted(by_class | measured):
            print(f"{kind:20} {by_class[kind] * 1e3:13.2f} {measured[kind] * 1e3:12.2f}")


if __name__ == "__main__":
    main()
