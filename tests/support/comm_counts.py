"""How many collectives of each kind really ran, counted by the profiler."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

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


@contextmanager
def count_collectives() -> Iterator[Counter[str]]:
    """The counter is filled when the block ends."""
    counts: Counter[str] = Counter()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        yield counts
    for event in trace.events():
        # A functional all-reduce calls c10d's, which is counted. The other functional collectives call other ops.
        if event.name in _KINDS:
            counts[_KINDS[event.name]] += 1
