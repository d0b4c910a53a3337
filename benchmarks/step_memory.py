"""Tensor memory of one training step on the CPU, from an allocator that counts.

Compiled code, eager code and collectives' buffers all allocate through torch's CPU allocator, so its count
gives a peak that does not depend on who runs the step, or on which thread. Scratch space inside gloo is not seen.
"""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch._inductor.cpp_builder import get_cpp_compiler
from torch.distributed.tensor import DTensor

NUM_COUNTED_STEPS = 10
SETTLE_S = 0.05  # gloo's threads let go of what the step before had sent
SOURCE = Path(__file__).with_name("counting_allocator.cpp")
TORCH = Path(torch.__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMemory:
    """Bytes on one rank: the peak above the start of the step, and what the step did not free."""

    peak_bytes: int
    left_bytes: int


def local_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes this rank holds of `tensors`: a DTensor counts its local shard."""
    total = 0
    for tensor in tensors:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        total += local.numel() * local.element_size()
    return total


def optimizer_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Local bytes of every tensor in the optimizer's state."""
    states = optimizer.state.values()
    return local_bytes(value for state in states for value in state.values() if isinstance(value, Tensor))


@functools.cache
def counting_allocator() -> ctypes.CDLL:
    """The allocator of counting_allocator.cpp, compiled, and in use from the first call on."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder, "counting_allocator.so")
        command = [get_cpp_compiler(), "-std=c++20", "-O2", "-shared", "-fPIC", f"-I{TORCH / 'include'}"]
        command += [str(SOURCE), "-o", str(library), f"-L{TORCH / 'lib'}", "-lc10"]
        subprocess.run(command, check=True)
        loaded = ctypes.CDLL(str(library))
    loaded.read_live_bytes.restype = loaded.take_peak_bytes.restype = ctypes.c_int64
    loaded.start_counting()
    return loaded


def _count_step(step: Callable[[], object]) -> StepMemory:
    counting = counting_allocator()
    time.sleep(SETTLE_S)
    before = counting.read_live_bytes()
    counting.take_peak_bytes()
    step()
    left = counting.read_live_bytes() - before
    return StepMemory(peak_bytes=counting.take_peak_bytes() - before, left_bytes=left)


def count_steps(step: Callable[[], object], num_steps: int = NUM_COUNTED_STEPS) -> list[StepMemory]:
    """Run `step` a few times and count what each run allocates and frees.

    Frees of memory allocated before the first step that is counted are not seen, so a step has to start
    without gradients (the one before ends with `zero_grad(set_to_none=True)`).
    """
    return [_count_step(step) for _ in range(num_steps)]


def measure_step_memory(step: Callable[[], object]) -> StepMemory:
    """The lowest of a few steps' peaks, counted by :func:`count_steps`.

    Gloo's threads sometimes let go of a collective's buffer after compute did: hence the lowest.
    """
    return min(count_steps(step), key=lambda memory: (memory.peak_bytes, memory.left_bytes))
