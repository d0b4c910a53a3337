"""How many collectives of each kind really ran, counted by the profiler."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from torch.profiler import ProfilerActivity, profile

#: torch's FSDP2 calls c10d, graphshard the functional collectives.
_KINDS = {
    "c10d::_allgather_base_": "gathers",
    "c10d::_reduce_scatter_base_": "reductions",
    "c10d::allreduce_": "all-reduces",
    "_c10d_functional::all_gather_into_tensor": "gathers",
    "_c10d_functional::reduce_scatter_tensor": "reductions",
    "_c10d_functional::all_to_all_single": "reductions",
    "_c10d_functional::all_reduce": "all-reduces",
    "_c10d_functional::all_gather_into_tensor_out": "gathers",
    "_c10d_functional::all_reduce_": "all-reduces",
}


@contextmanager
def count_collectives() -> Iterator[Counter[str]]:
    """The counter is filled when the block ends."""
    counts: Counter[str] = Counter()
    with profile(activities=[ProfilerActivity.CPU]) as trace:
        yield counts
    functional = {event.name for event in trace.events() if event.name.startswith("_c10d_functional::")}
    for event in trace.events():
        kind = _KINDS.get(event.name)
        # A functional collective calls c10d: count it once.
        if kind is not None and (not functional or event.name.startswith("_c10d_functional::")):
            counts[kind] += 1
