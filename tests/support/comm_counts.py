"""How many collectives of each kind really ran, counted by the profiler."""

import math
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain

import torch
import torch.distributed as dist
from torch._C._profiler import ProfilerConfig, ProfilerState, _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

#: torch's FSDP2 and an uncompiled graphshard call c10d, graphs the functional collectives.
_KINDS = {
    "c10d::_allgather_base_": "gathers",
    "c10d::_reduce_scatter_base_": "reductions",
    "c10d::allreduce_": "all-reduces",
    "_c10d_functional::all_gather_into_tensor": "gathers",
    "_c10d_functional::reduce_scatter_tensor": "reductions",
    "_c10d_functional::all_to_all_single": "reductions",
    "_c10d_functional::all_gather_into_tensor_out": "gathers",
}


_ITEMSIZES = {
    "unsigned char": 1, "signed char": 1, "c10::BFloat16": 2, "float": 4,
    "Byte": 1, "Char": 1, "BFloat16": 2, "Float": 4,
}  # fmt: skip


@contextmanager
def list_collectives() -> Iterator[list[tuple[str, int]]]:
    """The list is filled when the block ends: kind and bytes (the larger of what goes in and comes out), sorted."""
    found: list[tuple[str, int]] = []
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
        yield found
    for event in trace.profiler.kineto_results.events():
        if event.name() in _KINDS:
            kind = _KINDS[event.name()]
            sizes = [
                math.prod(shape) * _ITEMSIZES[dtype]
                for shape, dtype in zip(event.shapes(), event.dtypes(), strict=True)
                if shape and dtype in _ITEMSIZES
            ]
            is_input = event.name() == "_c10d_functional::all_gather_into_tensor"
            found.append((kind, max(sizes) * (dist.get_world_size() if is_input else 1)))
    found.sort()


@contextmanager
def count_collectives() -> Iterator[Counter[str]]:
    """The counter is filled when the block ends.

    Collectives may still run then. ``torch.profiler`` does not stand that: what Gloo's threads record while it stops
    loses it its events, or kills the process. The profiler before it takes a lock.
    """
    counts: Counter[str] = Counter()
    config = ProfilerConfig(ProfilerState.CPU, False, False, False, False, False, _ExperimentalConfig())
    torch.autograd._enable_profiler_legacy(config)
    try:
        yield counts
    finally:
        threads = torch.autograd._disable_profiler_legacy()
    for event in chain.from_iterable(threads):
        # A functional all-reduce calls c10d's, which is counted. The other functional collectives call other ops.
        if event.kind() == "push" and (name := event.name()) in _KINDS:
            counts[_KINDS[name]] += 1
