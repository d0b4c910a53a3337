"""All-gathers on gloo: in place by messages in small groups, else gloo's plain gather, never its coalesced one."""

import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.allocations import peak_bytes
from support.torch_versions import TORCH
from torch._subclasses import FakeTensorMode
from torch.distributed.tensor.debug import CommDebugMode
from torch.profiler import ProfilerActivity, profile

import graphshard.ir  # noqa: F401  has the kernel
from graphshard import _compat_gloo
from graphshard._compat_gloo import MAX_RANKS_IN_PLACE, GatherWork, gather_single, start_gather
from graphshard.coordination.bounded_wait import LimitedWork, WaitingThread

c10d = torch.ops._c10d_functional


def gathered(shard: torch.Tensor, group: str | dist.ProcessGroup | None = None) -> torch.Tensor:
    size = dist.get_world_size()
    return c10d.wait_tensor(c10d.all_gather_into_tensor(shard, size, group or dist.group.WORLD.group_name))


def gather_in_all_ways() -> list[str]:
    """Compares gathers of several kinds with what they must be; the names of gloo's events of the last ones."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rows = torch.arange(6.0).view(3, 2) + 10 * rank
    whole = torch.cat([rows - 10 * rank + 10 * other for other in range(size)])
    group = dist.group.WORLD
    assert torch.equal(gathered(rows), whole)
    if TORCH > (2, 11):  # that of 2.11 takes names only
        assert torch.equal(gathered(rows, group), whole)
    assert torch.equal(gathered(rows.t().contiguous().t(), group.group_name), whole)
    lazily = torch.complex(rows, rows).conj()
    for of_all, own in (
        (torch.complex(whole, -whole), torch.complex(rows, -rows)),
        (torch.complex(whole, -whole), lazily),
    ):
        assert torch.equal(gathered(own), of_all)
    for dtype in (torch.bool, torch.bfloat16, torch.int16, torch.float64):
        assert torch.equal(gathered(rows.to(dtype)), whole.to(dtype))
    assert gathered(torch.empty(0, 3)).shape == (0, 3)
    empty = gathered(torch.empty(2, 0, dtype=torch.int32))
    assert empty.shape == (2 * size, 0) and empty.dtype == torch.int32
    with profile(activities=[ProfilerActivity.CPU]) as events:
        open_gathers = [c10d.all_gather_into_tensor(rows + k, size, group.group_name) for k in range(8)]
        for k, full in enumerate(open_gathers):
            assert torch.equal(c10d.wait_tensor(full), whole + k)
    return [event.key for event in events.key_averages()]


def test_few_ranks_gather_by_messages(run_on_gloo_ranks):
    for events in run_on_gloo_ranks(2, gather_in_all_ways):
        assert "_c10d_functional::all_gather_into_tensor" in events
        assert "gloo:send" in events and "gloo:recv" in events
        assert not any("gather" in event for event in events if event.startswith("gloo:"))


def test_more_ranks_gather_by_gloos_plain_gather(run_on_gloo_ranks):
    for events in run_on_gloo_ranks(MAX_RANKS_IN_PLACE + 1, gather_in_all_ways):
        assert "gloo:all_gather" in events
        assert not any("coalesced" in event or event in ("gloo:send", "gloo:recv") for event in events)


def gather_by_calls() -> dict[str, object]:
    """Gathers of :func:`start_gather`, and torch's own beside them."""
    rank, group = dist.get_rank(), dist.group.WORLD
    size, piece = group.size(), 64 * 1024
    whole = torch.arange(float(size)).repeat_interleave(piece)

    def start(*, in_its_place: bool = True) -> tuple[torch.Tensor, object]:
        full = torch.zeros(size * piece)
        own = full.chunk(size)[rank] if in_its_place else torch.empty(piece)
        return full, start_gather(full, own.fill_(rank), group)

    # A rank that is watched communicates with ranks that are not.
    with CommDebugMode() if rank == 0 else nullcontext() as seen:
        started = [start(), start(in_its_place=False), start()]
        start_gather(torch.empty(0), torch.empty(0), group).wait()
    for full, work in started:
        work.wait()
        assert torch.equal(full, whole)
    small = torch.zeros(size)
    work_of_small = start_gather(small, small.chunk(size)[rank].fill_(rank), group)
    assert not isinstance(work_of_small, GatherWork)
    work_of_small.wait()
    assert small.tolist() == list(range(size))
    full, work = start()
    work.get_future().wait()
    work.wait()
    work.wait()
    assert torch.equal(full, whole)
    own, theirs = whole[:piece].add(rank), torch.zeros(size * piece)
    torchs = gather_single(theirs, own, group=group, async_op=True)
    torchs.wait()
    assert torch.equal(theirs, whole)
    room = torch.zeros(size * piece)
    own = room.chunk(size)[rank]
    held = peak_bytes(lambda: start_gather(room, own, group).wait())
    return {
        "seen": seen.get_total_counts() if rank == 0 else 4,
        "type": type(work).__name__,
        "torchs": type(torchs).__name__,
        "held": held,
    }


