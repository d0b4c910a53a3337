"""All-gathers of one tensor on gloo go through gloo's plain gather, not through its coalesced one."""

import torch
import torch.distributed as dist
from support.torch_versions import TORCH
from torch.profiler import ProfilerActivity, profile

import graphshard.ir  # noqa: F401  has the kernel

c10d = torch.ops._c10d_functional


def gathered(shard: torch.Tensor, group: str | dist.ProcessGroup | None = None) -> torch.Tensor:
    return c10d.wait_tensor(c10d.all_gather_into_tensor(shard, 2, group or dist.group.WORLD.group_name))


def gather_in_all_ways() -> list[str]:
    """Compares gathers of several kinds with what they must be; the names of gloo's events of the last ones."""
    rank = dist.get_rank()
    rows = torch.arange(6.0).view(3, 2) + 10 * rank
    both = torch.cat([rows - 10 * rank, rows - 10 * rank + 10])
    group = dist.group.WORLD
    assert torch.equal(gathered(rows), both)
    if TORCH > (2, 11):  # that of 2.11 takes names only
        assert torch.equal(gathered(rows, group), both)
    assert torch.equal(gathered(rows.t().contiguous().t(), group.group_name), both)
    assert torch.equal(gathered(torch.complex(rows, -rows)), torch.complex(both, -both))
    assert gathered(torch.empty(0, 3)).shape == (0, 3)
    empty = gathered(torch.empty(2, 0, dtype=torch.int32))
    assert empty.shape == (4, 0) and empty.dtype == torch.int32
    with profile(activities=[ProfilerActivity.CPU]) as events:
        open_gathers = [c10d.all_gather_into_tensor(rows + k, 2, group.group_name) for k in range(8)]
        for k, full in enumerate(open_gathers):
            assert torch.equal(c10d.wait_tensor(full), both + k)
    return [event.key for event in events.key_averages()]


def test_a_gather_is_a_plain_one_of_gloo(run_on_gloo_ranks):
    for events in run_on_gloo_ranks(2, gather_in_all_ways):
        assert "_c10d_functional::all_gather_into_tensor" in events
        assert "gloo:all_gather" in events
        assert not any("coalesced" in event for event in events)


def test_another_backend_gets_what_torch_does(fake_group):
    fake_group(2)
    assert gathered(torch.ones(3, 2)).shape == (6, 2)
