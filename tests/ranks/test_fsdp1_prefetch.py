"""Where gathers start in FSDP1's wrappers, by `backward_prefetch` and `forward_prefetch`."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.fsdp1 import full_gradients, wrap
from support.toy_models import build_mlp
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.testing import assert_close

SIZES = ((64, 64),) * 6
LINEARS = ModuleWrapPolicy({nn.Linear})
DEFAULT, POST = BackwardPrefetch.BACKWARD_PRE, BackwardPrefetch.BACKWARD_POST


def build(**options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = build_mlp(*SIZES)
    model = build_mlp(*SIZES)
    model.load_state_dict(plain.state_dict())
    return plain, wrap("sharded", model, auto_wrap_policy=LINEARS, **options)


def check_step(plain: nn.Module, model: nn.Module, forward: Callable[..., Any]) -> None:
    inputs = torch.ones(2, 64)
    forward(inputs).square().sum().backward()
    plain(inputs).square().sum().backward()
    assert_close(full_gradients(model), {name: param.grad for name, param in plain.named_parameters()})


def plan_and_train(folder: str) -> None:
    """A step on a slow link, whose latency rewards a plan that merges gathers of several units."""
    plain, model = build(backward_prefetch=POST, forward_prefetch=True)
    dump = {"dump": folder} if dist.get_rank() == 0 else {}
    # With the limit of time that is the default, a slow machine plans less.
    options = {"hardware": "cpu-ethernet-1g", "planning_seconds": 600.0, **dump}
    check_step(plain, model, torch.compile(model, backend="graphshard", options=options))


def planned(folder: Path, half: str) -> str:
    """The text of a planned half."""
    (path,) = folder.glob(f"graph0.{half}.*-plan_collectives.txt")
    return path.read_text()


def order_of(text: str) -> str:
    """The order of a planned half: G for a gather, P for a product."""
    letters = {"all_gather_into_tensor": "G", "mm": "P", "addmm": "P"}
    found = re.findall(rf" = (?:\w+\.)*({'|'.join(letters)})\(", text)
    return "".join(letters[op] for op in found)


def gathers_of(text: str) -> list[tuple[int, int]]:
    """For each gather: the last layer whose weight it gathers, and the products before it."""
    layer_of = {
        name: int(index) // 2
        for name, index in re.findall(r"^(%\w+): .* = shard (\d+)\.weight", text, re.MULTILINE)
    }
    gathers, products = [], 0
    for name, op, arguments in re.findall(r"^(%\S+): .* = (\w+)\((.*)\)", text, re.MULTILINE):
        layers = [layer_of[read] for read in re.findall(r"%[\w.]+", arguments) if read in layer_of]
        if op in ("join", "all_gather_into_tensor") and layers:
            layer_of[name] = max(layers)
        if op == "all_gather_into_tensor":
            gathers.append((layer_of[name], products))
        products += op in ("mm", "addmm")
    return gathers


def test_a_plan_keeps_what_the_wrapper_asks_for(run_on_gloo_ranks, tmp_path):
    run_on_gloo_ranks(2, plan_and_train, str(tmp_path))
    assert order_of(planned(tmp_path, "forward")) == "GGPGPGPGPGPP"  # unplanned by the wrapper: GPPGGPPPGGP
    # The first layer needs no gather, and the machine decides which others are kept. Each layer has two products, and
    # the gather of a layer comes behind those of the layer after it.
    gathers = gathers_of(planned(tmp_path, "backward"))
    assert gathers and all(products >= 2 * (len(SIZES) - 1 - layer) for layer, products in gathers)


def note_and_call(events: list[str], event: str, method: Callable[..., Any], *args: Any) -> Any:
    events.append(event)
    return method(*args)


def note_gathers(backward_prefetch: BackwardPrefetch | None) -> list[str]:
    """Uncompiled: what happens to each wrapper in the second backward, in order."""
    plain, model = build(backward_prefetch=backward_prefetch)
    check_step(plain, model, model)
    model.zero_grad()
    plain.zero_grad()
    events: list[str] = []
    units = [layer.module._graphshard_unit for layer in model.module if not isinstance(layer, nn.ReLU)]
    for index, unit in enumerate(units):
        for letter, name in (("p", "prefetch"), ("e", "gather_for_backward"), ("g", "end_of_gradients")):
            setattr(unit, name, partial(note_and_call, events, f"{letter}{index}", getattr(unit, name)))
    loss = model(torch.ones(2, 64)).square().sum()
    events.clear()
    loss.backward()
    return events


@pytest.mark.parametrize(
    ("backward_prefetch", "expected"),
    [
        (DEFAULT, "e5 p4 g5 e4 p3 g4 e3 p2 g3 e2 p1 g2 e1 p0 g1 e0 g0"),
        (POST, "e5 g5 p4 e4 g4 p3 e3 g3 p2 e2 g2 p1 e1 g1 p0 e0 g0"),
        (None, "e5 g5 e4 g4 e3 g3 e2 g2 e1 g1 e0 g0"),
    ],
)
def test_an_uncompiled_backward_gathers_when_the_wrapper_says(run_on_gloo_ranks, backward_prefetch, expected):
    """p: the gather of a layer is started early; e: the backward enters it; g: its gradients exist."""
    assert run_on_gloo_ranks(2, note_gathers, backward_prefetch) == [expected.split()] * 2