@pytest.mark.parametrize("num_ranks", [2, MAX_RANKS_IN_PLACE, MAX_RANKS_IN_PLACE + 1])
def test_calls_gather_in_place_and_are_seen_as_one_gather_each(run_on_gloo_ranks, num_ranks):
    for found in run_on_gloo_ranks(num_ranks, gather_by_calls):
        is_in_place = num_ranks <= MAX_RANKS_IN_PLACE
        assert found["seen"] == 4
        assert (found["type"] == "GatherWork") is is_in_place and found["torchs"] != "GatherWork"
        assert (found["held"] < 4096) is is_in_place


def wait_for_a_late_rank() -> bool:
    """The first rank waits with a limit, and again when the second one has come."""
    group, rank = dist.group.WORLD, dist.get_rank()
    store, full = dist.distributed_c10d._get_default_store(), torch.zeros(2**15)
    own = full.chunk(2)[rank].fill_(rank)
    if rank == 1:
        store.wait(["late rank may come"])
    limited = LimitedWork(start_gather(full, own, group), WaitingThread())
    was_over = rank == 0 and limited.is_over(0.05)
    store.set("late rank may come", "1")
    limited.finish()
    assert full[0] == 0 and full[-1] == 1
    return was_over


def test_a_wait_with_a_limit_can_be_repeated(run_on_gloo_ranks):
    assert run_on_gloo_ranks(2, wait_for_a_late_rank) == [False, False]


def gathers_of_many_sizes() -> None:
    """Many in flight, beside messages of the user's between the same ranks; they are waited for in another order."""
    rank, group = dist.get_rank(), dist.group.WORLD
    size = group.size()
    ahead, behind = (rank + 1) % size, (rank - 1) % size
    for _ in range(20):
        got = torch.zeros(7)
        message = dist.irecv(got, behind)
        lengths = [1, 300_000, 17, 50_000, 40_000]
        started = []
        for length in lengths:
            full = torch.zeros(size * length)
            started.append((length, full, start_gather(full, torch.full((length,), float(rank)), group)))
        sent = dist.isend(torch.full((7,), float(rank)), ahead)
        for length, full, work in reversed(started):
            work.wait()
            assert torch.equal(full, torch.arange(float(size)).repeat_interleave(length))
        message.wait()
        sent.wait()
        assert got.tolist() == [float(behind)] * 7


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_gathers_of_many_sizes_are_told_apart(run_on_gloo_ranks, num_ranks):
    run_on_gloo_ranks(num_ranks, gathers_of_many_sizes)


def drop_a_gather_that_has_started() -> None:
    """As of a unit that is gathered ahead and then not needed. The first rank drops its own before the other comes."""
    group, rank = dist.group.WORLD, dist.get_rank()
    store = dist.distributed_c10d._get_default_store()
    for turn in range(3):
        if rank == 1:
            store.wait([f"dropped {turn}"])
        full = torch.full((2**18,), -1.0)
        own = full.chunk(2)[rank].fill_(rank)
        start_gather(full, own, group)
        del full, own
        if rank == 0:
            store.set(f"dropped {turn}", "1")
        others = [torch.full((2**18,), -2.0) for _ in range(4)]  # where the dropped one was, perhaps
        full = torch.zeros(2**18)
        start_gather(full, full.chunk(2)[rank].fill_(rank), group).wait()
        assert torch.equal(full, torch.arange(2.0).repeat_interleave(2**17))
        assert all((other == -2).all() for other in others)


def test_a_gather_that_nobody_waits_for_ends_by_itself(run_on_gloo_ranks):
    run_on_gloo_ranks(2, drop_a_gather_that_has_started)


def test_the_interpreter_ends_while_a_gather_is_in_flight():
    script = """
from types import SimpleNamespace
from graphshard._compat_gloo import GatherWork
kept = GatherWork([SimpleNamespace(wait=lambda: None)])
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_wait_that_is_interrupted_can_be_repeated():
    def interrupt() -> None:
        raise KeyboardInterrupt

    waited = []
    messages = [interrupt, lambda: waited.append("second"), lambda: waited.append("third")]
    work = GatherWork([SimpleNamespace(wait=wait) for wait in messages])
    with pytest.raises(KeyboardInterrupt):
        work.wait()
    work.wait()
    assert waited == ["second", "third"]


def test_tensors_of_gpus_are_gathered_in_gloos_own_way(monkeypatch):
    monkeypatch.setattr(_compat_gloo, "gather_single", lambda *args, **kwargs: "gloo's")
    gloo = SimpleNamespace(name=lambda: "gloo")
    group = SimpleNamespace(size=lambda: 2, _get_backend=lambda device: gloo)
    with FakeTensorMode():
        gathered = torch.empty(2**16, device="cuda")
    assert start_gather(gathered, gathered.chunk(2)[0], group) == "gloo's"


def test_another_backend_gets_what_torch_does(fake_group):
    fake_group(2)
    assert gathered(torch.ones(3, 2)).shape == (6, 2)
    start_gather(torch.ones(6, 2), torch.ones(3, 2), dist.group.WORLD).wait()
