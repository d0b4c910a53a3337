"""Reports of small models, a graph and a card, for the tests of inspection and of the page."""

import functools
from dataclasses import replace
from unittest import mock

import torch
from torch import Tensor, fx, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import graphshard
from graphshard.capture import CapturedStep, capture_step
from graphshard.inspection import inspect_model
from graphshard.ir.rewrite import copy_graph
from graphshard.report import Report
from support.cost_cards import round_card, with_rows
from support.llama_example import llama_model
from support.small_models import MODELS, example_batch

CARD = round_card()
TINY = llama_model.LlamaConfig(
    num_layers=2, width=64, hidden=128, num_heads=4, num_kv_heads=2, vocabulary=80
)
POLICY = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def mean_square(output: Tensor) -> Tensor:
    return output.square().mean()


def inspect_llama(*, captures_again: bool = False, **options) -> Report:
    """The report of a tiny Llama; without a plan by cost its step is captured once for all cards and micro-batches."""
    config = replace(TINY, **options.pop("config", {}))
    model, args, kwargs = llama_model.on_meta(config, 2, 16)
    given = {"mesh": {"shard": 8}, "hardware": CARD, "units": ["layers.*"], "mp_policy": POLICY} | options
    if captures_again or "passes" in given or given.get("plan", "unit") != "unit":
        return graphshard.inspect(model, args, kwargs, **given)
    with mock.patch.object(inspect_model, "capture_step", functools.partial(_captured_once, config)):
        return graphshard.inspect(model, args, kwargs, **given)


_steps: dict[str, CapturedStep] = {}


def _captured_once(config: object, *args, rules, checkpoint, device_type, **options) -> CapturedStep:
    """A copy, because passes edit halves in place."""
    key = repr((config, rules, checkpoint, device_type))
    if key not in _steps:
        _steps[key] = capture_step(*args, rules=rules, checkpoint=checkpoint, device_type=device_type, **options)
    step = _steps[key]
    return replace(step, **{name: copy_graph(getattr(step, name)) for name in ("joint", "forward", "backward")})


def inspect_linears(**options) -> Report:
    """Two layers: 4 to 5 and 5 to 3, a batch of any rows."""
    batch = example_batch("two_linears")
    given = {"mesh": {"shard": 2}, "hardware": CARD, "units": ["first", "second"], "loss": mean_square}
    return graphshard.inspect(MODELS["two_linears"](), [batch], **(given | options))


def graph_with_a_gather() -> fx.GraphModule:
    graph = fx.Graph()
    shard, x = graph.placeholder("shard"), graph.placeholder("x")
    c10d = torch.ops._c10d_functional
    gathered = graph.call_function(c10d.all_gather_into_tensor.default, (shard, 4, "mine"))
    waited = graph.call_function(c10d.wait_tensor.default, (gathered,))
    product = graph.call_function(torch.ops.aten.mm.default, (x, waited))
    graph.output((product,))
    for node, shape in ((shard, (2, 8)), (x, (16, 8)), (gathered, (8, 8)), (waited, (8, 8)), (product, (16, 8))):
        node.meta["val"] = torch.empty(shape, device="meta")
    return fx.GraphModule(nn.Module(), graph)


def measured_card():
    """Collectives of eight ranks overlap by 1 us of latency and by half of their transfer."""
    link = round_card().intra_node
    for op in ("all_gather", "reduce_scatter", "all_reduce"):
        link = with_rows(link, op, 8, (2**10, 2e-6, 1e-6), (2**14, 12e-6, 6e-6), (2**20, 120e-6, 60e-6))
    return round_card(intra_node=link, overlapped_latency_seconds=1e-6)
