"""A graph break is said once: where it is, and what it costs."""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.implementations import world_mesh
from torch import Tensor, nn

from graphshard import fully_shard

Run = Callable[..., list[Any]]


class Broken(nn.Module):
    """Up to two graph breaks between layers."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(3)])
        self.places = places

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if self.places > 0:
            torch._dynamo.graph_break()  # the first
        x = self.layers[1](x)
        if self.places > 1:
            torch._dynamo.graph_break()  # the second
        return self.layers[2](x)


def tell_of_breaks(places: int) -> None:
    model = Broken(places)
    fully_shard(model, mesh=world_mesh())
    compiled = torch.compile(model, backend="graphshard", dynamic=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for size in (2, 3, 2):  # compiled twice
            compiled(torch.ones(size, 4)).sum().backward()
    texts = [str(each.message) for each in caught if "graph break" in str(each.message)]
    assert len(texts) == places, texts
    source = Path(__file__).read_text().split("\n")
    for text, line in zip(texts, ("# the first", "# the second"), strict=False):
        number = next(index for index, each in enumerate(source, 1) if each.endswith(line))
        assert f"{__file__}:{number}: " in text and "gathered twice" in text


@pytest.mark.parametrize("places", [0, pytest.param(1, marks=pytest.mark.slow), 2])
def test_breaks_are_told_once(run_on_gloo_ranks: Run, places: int) -> None:
    run_on_gloo_ranks(2, tell_of_breaks, places)


class Looping(Broken):
    """A graph break in a loop, at which Dynamo leaves the forward to Python."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)  # the loop
            torch._dynamo.graph_break()
        return x


def tell_of_loops() -> None:
    source = Path(__file__).read_text().split("\n")
    number = next(index for index, each in enumerate(source, 1) if each.endswith("# the loop"))
    for compiles_layers in (False, True):
        model = Looping(0)
        for layer in model.layers[:2]:
            fully_shard(layer, mesh=world_mesh())
        fully_shard(model, mesh=world_mesh())
        for layer in model.layers if compiles_layers else ():
            layer.compile(backend="graphshard")
        forward = model if compiles_layers else torch.compile(model, backend="graphshard")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            forward(torch.ones(2, 4)).sum().backward()
        texts = [str(each.message) for each in caught if "graph break" in str(each.message)]
        assert len(texts) == (not compiles_layers), texts  # what is compiled layer by layer is not cut
        assert all(f"in pieces at {__file__}:{number}: Python runs" in text for text in texts), texts


def test_a_break_in_a_loop_is_told_once(run_on_gloo_ranks: Run) -> None:
    run_on_gloo_ranks(2, tell_of_loops)
