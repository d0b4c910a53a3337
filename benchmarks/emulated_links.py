"""A process group whose collectives take the time that a cost model says: many ranks' links on one device.

One process is rank 0 of all. A collective runs on a stream of its own, as NCCL's does: it waits for the stream that
starts it, moves the bytes that this rank would receive (copies of its own, as the other ranks would send), and spins
until its time is over. Reductions take this rank's own part, as if all ranks had equal gradients. On a CPU collectives
are done at once and take no time: that serves to try a program where there is no GPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

#: Seconds of a collective, from its kind and the bytes of the larger of its tensors.
Price = Callable[[str, int], float]

#: Bytes/s of the copies, which are part of a collective's time.
_COPY_RATE = 2e12

#: Spins for tenths of microseconds of the GPU's own timer, whatever clock its cores have.
_SPIN = r"""
extern "C" __global__ void spin(int tenths) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    } while (now - start < 100ull * tenths);
}
"""


_NUMBERS = itertools.count()


@dataclass(slots=True)
class LinkLog:
    """What ran: kind, bytes and seconds asked for, of each collective while ``is_on``."""

    is_on: bool = False
    rows: list[tuple[str, int, float]] | None = None


class _Work(dist._Work):
    """A collective under way. ``wait`` makes the caller's stream wait; its tensors live until then."""

    def __init__(self, end: torch.cuda.Event | None, held: Sequence[Tensor]) -> None:
        super().__init__()
        self._end, self._held = end, held
        self._future: torch.futures.Future[Any] = torch.futures.Future()
        self._future.set_result(None)

    def wait(self, timeout: Any = None) -> bool:
        if self._end is not None:
            torch.cuda.current_stream().wait_event(self._end)
        self._held = ()
        return True

    def is_completed(self) -> bool:
        return self._end is None or self._end.query()

    def get_future(self) -> torch.futures.Future[Any]:
        return self._future


class EmulatedGroup(dist.ProcessGroup):
    """Rank 0 of ``size`` ranks; ``price`` may be changed at any time, and 0 seconds means copies alone."""

    def __init__(self, size: int, device: torch.device, price: Price) -> None:
        super().__init__(0, size)
        self.num_ranks, self.price, self.log, self._name = size, price, LinkLog(), ""
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._spin = torch.cuda._compile_kernel(_SPIN, "spin") if self._stream is not None else None

    def size(self) -> int:
        return self.num_ranks

    # The base class keeps its name in its backends, and has none here.

    def getBackendName(self) -> str:  # noqa: N802
        return "fake"

    def getGroupName(self) -> str:  # noqa: N802
        return self._name

    def setGroupName(self, name: str) -> None:  # noqa: N802
        self._name = name

    group_name = property(getGroupName)

    def _run(self, kind: str, num_bytes: int, held: Sequence[Tensor], copy: Callable[[], None]) -> _Work:
        seconds = self.price(kind, num_bytes)
        if self.log.is_on and self.log.rows is not None:
            self.log.rows.append((kind, num_bytes, seconds))
        if self._stream is None or self._spin is None:
            copy()
            return _Work(None, held)
        self._stream.wait_stream(torch.cuda.current_stream())
        end = torch.cuda.Event()
        with torch.cuda.stream(self._stream):
            rest = seconds - num_bytes / _COPY_RATE
            if rest > 0:
                self._spin((1, 1, 1), (1, 1, 1), (max(round(rest * 1e7), 1),))
            copy()
            end.record()
        return _Work(end, held)

    # One method a collective, by torch's names in 2.11 and since 2.13.

    def _allgather_base(self, output: Tensor, part: Tensor, opts: Any = None) -> _Work:
        def copy() -> None:
            output.view(self.num_ranks, -1).copy_(part.reshape(1, -1).expand(self.num_ranks, -1))

        return self._run("all_gather", output.nbytes, (output, part), copy)

    def _reduce_scatter_base(self, output: Tensor, whole: Tensor, opts: Any = None) -> _Work:
        def copy() -> None:
            own = whole.view(self.num_ranks, -1)[0].view_as(output)
            if opts is not None and opts.reduceOp == dist.ReduceOp.SUM:
                torch.mul(own, self.num_ranks, out=output)
            else:
                output.copy_(own)

        return self._run("reduce_scatter", whole.nbytes, (output, whole), copy)

    def allgather(self, outputs: Sequence[Sequence[Tensor]], parts: Sequence[Tensor], opts: Any = None) -> _Work:
        def copy() -> None:
            for each, part in zip(outputs, parts, strict=True):
                for output in each:
                    output.copy_(part)

        held = [*parts, *(output for each in outputs for output in each)]
        return self._run("all_gather", sum(output.nbytes for each in outputs for output in each), held, copy)

    def allgather_into_tensor_coalesced(
        self, outputs: Sequence[Tensor], parts: Sequence[Tensor], opts: Any = None
    ) -> _Work:
        works = [self._allgather_base(output, part, opts) for output, part in zip(outputs, parts, strict=True)]
        return works[-1]

    def reduce_scatter_tensor_coalesced(
        self, outputs: Sequence[Tensor], wholes: Sequence[Tensor], opts: Any = None
    ) -> _Work:
        works = [
            self._reduce_scatter_base(output, whole, opts) for output, whole in zip(outputs, wholes, strict=True)
        ]
        return works[-1]

    def allreduce(self, tensors: Sequence[Tensor], opts: Any = None) -> _Work:
        def copy() -> None:
            if opts is None or opts.reduceOp == dist.ReduceOp.SUM:
                for tensor in tensors:
                    tensor.mul_(self.num_ranks)

        return self._run("all_reduce", sum(tensor.nbytes for tensor in tensors), tensors, copy)

    def broadcast(self, tensors: Sequence[Tensor], opts: Any = None) -> _Work:
        return self._run("broadcast", sum(tensor.nbytes for tensor in tensors), tensors, lambda: None)

    def barrier(self, opts: Any = None) -> _Work:
        return _Work(None, ())

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced
    allreduce_coalesced = allreduce


def _gather_into(part: Tensor, num_ranks: int, group_name: str, *, out: Tensor) -> Tensor:
    """``all_gather_into_tensor_out``, whose C++ form calls what a group written in Python cannot give."""
    work = c10d._resolve_process_group(group_name)._allgather_base(out, part)
    torch._C._distributed_c10d._register_work(out, work)
    return out


@contextmanager
def emulated_ranks(size: int, device: torch.device, price: Price) -> Iterator[EmulatedGroup]:
    """The default process group: rank 0 of ``size``. Others are asked for nothing, as in torch's fake group."""
    group = EmulatedGroup(size, device, price)
    name = f"emulated{next(_NUMBERS)}"
    dist.Backend.register_backend(name, lambda *_: group, devices=["cpu", "cuda"])
    dist.init_process_group(name, store=dist.HashStore(), rank=0, world_size=size)
    library = torch.library.Library("_c10d_functional", "IMPL")
    library.impl("all_gather_into_tensor_out", _gather_into, device.type.upper())
    try:
        # graphshard asks no other ranks for anything where the group is called a fake one.
        c10d._world.pg_map[group] = ("fake", c10d._world.pg_map[group][1])
        yield group
    finally:
        library._destroy()
        dist.destroy_process_group()
