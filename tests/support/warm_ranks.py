"""Imported once by the server that the ranks are forked from: a process's first compilation is done for all of them.

It loads a hundred modules of torch and traces Inductor's patterns, which takes a rank a second.
"""

import torch
from torch import nn
from torch._inductor.compile_fx import compile_fx

from support import fsdp1, implementations, meshes_parity, parity, toy_models  # noqa: F401  (most tests import these)
from support.interpreted_halves import interpret_half


@torch.no_grad()
def compile_something() -> None:
    """A graph of a layer without a backward: after a backward, torch's builds with CUDA forbid one in a fork."""

    def backend(gm: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        return compile_fx(gm, inputs, inner_compile=interpret_half)

    torch.compile(nn.Linear(2, 2), backend=backend)(torch.ones(2, 2))
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


# With a GPU, Inductor would ask for its properties, and a fork could not use it any more.
if torch.cuda.device_count() == 0:
    compile_something()
