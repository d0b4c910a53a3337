"""Copies of results to the CPU that run beside compute: a step waits for all of them once, at its end.

With CPU offload a backward copies each reduced gradient to the CPU. A copy that waits keeps the host from starting
kernels, and writes to memory that is not pinned: on an H100 a step of two Llama layers took 317 ms instead of 34, of
which the copies need 13 (docs/benchmarks.md).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

_COPY = torch.ops.prims.device_put.default
_CPU = torch.device("cpu")


def start_copies(gm: fx.GraphModule) -> torch.device | None:
    """Makes copies from an accelerator to the CPU asynchronous, where the graph itself does not read the result.

    Inductor then pins the memory that they write to.

    Args:
        gm: a half; edited in place.

    Returns:
        The device that they copy from; None if there are none.
    """
    found = None
    output = gm.graph.output_node()
    for node in gm.graph.find_nodes(op="call_function", target=_COPY):
        source = node.args[0].meta["val"].device
        if source.type != "cpu" and torch.device(node.args[1]) == _CPU and set(node.users) == {output}:
            node.args = (*node.args[:2], True)
            found = source
    return found


def waiting(run: Callable[[list[Any]], Any], device: torch.device) -> Callable[[list[Any]], Any]:
    """``run``, with a wait for what it queued on the current stream of ``device``: the CPU reads its results next."""

    def run_and_wait(args: list[Any]) -> Any:
        results = run(args)
        torch.accelerator.current_stream(device).synchronize()
        return results

    run_and_wait._boxed_call = True  # type: ignore[attr-defined]
    return run_and_wait
