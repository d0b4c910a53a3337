"""Start and stop the ranks of an example: process group, device, mesh and CPU threads.

Under torchrun the ranks come from its environment variables; plain `python example.py` is one rank. Machines
with GPUs run one NCCL rank per GPU, others run gloo on the CPU. `Ranks.control` is a gloo group on every
machine: small host-side messages (losses, stop flags, waits with a time limit) go there, apart from training.
"""

import contextlib
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(minutes=10)
SECONDS_FOR_RANK_0 = 10


class UsageError(ValueError):
    """A mistake in options or in the run's folder; the message says what to do. Rank 0 prints it."""


def launched_rank() -> int:
    """This process's rank, known before the process group exists."""
    return int(os.environ.get("RANK", "0"))


def launched_world_size() -> int:
    """Number of ranks, known before the process group exists."""
    return int(os.environ.get("WORLD_SIZE", "1"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """This process among all ranks, with what it needs to talk to the others."""

    rank: int
    world_size: int
    device: torch.device
    mesh: DeviceMesh
    control: dist.ProcessGroup

    def rows_of(self, batch: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """This rank's rows of a batch of all ranks, on this rank's device."""
        return tuple(part.chunk(self.world_size)[self.rank].to(self.device) for part in batch)

    def mean_over_ranks(self, value: float) -> float:
        """Mean of a number over the ranks."""
        return self.sum_over_ranks([value])[0] / self.world_size

    def sum_over_ranks(self, values: list[float]) -> list[float]:
        """Sum each number over the ranks (float64, on the control group)."""
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total, group=self.control)
        return total.tolist()

    def gather_on_all(self, value: Any) -> list[Any]:
        """The given picklable value of every rank, in rank order, on every rank."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.control)
        return values

    def from_rank_0(self, make: Callable[[], Any]) -> Any:
        """Call `make` on rank 0 only and return its (picklable) result on every rank."""
        box = [make() if self.rank == 0 else None]
        dist.broadcast_object_list(box, src=0, group=self.control)
        return box[0]

    def only_on_rank_0(self, make: Callable[[], T]) -> T | None:
        """Call `make` on rank 0; a `UsageError` it raises is raised on every rank."""
        result, mistake = None, None
        if self.rank == 0:
            try:
                result = make()
            except UsageError as error:
                mistake = str(error)
        mistake = self.from_rank_0(lambda: mistake)
        if mistake is not None:
            raise UsageError(mistake)
        return result

    def say(self, text: str) -> None:
        """Print a line on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def wait_for_all(self, limit: timedelta = COLLECTIVE_TIMEOUT) -> None:
        """Wait until every rank is here; an error names the ranks that are not here within the limit."""
        dist.monitored_barrier(group=self.control, timeout=limit, wait_all_ranks=True)


def _device_for(local_rank: int, local_world_size: int) -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    if local_world_size > torch.cuda.device_count():
        raise UsageError(
            f"{local_world_size} ranks on this machine but {torch.cuda.device_count()} GPUs: start torchrun "
            f"with --nproc-per-node {torch.cuda.device_count()}, or set CUDA_VISIBLE_DEVICES= to use the CPU"
        )
    return torch.device("cuda", local_rank)


def _share_cpu_cores(local_world_size: int) -> None:
    """Give each rank of this machine its part of the cores; more threads than cores only slow each other."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(max(1, num_cores // local_world_size))


@contextlib.contextmanager
def running_ranks() -> Iterator[Ranks]:
    """Join the other ranks, hand out this process's `Ranks`, and leave the process group at the end."""
    rank, world_size = launched_rank(), launched_world_size()
    local_rank, local_world_size = (
        int(os.environ.get(k, d)) for k, d in (("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 1))
    )
    device = _device_for(local_rank, local_world_size)
    _share_cpu_cores(local_world_size)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    if world_size == 1:
        dist.init_process_group(
            backend, store=dist.HashStore(), rank=0, world_size=1, timeout=COLLECTIVE_TIMEOUT
        )
    else:
        dist.init_process_group(backend, timeout=COLLECTIVE_TIMEOUT)
    try:
        yield Ranks(
            rank=rank,
            world_size=world_size,
            device=device,
            mesh=init_device_mesh(device.type, (world_size,), mesh_dim_names=("shard",)),
            control=dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT),
        )
    finally:
        dist.destroy_process_group()


def run_example(main: Callable[[], bool]) -> None:
    """Run `main` and exit: 0 if it returns True, 1 if a check failed (False), 2 on a `UsageError`."""
    try:
        passed = main()
    except UsageError as error:
        exit_with_mistake(f"error: {error}")
    sys.exit(0 if passed else 1)


def exit_with_mistake(message: str) -> NoReturn:
    """Exit with 2, which every rank does by itself for the same mistake; only rank 0 speaks.

    torchrun ends all ranks as soon as one has failed, so the silent ones leave rank 0 time to speak.
    """
    if launched_rank() == 0:
        print(message, file=sys.stderr, flush=True)
    else:
        time.sleep(SECONDS_FOR_RANK_0)
    sys.exit(2)
